"""The pipeline on two and on four gloo processes, against a plain PyTorch loop over the same batches."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import AverageWeights, GradientClipping, NonFiniteGuard, Pruning, SpikeGuard
from lightning_speedkit.parallel.pipeline import PipelineStrategy
from tests.two_ranks import on_ranks, on_two_ranks

SCHEDULES: tuple[Any, ...] = ("gpipe", "1f1b", "interleaved")
EPOCHS = {1: 3, 3: 7}  # 24 steps, and 21 of which every third has a short window
SAMPLES, BATCH = 58, 8  # the last batch has 2 samples, fewer than the micro-batches


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)
        )
        self.seen: list[float] = []
        self.checked: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("checked", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
    return x, x.sum(1, keepdim=True)


def _loader(replica: int = 0, replicas: int = 1) -> DataLoader[Any]:
    x, y = _data()
    end = SAMPLES // replicas * replicas
    return DataLoader(TensorDataset(x[replica:end:replicas], y[replica:end:replicas]), batch_size=BATCH // replicas)


def _trainer(strategy: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 3,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    return Trainer(strategy=strategy, **{**quiet, **options})


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _plain(
    factor: int = 1, epochs: int | None = None, clip: float | None = None, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[float]]:
    """One process, whole batches; divides by the factor also in the short window, as Lightning does."""
    model, (x, y), losses = Net().to(dtype), [part.to(dtype) for part in _data()], []
    optimizer = model.configure_optimizers()
    rows = [slice(start, start + BATCH) for start in range(0, SAMPLES, BATCH)]
    for _ in range(epochs or EPOCHS[factor]):
        for start in range(0, len(rows), factor):
            optimizer.zero_grad()
            for taken in rows[start : start + factor]:
                loss = nn.functional.mse_loss(model.net(x[taken]), y[taken])
                losses.append(float(loss.detach()))
                (loss / factor).backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return _weights(model), losses


def _close(found: list[Tensor], expected: list[Tensor], most: float = 1e-6) -> None:
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) <= most


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in SCHEDULES:
        for factor, epochs in EPOCHS.items():
            model, run = (
                Net(),
                _trainer(PipelineStrategy(schedule=kind), max_epochs=epochs, accumulate_grad_batches=factor),
            )
            run.fit(model, _loader())
            found[f"{kind} {factor}"] = _weights(model), model.seen
    model, run = Net(), _trainer(PipelineStrategy(split_points=[2]), gradient_clip_val=0.05)
    run.fit(model, _loader(), _loader())
    found["clip"] = _weights(model)
    found["samples"] = float(run.callback_metrics["samples"])
    found["checked"] = float(run.callback_metrics["checked"])
    found["test"] = run.test(model, _loader(), verbose=False)[0]["checked"]
    shared = Shared()
    shared.example_input_array = torch.ones(4, 3)
    shared.forward = lambda x: shared.net(x)  # type: ignore[method-assign, misc]
    _trainer(PipelineStrategy(), max_epochs=1).fit(shared, _loader())
    found["shared"] = _weights(shared)
    found["predict"] = torch.cat(run.predict(model, _loader()))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def runs() -> Any:
    return on_two_ranks(_runs, timeout=60.0)


@pytest.mark.parametrize("factor", EPOCHS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_weights_and_logged_losses_equal_one_process(runs: Any, kind: str, factor: int) -> None:
    weights, losses = _plain(factor)
    for rank in runs:
        _close(rank[f"{kind} {factor}"][0], weights)
        assert rank[f"{kind} {factor}"][1] == pytest.approx(losses, rel=1e-4)
    assert runs[0][f"{kind} {factor}"][1] == runs[1][f"{kind} {factor}"][1]


def test_gradients_are_clipped_by_the_norm_over_all_stages(runs: Any) -> None:
    weights, _ = _plain(clip=0.05)
    for rank in runs:
        _close(rank["clip"], weights)


def test_validation_test_and_predict_give_all_ranks_the_result_of_all_layers(runs: Any) -> None:
    model, (x, y) = Net(), _data()
    for parameter, value in zip(model.parameters(), _plain(clip=0.05)[0], strict=True):
        parameter.data.copy_(value)
    expected = model.net(x).detach()
    for rank in runs:
        assert rank["samples"] == SAMPLES % BATCH  # those of the last batch, summed over its micro-batches
        torch.testing.assert_close(rank["predict"], expected)
        for name in ("checked", "test"):
            assert rank[name] == pytest.approx(float(nn.functional.mse_loss(expected, y)), rel=1e-4)


def test_a_module_that_stands_in_the_chain_several_times(runs: Any) -> None:
    model, (x, y) = Shared(), _data()
    optimizer = model.configure_optimizers()
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model.net(x[start : start + BATCH]), y[start : start + BATCH]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for rank in runs:
        _close(rank["shared"], _weights(model))


def _saved(folder: str) -> Any:
    path = str(Path(folder, "half.ckpt"))
    model, run = Net(), _trainer(PipelineStrategy(schedule="interleaved"), max_epochs=2)

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    run.callbacks.append(Save())  # type: ignore[attr-defined]
    run.fit(model, _loader())
    resumed = Net()
    for parameter in resumed.parameters():
        parameter.data.zero_()
    _trainer(PipelineStrategy(), max_epochs=4).fit(resumed, _loader(), ckpt_path=path, weights_only=True)
    return _weights(model), _weights(resumed)


def test_one_checkpoint_for_the_plain_module_and_for_resuming() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = on_two_ranks(_saved, folder, timeout=60.0)
        checkpoint = torch.load(Path(folder, "half.ckpt"), weights_only=True)
        plain = Net()
        plain.load_state_dict(checkpoint["state_dict"])
        optimizer = plain.configure_optimizers()
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        one = Net()
        run = _trainer("auto", devices=1, max_epochs=4)
        run.fit(one, _loader(), ckpt_path=str(Path(folder, "half.ckpt")), weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Net().state_dict())
    for half, resumed in found:
        _close(half, _plain(epochs=2)[0])
        _close(half, _weights(plain))
        _close(resumed, _plain(epochs=4)[0])
    _close(_weights(one), _plain(epochs=4)[0])
    assert len(optimizer.state) == len(list(plain.parameters()))


def _replicas() -> Any:
    found = {}
    for factor, epochs in EPOCHS.items():
        for precision in ("32-true", "64-true"):
            strategy = PipelineStrategy(pipeline_size=2, microbatches=2)
            options = {"max_epochs": epochs, "accumulate_grad_batches": factor, "precision": precision}
            model, run = Net(), _trainer(strategy, devices=4, **options)
            run.fit(model, _loader(run.global_rank // 2, 2))
            found[factor, precision] = _weights(model), strategy.distributed_sampler_kwargs
    return found


def test_two_pipelines_beside_each_other_equal_one_process() -> None:
    for rank, found in enumerate(on_ranks(4, _replicas, timeout=60.0)):
        for factor in EPOCHS:
            _close(found[factor, "64-true"][0], _plain(factor, dtype=torch.float64)[0], 1e-12)
            # a mean of two means is rounded otherwise than one mean: all weights together
            weights, expected = (
                nn.utils.parameters_to_vector(w) for w in (found[factor, "32-true"][0], _plain(factor)[0])
            )
            _close([weights], [expected])
            assert found[factor, "32-true"][1] == {"num_replicas": 2, "rank": rank // 2}


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        self.net[2].weight = self.net[0].weight


class Shared(Net):
    """One module without weights several times in the chain."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.Tanh()
        self.net = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 1), act)


