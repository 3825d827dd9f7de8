"""What training with rounding gains over rounding after training: a network that reads digits, at few bits.

    python -m benchmarks.quantize_aware [--rounds 5] [--smoke]

Each round has a seed of its own, and trains the network anew, always for the same epochs: in float all the way, or with
``FakeQuantization`` in the last fifth of the steps, at the same rates. What is measured is the accuracy on the 400
digits of the test split, of the float weights (``float_accuracy``) and as integer inference computes
(``integer_accuracy``): weights and inputs on their grids, with ranges of inputs from the last batches of training in
both. So the network is that of ``weight_bits`` whatever kernel there is for it. ``agreement`` is the share of digits
that both answer alike, and ``seconds_per_step`` is the mean of the last fifth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.digits_networks import digits
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

if TYPE_CHECKING:
    import torch
    from torch import nn

_FUNCTION = "benchmarks.quantize_aware:measure"
BITS = (7, 4, 3)  # 7 is what int8 engines use of a weight on a CPU without VNNI
_BATCH = 32
_seeds: dict[str, int] = {}  # of the next run of each variant, so that a round has one seed


def measure(network: str, bits: int, aware: bool, epochs: int, limit: int | None = None) -> dict[str, float]:
    """Train ``network``, ``"CNN"`` or ``"MLP"``, and measure it in float and with weights of ``bits`` bits."""
    import time

    import torch

    from lightning_speedkit.compress.quantize_aware import FakeQuantization

    name = f"{network} {bits} {aware}"
    seed = _seeds[name] = _seeds.get(name, -1) + 1
    torch.manual_seed(seed)
    net = _network(network)
    images, labels = digits("train", limit)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    steps = epochs * -(-len(images) // _BATCH)
    start, step, began = steps - max(1, steps // 5), 0, 0.0
    fake: FakeQuantization | None = None
    for _ in range(epochs):
        for indices in torch.randperm(len(images)).split(_BATCH):
            if step == start:
                began = time.perf_counter()
                if aware:
                    fake = FakeQuantization(net, weight_bits=bits)
                    fake.switch_on()
            loss = torch.nn.functional.cross_entropy(net(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if fake is not None:
                fake.update()
            step += 1
    seconds = (time.perf_counter() - began) / (steps - start)
    if fake is not None:
        fake.remove()
    net.eval()
    told = _accuracies(net, bits, images)
    return {**told, "seconds_per_step": seconds}


def _accuracies(net: nn.Module, bits: int, images: torch.Tensor) -> dict[str, float]:
    import torch

    from lightning_speedkit.compress.quantize_aware import FakeQuantization

    inputs, labels = digits("test")
    with torch.no_grad():
        plain = net(inputs).argmax(dim=1)
        fake = FakeQuantization(net, weight_bits=bits)
        fake.switch_on()
        net(images[: 8 * _BATCH])  # calibration, the same for both
        fake.update()
        rounded = net(inputs).argmax(dim=1)
        fake.remove()
    return {
        "float_accuracy": float((plain == labels).float().mean()),
        "integer_accuracy": float((rounded == labels).float().mean()),
        "agreement": float((plain == rounded).float().mean()),
    }


def _network(name: str) -> nn.Module:
    from torch import nn

    if name == "MLP":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
        )
    first = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    second = [nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(256, 10))


def variants(epochs: int = 20, limit: int | None = None) -> list[Variant]:
    """Each network and number of bits, trained in float and with rounding, the one held against the other."""

    def variant(network: str, bits: int, aware: bool) -> Variant:
        told = {"network": network, "bits": bits, "aware": aware, "epochs": epochs, "limit": limit}
        names = [f"{network}, {bits} bits, {way}" for way in ("after training", "aware")]
        return Variant(names[aware], _FUNCTION, told, baseline=names[0])

    return [variant(net, bits, aware) for net in ("CNN", "MLP") for bits in BITS for aware in (False, True)]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Accuracy of a rounded network, trained with rounding or without.", rounds=5)
    smoke = {"epochs": 1, "limit": 128}
    run_benchmark(
        "quantize_aware",
        variants(**(smoke if arguments.smoke else {})),  # type: ignore[arg-type]
        rounds=arguments.rounds,
        warmup=0,  # a round is a seed
        in_process=True,
        higher_is_better=["float_accuracy", "integer_accuracy", "agreement"],
        results=arguments.results,
    )


if __name__ == "__main__":
    main()
