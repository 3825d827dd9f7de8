"""Whether somebody else listens on a port of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["listens_elsewhere"]

_LISTENS = "0A"  # in /proc/net/tcp


def listens_elsewhere(port: int) -> bool:
    """Whether a process other than this one listens on a TCP port of this machine.

    torch's store of this process may still be there from the run before, and is used again.

    >>> with socket.create_server(("127.0.0.1", 0)) as mine:
    ...     listens_elsewhere(mine.getsockname()[1])
    False
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are ending do not count
        try:
            probe.bind(("", port))
            probe.listen(1)
        except PermissionError:
            return False  # a port that this user may not have: torch says so
        except OSError:
            return not _is_own(port)
    return False


def _is_own(port: int) -> bool:
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    try:
        return any(_target(link) in sockets for link in Path("/proc/self/fd").iterdir())
    except OSError:
        return False  # not Linux


def _listening(port: int) -> list[str]:
    """The inodes of the sockets that listen there, from the kernel's tables."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                found.append(rest[5])
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed meanwhile
