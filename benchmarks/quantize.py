"""What int8 gains and costs for inference on a CPU: six networks that read digits, by every engine.

    python -m benchmarks.quantize [--rounds 5] [--networks MLP,LSTM] [--smoke]

Each network is trained once from the same seed. Every run loads those weights in a fresh process, converts the
network by one engine on 256 training images, and asks it for the digits of the test split. ``bytes`` are the files
that keep it, ``seconds_batch_1`` and ``seconds_batch_32`` are medians of its forward on one thread, and
``relative_error`` is the distance of its scores from those of the float network. ONNX Runtime's own float32 is measured
beside its int8, because the runtime alone is faster than eager torch.

``DigitNet`` is the model of the demo; it and the networks of timm read images of 64 by 64 pixels, the others the 8 by 8
pixels that these were made from. ``MLP`` has three hidden layers of 1024, ``Encoder`` is ``nn.TransformerEncoder`` with
two layers of width 256, which reads an image row by row, as ``LSTM`` does.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.digits_networks import accuracy, digits, median_seconds, train_epoch
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

if TYPE_CHECKING:
    import torch
    from torch import nn

_FUNCTION = "benchmarks.quantize:measure"
_TRAIN_BATCH, _BATCH = 64, 32
EPOCHS = {"DigitNet": 8, "MLP": 20, "LSTM": 40, "Encoder": 12, "MobileNetV3-small": 10, "EfficientNet-B0": 6}
TIMM = {"MobileNetV3-small": "mobilenetv3_small_100", "EfficientNet-B0": "efficientnet_b0"}
ENGINES = (
    "onnxruntime-float32",
    "onnxruntime-static",
    "onnxruntime-dynamic",
    "torch-ao-static",
    "torch-ao-dynamic",
    "torchao-weight-int8",
)


def measure(
    network: str, engine: str | None, epochs: int, calls: int, weights: str, limit: int | None = None
) -> dict[str, float]:
    """Measure ``network`` as ``engine`` converts it; ``None`` is eager float32.

    ``calls`` is how often each forward is timed at most; ``limit`` takes that many digits per split; ``weights`` is a
    folder for the trained weights, which the first run fills.
    """
    import torch

    from lightning_speedkit.compress.calls import Call
    from lightning_speedkit.compress.engine import engine_named
    from lightning_speedkit.compress.float_copy import float_copy
    from lightning_speedkit.compress.quality import relative_error

    model = trained_network(network, epochs, limit, Path(weights))
    asked: Any = model
    if engine is None:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            size = Path(folder, "model.pt").stat().st_size
    else:
        images, _ = network_digits(network, "train", limit)
        batches = [Call("", (batch,), {}) for batch in images[: 8 * _BATCH].split(_BATCH)]
        converted = engine_named(engine).convert(float_copy(model), batches)
        asked, size = converted.module, converted.bytes
    images, labels = network_digits(network, "test", limit)
    with torch.no_grad():
        scores = torch.cat([asked(batch) for batch in images.split(_BATCH)])
        expected = torch.cat([model(batch) for batch in images.split(_BATCH)])
        return {
            "bytes": size,
            "seconds_batch_1": median_seconds(asked, images[:1], calls),
            "seconds_batch_32": median_seconds(asked, images[:_BATCH], calls),
            "test_accuracy": accuracy(scores, labels),
            "relative_error": relative_error([expected], [scores]),
        }


def _network(name: str) -> nn.Module:
    import torch
    from torch import nn

    from lightning_speedkit.demo.model import DigitNet

    class Recurrent(nn.Module):
        """Reads an image row by row."""

        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.LSTM(8, 256, batch_first=True)
            self.head = nn.Linear(256, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.rows(images.squeeze(1))[0][:, -1])
            return scores

    class Encoder(nn.Module):
        """Attends to the rows of an image."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 256), nn.Linear(256, 10)
            self.position = nn.Parameter(torch.randn(8, 256) * 0.02)
            layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            rows = self.embed(images.squeeze(1)) + self.position
            scores: torch.Tensor = self.head(self.encoder(rows).mean(dim=1))
            return scores

    if name in TIMM:
        import timm

        made: nn.Module = timm.create_model(TIMM[name], pretrained=False, num_classes=10, in_chans=1)
        return made
    if name == "DigitNet":
        return DigitNet()
    if name == "MLP":
        widths = [64, 1024, 1024, 1024]
        hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))
    return Recurrent() if name == "LSTM" else Encoder()


def network_digits(network: str, split: str, limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits of a split as ``network`` reads them."""
    import numpy
    import torch

    from lightning_speedkit.demo.digits import load_digits, render_digit, split_indices, to_network_input

    inputs, labels = digits(split, limit)
    if network == "DigitNet" or network in TIMM:
        images = load_digits()[0][split_indices(split)[:limit]]
        pixels = torch.stack([torch.from_numpy(numpy.array(render_digit(image))) for image in images])
        inputs = to_network_input(pixels).unsqueeze(1)
    return inputs, labels


def trained_network(network: str, epochs: int, limit: int | None, folder: Path) -> nn.Module:
    """The network with the weights that ``folder`` has, or is given now."""
    import torch

    torch.manual_seed(0)
    model = _network(network)
    path = folder / f"{network}-{epochs}-{limit}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    images, labels = network_digits(network, "train", limit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        train_epoch(model, optimizer, images, labels, _TRAIN_BATCH)
    torch.save(model.state_dict(), path)
    return model.eval()


def variants(
    weights: str,
    networks: list[str] | None = None,
    calls: int = 300,
    epochs: int | None = None,
    limit: int | None = None,
) -> list[Variant]:
    """Every network in eager float32 and by every engine, held against the first."""
    told = []
    for network in networks or EPOCHS:
        # what two equal runs differ by: the noise to hold the others against
        ways: list[tuple[str, str | None]] = [
            ("eager", None),
            ("eager again", None),
            *((name, name) for name in ENGINES),
        ]
        for name, engine in ways:
            arguments = {
                "network": network,
                "engine": engine,
                "epochs": epochs or EPOCHS[network],
                "calls": calls,
                "weights": weights,
                "limit": limit,
            }
            needs = "timm" if network in TIMM else "onnxruntime" if engine and "onnx" in engine else None
            told.append(Variant(f"{network}, {name}", _FUNCTION, arguments, f"{network}, eager", requires=needs))
    return told


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--networks", default=None, help=f"some of {','.join(EPOCHS)} (all)")
    arguments = benchmark_arguments("Bytes, seconds and accuracy of int8 against float.", rounds=5, parent=parser)
    networks = arguments.networks.split(",") if arguments.networks else None
    smoke: dict[str, Any] = {"calls": 3, "epochs": 1, "limit": 64, "networks": networks or ["MLP"]}
    with tempfile.TemporaryDirectory() as weights:
        run_benchmark(
            "quantize",
            variants(weights, **(smoke if arguments.smoke else {"networks": networks})),
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            forked=arguments.smoke,
            higher_is_better=["test_accuracy"],
            results=arguments.results,
        )


if __name__ == "__main__":
    main()
