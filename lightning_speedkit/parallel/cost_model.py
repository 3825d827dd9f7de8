"""What a way to train on several devices costs: bytes on the wire, bytes of memory, seconds. Closed formulas.

Every byte count is what one rank sends in one step; with a ring it receives as many. ``ranks`` is the size of the
group that works together, ``size`` the bytes of the whole tensor, also where each rank holds a part of it.

Sources: ring collectives: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations". Memory and traffic of sharding: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054. Tensor parallel:
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053; its activations: Korthikanti et al. 2022, arXiv:2205.05198.
Pipeline: Huang et al. 2019, GPipe, arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473.
"""

from __future__ import annotations

__all__ = [
    "all_gather_bytes",
    "all_reduce_bytes",
    "compute_seconds",
    "ddp_bytes",
    "fsdp_bytes",
    "model_state_bytes",
    "pipeline_bubble",
    "pipeline_bytes",
    "reduce_scatter_bytes",
    "ring_seconds",
    "step_seconds",
    "tensor_parallel_activation_share",
    "tensor_parallel_bytes",
    "zero_bytes",
]

_MASTER_AND_ADAM_BYTES = 12  # float32 weights, mean and variance; ZeRO calls it K


def all_gather_bytes(ranks: int, size: float) -> float:
    """Bytes that each rank of a ring sends until all have the whole tensor of ``size`` bytes: (n-1)/n of it.

    >>> all_gather_bytes(4, 100)
    75.0
    """
    _check_count("ranks", ranks)
    return (ranks - 1) / ranks * _checked("size", size)


def reduce_scatter_bytes(ranks: int, size: float) -> float:
    """Bytes that each rank of a ring sends until each has its part of the sum: (n-1)/n of ``size``.

    >>> reduce_scatter_bytes(4, 100)
    75.0
    """
    return all_gather_bytes(ranks, size)


def all_reduce_bytes(ranks: int, size: float) -> float:
    """Bytes that each rank of a ring sends until all have the sum: 2(n-1)/n of ``size``, a scatter and a gather.

    >>> all_reduce_bytes(4, 100)
    150.0
    """
    return reduce_scatter_bytes(ranks, size) + all_gather_bytes(ranks, size)


def ddp_bytes(ranks: int, gradient_bytes: float) -> float:
    """Data parallel: one all-reduce of the gradients per step.

    >>> ddp_bytes(2, 1000)
    1000.0
    """
    return all_reduce_bytes(ranks, gradient_bytes)


def fsdp_bytes(ranks: int, parameter_bytes: float, gradient_bytes: float, *, gathers: int = 2) -> float:
    """Fully sharded: parameters gathered for the forward and again for the backward, gradients reduced to their part.

    With parameters and gradients of equal size that is 3(n-1)/n of it, half as much again as data parallel.
    ``gathers=1`` is for parameters that stay gathered between the two.

    >>> fsdp_bytes(4, 100, 100)
    225.0
    """
    _check_count("gathers", gathers)
    return gathers * all_gather_bytes(ranks, parameter_bytes) + reduce_scatter_bytes(ranks, gradient_bytes)


def tensor_parallel_bytes(ranks: int, blocks: int, activation_bytes: float) -> float:
    """Megatron's split: 4 all-reduces of a block's output per block and step, two forward and two backward.

    >>> tensor_parallel_bytes(2, 3, 10)
    120.0
    """
    return 4 * _checked("blocks", blocks) * all_reduce_bytes(ranks, activation_bytes)


def pipeline_bytes(stages: int, boundary_bytes: float) -> float:
    """What a stage sends at most: activations of the whole batch onwards, their gradients back. End stages send half.

    >>> pipeline_bytes(1, 10), pipeline_bytes(2, 10), pipeline_bytes(4, 10)
    (0.0, 10.0, 20.0)
    """
    _check_count("stages", stages)
    return float(min(stages - 1, 2) * _checked("boundary_bytes", boundary_bytes))


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """The part of the step in which a stage waits, with GPipe and 1F1B alike: (p-1)/(m+p-1).

    >>> pipeline_bubble(4, 12)
    0.2
    """
    _check_count("stages", stages)
    _check_count("micro_batches", micro_batches)
    return (stages - 1) / (micro_batches + stages - 1)


