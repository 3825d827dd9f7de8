"""A lighter copy of a trained network: what it saves, and how much of the accuracy comes back.

Two networks for the digits that ship with the package, the demo's convolutional one on images of 32 by 32 and an MLP of
2.2 million weights, are trained, and then lightened in several ways. Each variant tells weights and floating-point
operations, seconds of a forward pass of 32 images and of one (the network and its lighter copy in turns, on one
thread), and the accuracy on 400 images that training did not see: right after the change, after BatchNorm has seen the
training images again, and after the same few epochs of training. ``new start`` has the same lighter structure with
random weights and gets those few epochs too; ``distilled`` learns from the first network as well (Hinton et al., 2015,
T = 4, equal weights). ``trained on`` is the full network with the same further epochs. Each round has its own seed.

    python -m benchmarks.lighten [--rounds 5] [--smoke]
"""

from __future__ import annotations

from typing import Any

from benchmarks.digits_networks import accuracy, digits
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.lighten:measure"
_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "CNN": {
        "depthwise rank 1": {"kinds": ["depthwise"], "rank": 1},
        "depthwise half": {"kinds": ["depthwise"], "ratio": 0.5},
        "grouped half": {"kinds": ["grouped"], "ratio": 0.5},
        "low-rank half": {"kinds": ["low-rank"], "ratio": 0.5},
        "low-rank quarter": {"kinds": ["low-rank"], "ratio": 0.25},
        "any quarter": {"ratio": 0.25},
    },
    "MLP": {
        "low-rank half": {"kinds": ["low-rank"], "ratio": 0.5},
        "low-rank tenth": {"kinds": ["low-rank"], "ratio": 0.1},
    },
}
_ROUNDS: dict[tuple[str, str, str], int] = {}  # all variants have the seed of their round
_SHOWN = {"CNN": "any quarter", "MLP": "low-rank tenth"}


def measure(
    net: str, way: dict[str, Any] | None, mode: str = "warm", seed: int | None = None, epochs: int = 6, further: int = 2
) -> dict[str, float]:
    """Accuracies, costs and seconds of one variant; ``mode`` is ``"warm"``, ``"new"`` or ``"distilled"``."""
    import copy

    import torch
    from torch import nn

    from lightning_speedkit.architecture import apply_plan, lighten
    from lightning_speedkit.architecture.lighten_measure import count_flops, paired_seconds

    torch.set_num_threads(1)
    if seed is None:  # of this variant's next round
        key = (net, str(way), mode)
        seed = _ROUNDS[key] = _ROUNDS.get(key, -1) + 1
    torch.manual_seed(seed)
    train, test = _data(net)
    teacher = _network(net)
    _train(teacher, train, epochs, None)
    student: nn.Module = copy.deepcopy(teacher)
    if way is not None:
        plan = lighten(teacher, test[0][:32], **way, min_saving=None, skip=["*.6"] if net == "CNN" else ["6"])[1].plan
        student = apply_plan(teacher, plan, warm_start=mode != "new")
        if mode == "new":
            torch.manual_seed(seed + 1)
            student = apply_plan(_network(net), plan, warm_start=False)
    told = {
        "weights": float(sum(p.numel() for p in student.parameters())),
        "flops_per_sample": count_flops(student, test[0][:1]),
        "accuracy_at_once": _accuracy(student, test),
    }
    for key, rows in (("seconds_batch_32", test[0][:32]), ("seconds_batch_1", test[0][:1])):
        with torch.no_grad():
            teacher.eval(), student.eval()
            full, light = paired_seconds(lambda x=rows: teacher(x), lambda x=rows: student(x), rows.device, 0.5)
        told[key], told[f"speedup_{key.removeprefix('seconds_')}"] = light, full / light
    refreshed = copy.deepcopy(student).train()
    with torch.no_grad():
        for module in refreshed.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the mean over all batches
        for rows in train[0].split(64):
            refreshed(rows)
    told["accuracy_batch_norm_again"] = _accuracy(refreshed, test)
    _train(student, train, further, teacher if mode == "distilled" else None)
    told["accuracy_trained_on"] = _accuracy(student, test)
    return told


def _network(net: str) -> Any:
    from torch import nn

    from lightning_speedkit.demo.model import DigitNet

    if net == "CNN":
        return DigitNet()
    layers = [nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _data(net: str) -> Any:
    from torch.nn.functional import interpolate

    parts = []
    for split in ("train", "test"):
        images, labels = digits(split)
        images = images - 0.3
        shaped = interpolate(images, size=32, mode="bilinear") if net == "CNN" else images.flatten(1)
        parts.append((shaped, labels))
    return parts


def _train(net: Any, data: Any, epochs: int, teacher: Any) -> None:
    import torch
    from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(data[0])).split(64):
            scores = net(data[0][rows])
            loss = cross_entropy(scores, data[1][rows])
            if teacher is not None:
                with torch.no_grad():
                    wanted = softmax(teacher.eval()(data[0][rows]) / 4, dim=1)
                soft = kl_div(log_softmax(scores / 4, dim=1), wanted, reduction="batchmean")
                loss = (loss + 16 * soft) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _accuracy(net: Any, data: Any) -> float:
    import torch

    with torch.no_grad():
        return accuracy(net.eval()(data[0]), data[1])


def variants(smoke: bool = False) -> list[Variant]:
    """The full network, each way, and for one way of each network the two other starts."""
    short = {"epochs": 1, "further": 1} if smoke else {}
    made = []
    for net, ways in _WAYS.items():
        base = f"{net} trained on"
        made.append(Variant(base, _FUNCTION, {"net": net, "way": None, **short}))
        rows = [(name, "warm") for name in ways] + [(_SHOWN[net], "new"), (_SHOWN[net], "distilled")]
        for name, mode in rows:
            ending = {"warm": "", "new": ", new start", "distilled": ", distilled"}[mode]
            told = {"net": net, "way": ways[name], "mode": mode, **short}
            made.append(Variant(f"{net} {name}{ending}", _FUNCTION, told, baseline=base))
    return made


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("What a lighter copy of a network saves and loses.", rounds=5)
    run_benchmark(
        "lighten",
        variants(arguments.smoke),
        rounds=arguments.rounds,
        warmup=0,
        in_process=True,
        higher_is_better=[
            "accuracy_at_once",
            "accuracy_batch_norm_again",
            "accuracy_trained_on",
            "speedup_batch_32",
            "speedup_batch_1",
        ],
        results=arguments.results,
    )


if __name__ == "__main__":
    main()
