"""What QuantizeOnFitEnd chooses by itself, and what comes of it: the whole way, from the fit to the file loaded again.

    python -m benchmarks.quantize_choice [--rounds 1] [--networks DigitNet,MLP] [--smoke]

Each network is trained beforehand as ``benchmarks.quantize`` does, and the fit changes no weight, so that the metric
before is that of those weights. The callback measures accuracy on the validation split and may lose one point of it;
``test_accuracy`` and ``test_accuracy_before`` are those of the test split, of the network as it is loaded from the
folder, and of the float network. ``times_faster`` at batch 32 is measured here again, both called in turn on one
thread. ``float_layers`` were left in float to save the accuracy, ``int8`` is 1 if what was kept is no float32, and
``seconds`` is what the callback took.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.digits_networks import accuracy
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark
from benchmarks.quantize import EPOCHS, TIMM, network_digits, trained_network

_FUNCTION = "benchmarks.quantize_choice:measure"
_BATCH = 32


def measure(
    network: str, objective: str, epochs: int, calls: int, weights: str, limit: int | None = None
) -> dict[str, float]:
    """Let the callback quantize ``network``, load what it wrote, and hold that against the float network."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_speedkit import QuantizeOnFitEnd, load_quantized

    class Trained(LightningModule):
        def __init__(self, net: torch.nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.net(images)
            return scores

        def on_train_epoch_start(self) -> None:
            self.net.eval()  # so that batch norm learns nothing either

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Trained(trained_network(network, epochs, limit, Path(weights)))
    train, val = (
        DataLoader(TensorDataset(*network_digits(network, split, limit)), _BATCH, drop_last=split == "train")
        for split in ("train", "val")
    )
    images, labels = network_digits(network, "test", limit)
    with tempfile.TemporaryDirectory() as folder:
        callback = QuantizeOnFitEnd(objective=objective, max_metric_drop=0.01, folder=folder)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            **quiet,
            max_epochs=1,
            limit_train_batches=8,
            accelerator="cpu",
            enable_checkpointing=False,
            callbacks=[callback],
            default_root_dir=folder,
        )
        start = time.perf_counter()
        trainer.fit(module, train, val)
        took = time.perf_counter() - start
        report = callback.report
        module.eval()
        asked: Any = load_quantized(folder, module) if report is not None and report.kept else module
        with torch.no_grad():
            before = torch.cat([module(batch) for batch in images.split(_BATCH)])
            after = torch.cat([asked(batch) for batch in images.split(_BATCH)])
            times = _times_faster(module, asked, images[:_BATCH], calls)
    assert report is not None
    return {
        "int8": float(report.kept and report.scheme != "float32"),
        "times_faster": times,
        "bytes_before": float(report.bytes_before or 0),
        "bytes_after": float((report.bytes_after if report.kept else report.bytes_before) or 0),
        "test_accuracy_before": accuracy(before, labels),
        "test_accuracy": accuracy(after, labels),
        "float_layers": float(len(report.float_layers)),
        "seconds": took,
    }


def _times_faster(before: Any, after: Any, batch: Any, calls: int) -> float:
    ratios = []
    for _ in range(calls):
        start = time.perf_counter()
        before(batch)
        middle = time.perf_counter()
        after(batch)
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--networks", default=None, help=f"some of {','.join(EPOCHS)} (all)")
    options = benchmark_arguments("What QuantizeOnFitEnd chooses.", rounds=1, parent=parser)
    networks = options.networks.split(",") if options.networks else ["MLP"] if options.smoke else list(EPOCHS)
    with tempfile.TemporaryDirectory() as weights:
        run_benchmark(
            "quantize_choice",
            [
                Variant(
                    f"{network}, {objective}",
                    _FUNCTION,
                    {
                        "network": network,
                        "objective": objective,
                        "epochs": 1 if options.smoke else EPOCHS[network],
                        "calls": 3 if options.smoke else 100,
                        "weights": weights,
                        "limit": 64 if options.smoke else None,
                    },
                    requires="timm" if network in TIMM else "onnxruntime",
                )
                for network in networks
                for objective in ("latency", "size")
            ],
            rounds=options.rounds,
            warmup=options.warmup,
            forked=options.smoke,
            higher_is_better=["test_accuracy", "test_accuracy_before", "times_faster", "int8"],
            results=options.results,
            timeout=1200,
        )


if __name__ == "__main__":
    main()
