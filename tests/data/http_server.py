"""A real web server on this machine that serves bytes from memory, in the ways in which servers differ."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """What the server sends, and what it was asked for; all of it may be changed while it runs.

    ``status`` answers everything with an error, each of ``refusals`` one request. ``stall_at`` stops before
    that byte until ``go_on`` is set. ``requests`` are the starts and ends of what was asked for with GET, ``None`` for
    a whole file.
    """

    content: bytes
    etag: str = "v1"
    ranges: bool = True
    tells_size: bool = True
    status: int = 0
    refusals: list[int] = field(default_factory=list)
    stall_at: int | None = None
    go_on: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[int, int] | None] = field(default_factory=list)
    address: str = ""


@contextlib.contextmanager
def http_server(served: Served) -> Iterator[Served]:
    """Serve it under ``served.address``, followed by any path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            refused = served.status or (served.refusals.pop(0) if served.refusals else 0)
            if refused:
                self.send_error(refused)
                return
            content, start, end = served.content, 0, len(served.content)
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if body:
                served.requests.append((int(found[1]), int(found[2]) + 1) if found else None)
            if found and served.ranges:
                start, end = int(found[1]), min(end, int(found[2] or end - 1) + 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("ETag", f'"{served.etag}"')
            if served.tells_size:
                self.send_header("Content-Length", str(end - start))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            if body:
                self._send(content, start, end)

        def _send(self, content: bytes, start: int, end: int) -> None:
            stop = end if served.stall_at is None else max(start, min(end, served.stall_at))
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[start:stop])
                if stop < end:
                    served.stalled.set()
                    served.go_on.wait(60)
                    self.wfile.write(content[stop:end])
            if not served.tells_size:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that was killed is no fault of the server."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    served.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        served.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