class Short(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 1))


class Twice(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) + self.net(batch[0])).mean()  # type: ignore[no-any-return]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Searching(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Head(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)


class Never(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0].sum()


REFUSED: dict[str, tuple[type[Net], dict[str, Any], str]] = {
    "tied": (Tied, {}, "tied weights"),
    "short": (Short, {}, "2 stages are more than the 1 layers"),
    "twice": (Twice, {}, "calls the pipelined layers 2 times"),
    "never": (Never, {}, "does not call the pipelined layers"),
    "norm": (Normed, {}, "is a BatchNorm1d"),
    "manual": (Manual, {}, "manual optimization"),
    "search": (Searching, {}, "one optimizer that evaluates the loss once"),
    "head": (Head, {}, "'head.weight' is outside"),
    "missing": (Net, {"attribute": "body"}, "attribute='body' is no nn.Sequential of Net, which has 'net'"),
    "not sequential": (Net, {"attribute": "net.0"}, "attribute='net.0' is no nn.Sequential"),
    "points": (Net, {"split_points": [9]}, r"split_points=\[9\] must be 1 rising"),
    "empty stage": (Net, {"schedule": "interleaved", "split_points": [1, 2, 4]}, "has no parameter to train"),
    "world": (Net, {"pipeline_size": 3}, "2 processes do not make pipelines of 3"),
    "few": (Net, {"microbatches": 1}, "less than the 2 stages"),
}
ONE_STAGE_ONLY: dict[str, Callable[[], Callback]] = {
    "GradientClipping": lambda: GradientClipping(limit=1.0),
    "NonFiniteGuard": NonFiniteGuard,
    "SpikeGuard": SpikeGuard,
    "Pruning": lambda: Pruning(0.5),
    "AverageWeights": AverageWeights,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1),
}


