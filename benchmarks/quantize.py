"""What int8 gains and costs for inference on a CPU: a convolutional net, an MLP and an LSTM that read digits.

    python -m benchmarks.quantize [--rounds 7] [--smoke]

Each run trains the network anew, always from the same seed, makes the variant of it, and asks that for the digits of
the test split. ``bytes`` is the file that keeps it, ``seconds_batch_1`` and ``seconds_batch_64`` are medians of its
forward on one thread. The networks have 0.24 to 0.30 million parameters. ``DigitNet`` is the model of the demo and
reads images of 64 by 64 pixels, the others the 8 by 8 pixels that these were made from. A competent person folds batch
norm into the convolutions before inference; so int8, which does that too, is held against the folded network as well.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

if TYPE_CHECKING:
    import torch
    from torch import nn

_FUNCTION = "benchmarks.quantize:measure"
_BATCH = 64
EPOCHS = {"DigitNet": 8, "MLP": 20, "LSTM": 40}


def measure(network: str, way: str, epochs: int, calls: int, limit: int | None = None) -> dict[str, float]:
    """Train ``network`` and measure it as ``way``: ``"float"``, ``"folded"`` or ``"int8"``.

    ``calls`` is how often each forward is timed; ``limit`` takes that many digits per split.
    """
    import torch

    from lightning_speedkit.compress import quantize_model, save_quantized

    torch.manual_seed(0)
    model = _network(network)
    images, labels = _split(network, "train", limit)
    _train(model, images, labels, epochs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        if way == "int8":
            model, details = quantize_model(model, list(images[: 8 * _BATCH].split(_BATCH)))
            save_quantized(model, details.recipe, path)
        else:
            model = _folded(model) if way == "folded" else model
            torch.save(model.state_dict(), path)
        size = path.stat().st_size
    images, labels = _split(network, "test", limit)
    with torch.no_grad():
        # batch by batch: a layer that measures the range of its input measures that of the whole batch
        scores = torch.cat([model(batch) for batch in images.split(_BATCH)])
        return {
            "bytes": size,
            "seconds_batch_1": _median_seconds(model, images[:1], calls),
            "seconds_batch_64": _median_seconds(model, images[:_BATCH], calls),
            "test_accuracy": float((scores.argmax(dim=1) == labels).float().mean()),
        }


def _network(name: str) -> nn.Module:
    from torch import nn

    from lightning_speedkit.demo.model import DigitNet

    class RowReader(nn.Module):
        """Reads an image row by row."""

        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.LSTM(8, 256, batch_first=True)
            self.head = nn.Linear(256, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.rows(images.squeeze(1))[0][:, -1])
            return scores

    if name == "DigitNet":
        return DigitNet()
    if name == "MLP":
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(nn.Flatten(), *layers)
    return RowReader()


def _split(network: str, split: str, limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    import numpy
    import torch

    from lightning_speedkit.demo.digits import load_digits, render_digit, split_indices, to_network_input

    images, labels = load_digits()
    indices = split_indices(split)[:limit]
    if network == "DigitNet":
        pixels = torch.stack([torch.from_numpy(numpy.array(render_digit(images[index]))) for index in indices])
        inputs = to_network_input(pixels)
    else:
        inputs = torch.from_numpy(images[indices]).float() / 16
    return inputs.unsqueeze(1), torch.from_numpy(labels[indices]).long()


def _train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for indices in torch.randperm(len(images)).split(_BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def _folded(model: nn.Module) -> nn.Module:
    from torch import nn
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    model = copy.deepcopy(model)
    for part in list(model.modules()):
        children = list(part.named_children())
        for (name, layer), (norm, following) in itertools.pairwise(children):
            if isinstance(layer, nn.Conv2d) and isinstance(following, nn.BatchNorm2d):
                setattr(part, name, fuse_conv_bn_eval(layer, following))
                setattr(part, norm, nn.Identity())
    return model


def _median_seconds(model: nn.Module, batch: torch.Tensor, calls: int) -> float:
    for _ in range(max(3, calls // 10)):
        model(batch)
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        model(batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def variants(calls: int = 300, epochs: int | None = None, limit: int | None = None) -> list[Variant]:
    """Every network as it is and in int8, held against itself in float."""

    def variant(network: str, name: str, way: str, baseline: str) -> Variant:
        arguments = {
            "network": network,
            "way": way,
            "epochs": epochs or EPOCHS[network],
            "calls": calls,
            "limit": limit,
        }
        return Variant(f"{network}, {name}", _FUNCTION, arguments, f"{network}, {baseline}")

    told = []
    for network in EPOCHS:
        told.append(variant(network, "float", "float", "float"))
        # what two equal runs differ by: the noise to hold the others against
        told.append(variant(network, "float again", "float", "float"))
        told.append(variant(network, "int8", "int8", "float"))
        if network == "DigitNet":
            told.append(variant(network, "folded", "folded", "float"))
            told.append(variant(network, "int8 against folded", "int8", "folded"))
    return told


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Bytes, seconds and accuracy of int8 against float.", rounds=7)
    smoke = {"calls": 5, "epochs": 1, "limit": 128}
    run_benchmark(
        "quantize",
        variants(**(smoke if arguments.smoke else {})),
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        higher_is_better=["test_accuracy"],
        results=arguments.results,
    )


if __name__ == "__main__":
    main()
