"""What a folder lies on, and how fast it reads."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FileSystem", "StorageSpeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system that holds a path.

    ``kind`` is ``"disk"`` (of this machine, as far as it can tell), ``"network"`` (also a folder that a virtual machine
    shares with its host), ``"memory"``, or ``"unknown"``. ``type`` is the system's name of it, such as ``ext4`` or
    ``nfs4``; ``source`` what is mounted, such as ``/dev/nvme0n1p1`` or ``server:/export``; ``mounted_at`` where.
    ``rotational`` says whether the disk turns, and is ``None`` where the system cannot know, as of a virtual disk.

    >>> FileSystem(kind="disk", type="ext4", source="/dev/nvme0n1p1", mounted_at="/", rotational=False).describe()
    'ext4 on /dev/nvme0n1p1, a local solid-state disk'
    """

    kind: str
    type: str = ""
    source: str = ""
    mounted_at: str = ""
    rotational: bool | None = None

    @property
    def is_network(self) -> bool:
        """Reached over a network or from the host of a virtual machine."""
        return self.kind == "network"

    @property
    def is_memory(self) -> bool:
        """In main memory: as fast as it gets, and what it holds is missing to everything else."""
        return self.kind == "memory"

    def describe(self) -> str:
        """A few words for a person."""
        disk = {True: "a local turning disk", False: "a local solid-state disk", None: "a local disk"}[self.rotational]
        kinds = {"disk": disk, "network": "over the network", "memory": "in memory"}
        name = " on ".join(filter(None, (self.type, self.source)))
        return ", ".join(filter(None, (name, kinds.get(self.kind, "of unknown kind"))))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpeed:
    """How fast the disk below a folder reads, without help of the page cache as far as ``method`` allows.

    A MB is 10**6 bytes. Sequential reads are ``sequential_block_bytes`` each, one after the other; random reads are
    ``random_block_bytes`` each at aligned places, ``random_readers`` of them under way at once. ``method`` is
    ``"O_DIRECT"`` (past the page cache), ``"posix_fadvise"`` (the cache was asked to forget the file first) or
    ``"page cache"`` (neither was possible: these are speeds of memory). ``probed_file`` is the file of the user that
    was read, empty if one of the probe's own was written for it; ``probed_bytes`` is its size, or the part of it that
    was used. ``write_mb_per_second`` includes the wait until the data is on the disk, and is ``None`` if nothing was
    written.

    >>> speed = StorageSpeed(
    ...     folder="/data", file_system=FileSystem(kind="network", type="nfs4", source="server:/data"),
    ...     sequential_read_mb_per_second=410.0, random_read_mb_per_second=96.4, write_mb_per_second=200.0,
    ...     method="O_DIRECT", probed_bytes=2**28,
    ... )
    >>> print(speed.describe())
    /data (nfs4 on server:/data, over the network): sequential 410 MB/s, random 96 MB/s in 128 KiB, write 200 MB/s
    >>> round(speed.random_reads_per_second)
    735
    """

    folder: str
    file_system: FileSystem
    sequential_read_mb_per_second: float
    random_read_mb_per_second: float
    write_mb_per_second: float | None = None
    sequential_block_bytes: int = 1 << 22
    random_block_bytes: int = 1 << 17
    random_readers: int = 4
    method: str = "O_DIRECT"
    probed_file: str = ""
    probed_bytes: int = 0

    @property
    def random_reads_per_second(self) -> float:
        """Of ``random_block_bytes`` each."""
        return self.random_read_mb_per_second * 1e6 / self.random_block_bytes

    def describe(self) -> str:
        """One line for a person."""
        speeds = [
            f"sequential {self.sequential_read_mb_per_second:,.0f} MB/s",
            f"random {self.random_read_mb_per_second:,.0f} MB/s in {self.random_block_bytes // 1024} KiB",
        ]
        if self.write_mb_per_second is not None:
            speeds.append(f"write {self.write_mb_per_second:,.0f} MB/s")
        if self.method == "page cache" and not self.file_system.is_memory:
            speeds.append("read from the page cache, not from the disk")
        return f"{self.folder} ({self.file_system.describe()}): {', '.join(speeds)}"