def _refusals() -> dict[str, str]:
    found = {}
    for name, (kind, arguments, _) in REFUSED.items():
        try:
            _trainer(PipelineStrategy(**arguments)).fit(kind(), _loader())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    for name, make in ONE_STAGE_ONLY.items():
        try:
            _trainer(PipelineStrategy(), callbacks=[make()]).fit(Net(), _loader())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    try:
        _trainer(PipelineStrategy(), precision="16-true").fit(Net(), _loader())
    except Exception as error:
        found["precision"] = str(error)
    _trainer(PipelineStrategy(), precision="bf16-mixed", max_epochs=1).fit(Net(), _loader(), _loader())
    return found


@pytest.fixture(scope="module")
def refusals() -> Any:
    return on_two_ranks(_refusals, timeout=60.0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_trained_wrongly_is_refused_on_all_ranks(refusals: Any, name: str) -> None:
    for rank in refusals:
        assert rank[name].startswith("MisconfigurationException")
        assert re.search(REFUSED[name][2], rank[name]), rank[name]


@pytest.mark.parametrize("name", ONE_STAGE_ONLY)
def test_callbacks_that_would_see_one_stage_are_refused(refusals: Any, name: str) -> None:
    for rank in refusals:
        assert rank[name].startswith(f"MisconfigurationException: {name} works on all layers")


def test_float16_is_refused(refusals: Any) -> None:
    for rank in refusals:
        assert "precision='16-true' does not work in a pipeline" in rank["precision"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag' is unknown"),
        ({"microbatches": 0}, "microbatches=0 must be a whole number"),
        ({"microbatches": True}, "microbatches=True must be"),
        ({"pipeline_size": 1}, "pipeline_size=1 must be a whole number of at least 2"),
        ({"stages_per_rank": 2}, "does not go with schedule='1f1b'"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "does not go with schedule='interleaved'"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**arguments)


def _best(folder: str) -> tuple[list[str], list[bool]]:
    model = Net()
    checkpoint = ModelCheckpoint(folder, monitor="checked", mode="max", filename="{epoch}")  # it grows
    trainer = _trainer("speedkit_pipeline", callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(model, _loader(), _loader())
    decide, rank = trainer.strategy.reduce_boolean_decision, trainer.global_rank
    decided = [decide(True), decide(rank == 0), decide(rank == 0, all=False), decide(False, all=False)]
    return sorted(path.name for path in Path(folder).iterdir()), decided


def test_the_best_checkpoint_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for files, decided in on_two_ranks(_best, str(tmp_path)):
        assert files == ["epoch=2.ckpt"]
        assert decided == [True, False, True, False]
