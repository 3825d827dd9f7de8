"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.clip import GradientClipping
from lightning_speedkit.optimize.lr_range import LRRangeTest
from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.optimizer_choice import OptimizerChoice, ScheduleChoice
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from lightning_speedkit.optimize.weight_averaging import AverageWeights
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]


def _preset(name: str, summary: str, part: Part, needs: tuple[str, ...] = ()) -> Preset:
    return Preset(name=name, kind="optimize", summary=summary, patch=TrainerPatch(callbacks=(part,)), needs=needs)


def _optimizer(name: str, summary: str, needs: tuple[str, ...] = ()) -> Preset:
    return _preset(name, summary, Part(OptimizerChoice, {"optimizer": name}), needs)


def _schedule(name: str, summary: str) -> Preset:
    return _preset(name, summary, Part(ScheduleChoice, {"schedule": name}))


PRESETS: tuple[Preset, ...] = (
    _preset(
        "accumulate-4",
        "One optimizer step per 4 batches, with the gradient of one batch of all their samples.",
        Part(AccumulationScheduler, {"schedule": 4}),
    ),
    _preset(
        "accumulate-labels-4",
        "One optimizer step per 4 batches; every label that is not ignored weighs the same.",
        Part(AccumulationScheduler, {"schedule": 4, "count": "labels"}),
    ),
    _preset(
        "batch-256",
        "As many batches per optimizer step as make 256 samples over all devices.",
        Part(AccumulationScheduler, {"target_batch": 256}),
    ),
    _preset(
        "auto-micro-batch",
        "A batch that does not fit into memory is computed in smaller pieces, with the gradient of the whole batch.",
        Part(AutoMicroBatch, {}),
    ),
    _preset(
        "auto-micro-batch-labels",
        "The same, for a loss that is a mean over labels: each label that is not ignored weighs the same.",
        Part(AutoMicroBatch, {"count": "labels"}),
    ),
    _preset(
        "clip-norm",
        "Gradients clipped to a common norm of 1, and the norm logged.",
        Part(GradientClipping, {"by": "norm", "limit": 1.0}),
    ),
    _preset(
        "clip-zclip",
        "Gradient norms far above the run's own mean are cut down (ZClip).",
        Part(GradientClipping, {"by": "zclip"}),
    ),
    _preset(
        "guard-non-finite",
        "Steps with NaN or infinite gradients are skipped and counted.",
        Part(NonFiniteGuard, {}),
    ),
    _preset("guard-spikes", "Steps whose loss spikes are skipped and counted.", Part(SpikeGuard, {})),
    _preset(
        "guard-rollback",
        "A loss spike brings back the weights of up to 100 steps ago, in a short run of a few.",
        Part(SpikeGuard, {"action": "rollback"}),
    ),
    _optimizer("adamw", "Fused AdamW in place of your module's optimizer of the Adam family, at its learning rate."),
    _optimizer("adam", "Fused Adam in place of your module's optimizer of the Adam family, at its learning rate."),
    _optimizer("sgd-momentum", "Fused SGD with momentum in place of your module's SGD, at its learning rate."),
    _preset(
        "adafactor",
        "Adafactor at a rate of 0.01: a row and a column of state per matrix.",
        Part(OptimizerChoice, {"optimizer": "adafactor", "lr": 0.01}),
    ),
    _optimizer("muon", "Muon for hidden matrices, AdamW for the rest, at the rate of your module's optimizer."),
    _optimizer("adamw-8bit", "AdamW with states of 8 bits, by torchao.", needs=("extra:ao",)),
    _optimizer(
        "adamw-cpu-offload",
        "AdamW with its states and its step on the host, by torchao.",
        needs=("cuda", "extra:ao"),
    ),
    _optimizer("schedule-free", "AdamW with an average of the weights in place of a schedule."),
    _schedule("warmup-cosine", "The learning rate rises over 5 % of the steps and falls along half a cosine."),
    _schedule("one-cycle", "The learning rate rises over 30 % of the steps and falls to nearly 0."),
    _schedule("linear", "The learning rate rises over 5 % of the steps and falls in a straight line."),
    _schedule("warmup-stable-decay", "The learning rate rises, stays, and falls over the last 20 % of the steps."),
    _schedule("inverse-sqrt", "The learning rate rises over 5 % of the steps and falls with one over their root."),
    _schedule("reduce-on-plateau", "The learning rate falls tenfold whenever val_loss stands still."),
    _preset("ema", "Validates and ends with an exponential moving average of the weights.", Part(AverageWeights, {})),
    _preset(
        "swa",
        "Ends with the mean of the weights after each of the last quarter of the epochs, two at least.",
        Part(AverageWeights, {"by": "swa", "unit": "epoch", "start": 0.75}),
    ),
    _preset(
        "lr-range-test",
        "Tries learning rates before training, suggests one, and puts everything back.",
        Part(LRRangeTest, {}),
    ),
)
