"""Keeps two snapshots, the newer one renewed every so many steps, so that one is always old enough to go back to.

What it does: a spike may show some steps after what caused it, so the newest snapshot may hold the harm already. Of
two, the older one is between one and two intervals old; before the first interval is over, and after a way back, there
is only one, which is younger. What it costs: the memory of two snapshots, which is used again and again, or two files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lightning_speedkit.optimize.snapshot import Snapshot

__all__ = ["SnapshotHistory", "snapshot_interval"]


def snapshot_interval(steps: float) -> int:
    """How many optimizer steps apart snapshots are in a run of so many: a hundredth, at least 3 and at most 50.

    Going back to the older of two snapshots then costs a fiftieth of the run at most, if that is 6 steps or more. Where
    nobody knows how many steps there are, Lightning says infinity or -1, and it is 50.

    >>> snapshot_interval(370), snapshot_interval(2000), snapshot_interval(float("inf"))
    (3, 20, 50)
    """
    return int(max(3, min(50, steps // 100))) if steps >= 0 else 50


class SnapshotHistory:
    """The last two snapshots of a run.

    Args:
        every: Optimizer steps between two snapshots. The first one is taken before the first step.
        folder: Where they are written; in host memory if ``None``.
        rank: Part of the names of the files.

    >>> weight = nn.Linear(1, 1)
    >>> optimizer, history = torch.optim.SGD(weight.parameters(), lr=0.1), SnapshotHistory(every=2)
    >>> weights = []
    >>> for _ in range(5):
    ...     weights.append(weight.weight.item())
    ...     history.take_if_due(weight, optimizer)
    ...     weight(torch.ones(1)).sum().backward()
    ...     optimizer.step()
    ...     history.count_step()
    >>> history.go_back(weight, optimizer)  # the snapshots are of 2 and 4 steps; the run is at 5
    3
    >>> weight.weight.item() == weights[2]
    True
    """

    def __init__(self, every: int, folder: str | None = None, rank: int = 0) -> None:
        self.every = every
        self._paths = [Path(folder, f"spike_guard_rank{rank}_{slot}.pt") for slot in "ab"] if folder else []
        self._kept: list[tuple[int, Snapshot | Path]] = []  # after how many steps; the oldest first
        self._spare: Snapshot | None = None  # whose memory is used again
        self._steps = 0
        self._is_back = False  # at a snapshot, and no step since

    @property
    def has_any(self) -> bool:
        """Whether there is a snapshot to go back to."""
        return bool(self._kept)

    def take_if_due(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take a snapshot if the newest one is ``every`` steps old; between two steps, before the forward pass."""
        if not self._kept or self._steps - self._kept[-1][0] >= self.every:
            if len(self._kept) == 2:
                self._drop(0)
            snapshot = Snapshot.take(module, optimizer, self._spare)
            self._spare = None
            self._kept.append((self._steps, self._stored(snapshot)))

    def count_step(self) -> None:
        """Count a step that is taken."""
        self._steps += 1
        self._is_back = False

    def go_back(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the newest snapshot that is ``every`` steps old, or else the oldest; the younger ones are forgotten.

        Returns:
            How many steps that takes back.
        """
        if self._is_back:
            return 0
        while len(self._kept) > 1 and self._steps - self._kept[-1][0] < self.every:
            self._drop(-1)
        taken, snapshot = self._kept[-1]
        (Snapshot.load(snapshot) if isinstance(snapshot, Path) else snapshot).restore(module, optimizer)
        self._is_back = True
        age, self._steps = self._steps - taken, taken
        return age

    def clear(self) -> None:
        """Forget the snapshots, and remove their files."""
        while self._kept:
            self._drop(0)
        self._spare = None

    def _stored(self, snapshot: Snapshot) -> Snapshot | Path:
        if not self._paths:
            return snapshot
        path = next(path for path in self._paths if all(path != kept for _, kept in self._kept))
        path.parent.mkdir(parents=True, exist_ok=True)
        snapshot.save(path)
        self._spare = snapshot
        return path

    def _drop(self, place: int) -> None:
        _, dropped = self._kept.pop(place)
        if isinstance(dropped, Path):
            dropped.unlink(missing_ok=True)
        else:
            self._spare = dropped
