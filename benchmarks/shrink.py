"""What removing half of the channels gains and costs: a convolutional net, an MLP and a transformer that read digits.

    python -m benchmarks.shrink [--rounds 7] [--smoke]

Each run trains the network anew, always from the same seed, with AdamW. ``shrunk`` then loses half of its channels (of
the transformer half of the units between its two Linear layers) and trains on for two epochs, with the same optimizer;
``whole`` trains on for those two epochs as it is. ``seconds_batch_1`` and ``seconds_batch_32`` are medians of the
forward on one thread, ``test_accuracy`` is that on the digits of the test split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.digits_networks import accuracy, digits, median_seconds, train_epoch
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

if TYPE_CHECKING:
    import torch
    from torch import nn

_FUNCTION = "benchmarks.shrink:measure"
_BATCH = 32
_EPOCHS_AFTER = 2
EPOCHS = {"CNN": 10, "MLP": 10, "transformer": 20}


def measure(network: str, way: str, epochs: int, calls: int, limit: int | None = None) -> dict[str, float]:
    """Train ``network`` and measure it as ``way``: ``"whole"`` or ``"shrunk"``.

    ``calls`` is how often each forward is timed; ``limit`` takes that many digits per split.
    """
    import torch

    from lightning_speedkit.compress.shrink import shrink_model

    torch.manual_seed(0)
    model = _network(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = digits("train", limit)
    for epoch in range(epochs + _EPOCHS_AFTER):
        if epoch == epochs and way == "shrunk":
            shrink_model(model, images[:2], 0.5, optimizers=[optimizer])
        train_epoch(model, optimizer, images, labels, _BATCH)
    model.eval()
    images, labels = digits("test", limit)
    with torch.no_grad():
        return {
            "seconds_batch_1": median_seconds(model, images[:1], calls),
            "seconds_batch_32": median_seconds(model, images[:_BATCH], calls),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "test_accuracy": accuracy(model(images), labels),
        }


def _network(name: str) -> nn.Module:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        """Two layers of width 256 on the eight rows of a digit."""

        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
            self.embed = nn.Linear(8, 256)
            self.position = nn.Parameter(torch.randn(1, 8, 256) * 0.02)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(256, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.layers(self.embed(images.squeeze(1)) + self.position).mean(dim=1))
            return scores

    if name == "CNN":
        return nn.Sequential(
            *_convolution(1, 32),
            *_convolution(32, 64),
            nn.MaxPool2d(2),
            *_convolution(64, 64),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4, 10),
        )
    if name == "MLP":
        hidden = [nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))
    return Transformer()


def _convolution(before: int, after: int) -> list[nn.Module]:
    from torch import nn

    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def variants(calls: int = 300, epochs: int | None = None, limit: int | None = None) -> list[Variant]:
    """Every network whole, once more for the noise, and shrunk."""

    def variant(network: str, name: str, way: str) -> Variant:
        arguments = {
            "network": network,
            "way": way,
            "epochs": EPOCHS[network] if epochs is None else epochs,
            "calls": calls,
            "limit": limit,
        }
        return Variant(f"{network}, {name}", _FUNCTION, arguments, f"{network}, whole", requires="torch_pruning")

    names = (("whole", "whole"), ("whole again", "whole"), ("shrunk", "shrunk"))
    return [variant(network, name, way) for network in EPOCHS for name, way in names]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Seconds, parameters and accuracy with half of the channels.", rounds=7)
    smoke = {"calls": 5, "epochs": 1, "limit": 64}
    run_benchmark(
        "shrink",
        variants(**(smoke if arguments.smoke else {})),
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        higher_is_better=["test_accuracy"],
        results=arguments.results,
    )


if __name__ == "__main__":
    main()
