"""The description of a file system and of its speed, in the cases that differ."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from lightning_speedkit.facts.storage import FileSystem, StorageSpeed

DISK = FileSystem(kind="disk", type="xfs", source="/dev/sdb1", mounted_at="/scratch", rotational=True)
SPEED = StorageSpeed(
    folder="/scratch/data",
    file_system=DISK,
    sequential_read_mb_per_second=1234.5,
    random_read_mb_per_second=131.072,
    random_block_bytes=1 << 16,
)


@pytest.mark.parametrize(
    ("system", "told"),
    [
        (DISK, "xfs on /dev/sdb1, a local turning disk"),
        (dataclasses.replace(DISK, rotational=None), "xfs on /dev/sdb1, a local disk"),
        (FileSystem(kind="network", type="nfs4", source="a:/b"), "nfs4 on a:/b, over the network"),
        (FileSystem(kind="memory", type="tmpfs", source="tmpfs"), "tmpfs on tmpfs, in memory"),
        (FileSystem(kind="unknown"), "of unknown kind"),
    ],
)
def test_a_file_system_says_what_it_is(system: FileSystem, told: str) -> None:
    assert system.describe() == told
    assert (system.is_network, system.is_memory) == (system.kind == "network", system.kind == "memory")


def test_speeds_are_told_with_units_and_what_was_not_measured_is_left_out() -> None:
    start = "/scratch/data (xfs on /dev/sdb1, a local turning disk): sequential 1,234 MB/s, random 131 MB/s in 64 KiB"
    assert SPEED.describe() == start
    assert dataclasses.replace(SPEED, write_mb_per_second=90.4).describe() == f"{start}, write 90 MB/s"


def test_a_speed_of_the_page_cache_is_not_passed_off_as_one_of_the_disk() -> None:
    cached = dataclasses.replace(SPEED, method="page cache")
    assert cached.describe().endswith("read from the page cache, not from the disk")
    memory = dataclasses.replace(cached, file_system=FileSystem(kind="memory", type="tmpfs"))
    assert "page cache" not in memory.describe()


def test_reads_per_second_follow_from_the_rate_and_the_size() -> None:
    assert SPEED.random_reads_per_second == pytest.approx(2000.0)  # 131.072e6 / 65536


def test_it_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(SPEED)) == SPEED
    assert hash(SPEED) == hash(dataclasses.replace(SPEED))
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEED.folder = "/"  # type: ignore[misc]
