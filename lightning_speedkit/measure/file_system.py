"""Which file system a path lies on, and whether that is a disk of this machine, a network or memory.

Read from Linux' table of mounts; on other systems the answer is ``"unknown"``. What it cannot see: a network below a
block device (iSCSI, a cloud volume), or what is below the layers of a container, which both count as a disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_speedkit.facts.storage import FileSystem

__all__ = ["read_file_system"]

_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")
_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_DISK = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2", "overlay", "aufs"}
    | {"vfat", "exfat", "ntfs", "ntfs3", "fuseblk", "fuse.fuse-overlayfs", "ecryptfs", "squashfs", "erofs", "iso9660"}
)
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "pvfs2", "orangefs"}
    | {"afs", "coda", "panfs", "wekafs", "davfs", "gfs2", "ocfs2"}
    | {"9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs", "drvfs"}  # shared by the host of a virtual machine
)
_VIRTUAL = re.compile(r"(vd|xvd)[a-z]|zram|nbd|rbd")


def read_file_system(path: str | os.PathLike[str]) -> FileSystem:
    """The file system of an existing path; symbolic links are followed.

    >>> read_file_system("/proc").kind
    'unknown'
    """
    real = os.path.realpath(path)
    found = None
    for place, kind, source, device in _mounts():
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and (found is None or len(place) >= len(found[0])):  # of two at one place the later one is seen
            found = place, kind, source, device
    if found is None:
        return FileSystem(kind="unknown")
    place, kind, source, device = found
    rotational = _rotational(source, device) if _kind(kind) == "disk" else None
    return FileSystem(kind=_kind(kind), type=kind, source=source, mounted_at=place, rotational=rotational)


def _mounts() -> Iterator[tuple[str, str, str, str]]:
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 5 and len(rest) >= 2:
            yield _plain(fields[4]), rest[0], _plain(rest[1]), fields[2]


def _plain(text: str) -> str:
    """The table writes a blank as ``\\040``, and likewise a tab, a line end and a backslash."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _kind(name: str) -> str:
    if name in _MEMORY:
        return "memory"
    if name in _DISK:
        return "disk"
    # FUSE is a program in between: nearly always one that fetches from elsewhere
    return "network" if name in _NETWORK or name.startswith("fuse") else "unknown"


def _rotational(source: str, device: str) -> bool | None:
    if device.startswith("0:"):  # btrfs, zfs and overlay have no device number of their own
        try:
            number = Path(source).stat().st_rdev
        except (OSError, ValueError):
            return None
        device = f"{os.major(number)}:{os.minor(number)}"
    block = Path(os.path.realpath(_BLOCK_DEVICES / device))
    if _VIRTUAL.match(block.name):
        return None
    for folder in (block, block.parent):  # a partition has no queue; its disk is one folder up
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
