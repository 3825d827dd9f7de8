"""The table of mounts, read from made-up tables and from this machine's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_speedkit.measure import file_system
from lightning_speedkit.measure.file_system import read_file_system

TABLE = r"""22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
30 22 0:50 / {0}/net rw - nfs4 server:/export/a\040b rw,vers=4.2
31 22 0:51 / {0}/net/memory rw shared:7 master:2 - tmpfs tmpfs rw,size=1k
32 22 0:52 / {0}/twice rw - tmpfs tmpfs rw
33 22 0:53 / {0}/twice rw - lustre mds@tcp:/l rw
34 22 0:54 / {0}/with\040blank rw - fuse.sshfs me@host: rw
35 22 0:55 / {0}/strange rw - newfs none rw
36 22 0:56 / {0}/layers rw - overlay overlay rw,lowerdir=/a
this line is no mount
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("net/memory/deep", "network", "twice", "with blank", "strange", "layers"):
        (tmp_path / name).mkdir(parents=True)
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.format(tmp_path))
    monkeypatch.setattr(file_system, "_MOUNTS", table)
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "kind", "name", "source"),
    [
        ("net", "network", "nfs4", "server:/export/a b"),
        ("net/memory/deep", "memory", "tmpfs", "tmpfs"),
        ("network", "disk", "ext4", "/dev/sda2"),
        ("twice", "network", "lustre", "mds@tcp:/l"),
        ("with blank", "network", "fuse.sshfs", "me@host:"),
        ("strange", "unknown", "newfs", "none"),
        ("layers", "disk", "overlay", "overlay"),
    ],
)
def test_the_deepest_and_latest_mount_counts(root: Path, folder: str, kind: str, name: str, source: str) -> None:
    found = read_file_system(root / folder)
    assert (found.kind, found.type, found.source) == (kind, name, source)


def test_a_symbolic_link_is_followed(root: Path) -> None:
    link = root / "network" / "link"
    link.symlink_to(root / "net" / "memory")
    assert read_file_system(link).kind == "memory"


@pytest.mark.parametrize(
    ("device", "disk", "flag", "expected"),
    [
        ("sda/sda2", "sda", "1", True),
        ("nvme0n1", "nvme0n1", "0", False),
        ("vda", "vda", "1", None),  # a virtual disk does not know what it is made of
    ],
)
def test_whether_the_disk_turns(
    root: Path, monkeypatch: pytest.MonkeyPatch, device: str, disk: str, flag: str, expected: bool | None
) -> None:
    (root / "devices" / device).mkdir(parents=True)
    queue = root / "devices" / disk / "queue"
    queue.mkdir()
    (queue / "rotational").write_text(f"{flag}\n")
    (root / "block").mkdir()
    (root / "block" / "8:2").symlink_to(root / "devices" / device)
    monkeypatch.setattr(file_system, "_BLOCK_DEVICES", root / "block")
    assert read_file_system("/").rotational is expected
    assert read_file_system(root / "layers").rotational is None
    assert read_file_system(root / "net").rotational is None


def test_a_system_without_the_table_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "missing")
    assert read_file_system(tmp_path).describe() == "of unknown kind"


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_this_machine_is_read_as_stat_reads_it(path: str) -> None:
    """``stat -f`` asks the kernel by statfs(2), not by the table."""
    if not Path(path).is_dir():
        pytest.skip(f"no {path} here")
    told = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    known = {"ext2/ext3": {"ext2", "ext3", "ext4"}, "overlayfs": {"overlay"}}
    assert read_file_system(path).type in known.get(told, {told})
