"""A port counts as taken if another process listens there, on whatever address."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from lightning_speedkit.parallel import launch_port
from lightning_speedkit.parallel.launch_port import listens_elsewhere

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_another_process_listens(address: str) -> None:
    command = [sys.executable, "-S", "-c", LISTEN, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert listens_elsewhere(port)
        other.stdin.close()
        assert other.wait(20) == 0
    assert not listens_elsewhere(port)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_this_process_listens(family: socket.AddressFamily) -> None:
    address = "127.0.0.1" if family is socket.AF_INET else "::1"
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("This machine has no such addresses.")
    with server:
        assert not listens_elsewhere(server.getsockname()[1])


def test_a_connection_that_is_ending_does_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    assert not listens_elsewhere(port)


def test_where_the_kernel_has_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *arguments: object) -> str:
        raise FileNotFoundError

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(launch_port.Path, "read_text", refuse)
        monkeypatch.setattr(launch_port.Path, "iterdir", refuse)
        assert listens_elsewhere(server.getsockname()[1])