def zero_bytes(parameters: float, shards: int = 1, stage: int = 0) -> float:
    """Memory of one device for a model trained in half precision with Adam, ZeRO's three stages: 16 bytes a parameter.

    Two bytes for the parameter, two for its gradient, twelve for float32 weights, mean and variance. Stage 1 shards
    the twelve, stage 2 the gradients too, stage 3 everything.

    >>> zero_bytes(7.5e9) / 1e9, zero_bytes(7.5e9, 64, stage=3) / 1e9
    (120.0, 1.875)
    """
    _checked("parameters", parameters)
    _check_count("shards", shards)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r} must be 0, 1, 2 or 3.")
    held = (2, 2, _MASTER_AND_ADAM_BYTES)
    sharded_from = (3, 2, 1)
    return sum(
        parameters * size / (shards if stage >= first else 1) for size, first in zip(held, sharded_from, strict=True)
    )


def model_state_bytes(
    parameter_bytes: float, trainable_bytes: float, *, optimizer_states: float = 2, shards: int = 1
) -> float:
    """Parameters, gradients and optimizer state as Lightning holds them, in the type of the parameters.

    Its mixed precisions keep all of them in float32, which with Adam is 16 bytes a parameter again.

    >>> model_state_bytes(4 * 7.5e9, 4 * 7.5e9) / 1e9
    120.0
    """
    _check_count("shards", shards)
    _checked("optimizer_states", optimizer_states)
    held = _checked("parameter_bytes", parameter_bytes)
    return (held + (1 + optimizer_states) * _checked("trainable_bytes", trainable_bytes)) / shards


def tensor_parallel_activation_share(ranks: int) -> float:
    """The part of a block's activations that one rank keeps, without sequence parallelism: (10 + 24/t)/34.

    Of the 34 bytes per element of a transformer block 10 are inputs of norms and of the split layers and dropout
    masks, which every rank keeps (arXiv:2205.05198, equation 2 without the scores of attention, which fused kernels
    do not keep).

    >>> tensor_parallel_activation_share(1), round(tensor_parallel_activation_share(8), 3)
    (1.0, 0.382)
    """
    _check_count("ranks", ranks)
    return (10 + 24 / ranks) / 34


def ring_seconds(
    sent_bytes: float, hops: float, *, bytes_per_second: float, latency_seconds: float, rings: int = 1
) -> float:
    """Seconds of ring collectives: ``hops`` messages one after the other, while ``rings`` rings share the link.

    >>> ring_seconds(1e9, 2, bytes_per_second=1e9, latency_seconds=0.25)
    1.5
    """
    _check_count("rings", rings)
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second={bytes_per_second!r} must be above 0.")
    transfer = rings * _checked("sent_bytes", sent_bytes) / bytes_per_second
    return transfer + _checked("hops", hops) * _checked("latency_seconds", latency_seconds)


def compute_seconds(flops: float, devices: int, *, flops_per_second: float, utilization: float) -> float:
    """Seconds of computing, shared evenly, at the part of the peak that training reaches.

    >>> compute_seconds(8e12, 2, flops_per_second=10e12, utilization=0.4)
    1.0
    """
    _check_count("devices", devices)
    if not flops_per_second > 0 or not 0 < utilization <= 1:
        raise ValueError(
            f"flops_per_second={flops_per_second!r} must be above 0, and utilization={utilization!r} up to 1."
        )
    return _checked("flops", flops) / (devices * flops_per_second * utilization)


def step_seconds(compute: float, exposed: float, hidden: float, *, hideable: float, bubble: float = 0.0) -> float:
    """Seconds of a step: computing stretched by the bubble, what nothing hides, and what does not hide.

    ``hidden`` is traffic beside which the device computes; ``hideable`` is the part of the computing that it can run
    beside: 2/3 for gradients, which exist only in the backward, 1 for parameters gathered ahead.

    >>> step_seconds(3.0, 0.5, 4.0, hideable=2 / 3), step_seconds(3.0, 0.0, 1.0, hideable=2 / 3, bubble=0.25)
    (5.5, 4.0)
    """
    if not 0 <= bubble < 1:
        raise ValueError(f"bubble={bubble!r} must be from 0 to below 1.")
    return compute / (1 - bubble) + exposed + max(0.0, hidden - hideable * compute)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    if value < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")


def _checked(name: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r} must be 0 or more and finite.")
    return value
