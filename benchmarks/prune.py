"""What unstructured pruning keeps and costs: accuracy at the sparsity that was asked for, bytes, seconds.

    python -m benchmarks.prune [--rounds 7] [--smoke]

Each run trains an MLP of 0.3 million weights on the digits anew, always from the same seed and for the same steps.
``one-shot`` trains it densely and then sets the smallest weights to zero; ``gradual`` is the callback. Lightning's
``ModelPruning`` is asked for the same number at each epoch, as its examples do. ``zero_share`` is the share of zeros in
the weights of the layers, ``zipped_bytes`` the saved weights after ``zlib``, ``seconds_forward`` the median of a dense
forward of 32 digits on one thread, where zeros bring nothing, and ``seconds_per_step`` what a training step takes.
"""

from __future__ import annotations

import io
import time
import zlib
from typing import TYPE_CHECKING, Any

from benchmarks.digits_networks import accuracy, digits, median_seconds
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

if TYPE_CHECKING:
    import torch
    from torch import nn

_FUNCTION = "benchmarks.prune:measure"
_BATCH = 32


def measure(way: str, sparsity: float, epochs: int, width: int, calls: int) -> dict[str, float]:
    """Train the network and prune it in this ``way``: ``"dense"``, ``"one-shot"``, ``"lightning"`` or a criterion."""
    import torch
    from lightning.pytorch.callbacks import Callback, ModelPruning

    from lightning_speedkit.compress.prune import Pruning, prune_weights

    torch.manual_seed(0)
    images, labels = digits("train")
    callbacks: list[Callback] = []
    if way == "lightning":
        callbacks = [ModelPruning("l1_unstructured", amount=sparsity, make_pruning_permanent=True, verbose=0)]
    elif way in ("magnitude", "movement"):
        callbacks = [Pruning(sparsity, way)]
    net, seconds = _trained(images.flatten(1), labels, callbacks, epochs, width)
    if way == "one-shot":
        prune_weights(net, sparsity)
    images, labels = digits("test")
    images = images.flatten(1)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    weights = [layer.weight for layer in net.modules() if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        return {
            "test_accuracy": accuracy(net(images), labels),
            "zero_share": sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights),
            "zipped_bytes": len(zlib.compress(file.getvalue())),
            "seconds_forward": median_seconds(net, images[:_BATCH], calls),
            "seconds_per_step": seconds,
        }


def _trained(
    images: torch.Tensor, labels: torch.Tensor, callbacks: list[Any], epochs: int, width: int
) -> tuple[nn.Module, float]:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Digits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
            self.net = nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, enable_model_summary=False, **quiet)
    model = Digits()
    data = DataLoader(TensorDataset(images, labels), batch_size=_BATCH, shuffle=True)
    start = time.perf_counter()
    trainer.fit(model, data)
    return model.net.eval(), (time.perf_counter() - start) / trainer.global_step


def variants(smoke: bool = False) -> list[Variant]:
    """The dense network, and each way of pruning at three sparsities."""

    def variant(name: str, way: str, sparsity: float) -> Variant:
        size = {"epochs": 2, "width": 32, "calls": 2} if smoke else {"epochs": 15, "width": 512, "calls": 50}
        return Variant(name, _FUNCTION, {"way": way, "sparsity": sparsity, **size})

    told = [variant("dense", "dense", 0.0)]
    for sparsity in (0.8, 0.95, 0.98):
        told += [variant(f"one-shot {sparsity}", "one-shot", sparsity)]
        told += [variant(f"gradual {sparsity}", "magnitude", sparsity)]
    return [*told, variant("gradual, movement 0.95", "movement", 0.95), variant("ModelPruning 0.8", "lightning", 0.8)]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("What pruning keeps and costs.", rounds=7)
    run_benchmark(
        "prune",
        variants(arguments.smoke),
        baseline="dense",
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        higher_is_better=["test_accuracy"],
        results=arguments.results,
    )


if __name__ == "__main__":
    main()
