"""Files over HTTP as from far away: every answer takes a while, and some are bad. What was asked is kept, in order."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Request:
    """What was asked: "HEAD" or "GET", a file, its bytes from start to stop."""

    method: str
    name: str
    start: int
    stop: int


@dataclass
class FarServer:
    """The files of a directory.

    Args:
        directory: of the files.
        latency: seconds before each answer.
        fault: of the number of the request, from 0, and the request: what is wrong with the answer. None: nothing;
            ``short``: bytes are missing at the end; ``long``: more bytes are announced than come; ``drop``: the
            connection is closed; ``whole``: the range is ignored; a number: this HTTP status.
    """

    directory: Path
    latency: float = 0.0
    fault: Callable[[int, Request], str | int | None] = lambda number, request: None
    requests: list[Request] = field(default_factory=list)
    #: what each said of who asks.
    authorizations: list[str] = field(default_factory=list)
    #: requests that are being answered, now and at most.
    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    @property
    def reads(self) -> list[Request]:
        """Those that asked for bytes."""
        return [request for request in self.requests if request.method == "GET"]


@contextmanager
def serve(directory: Path, **options: Any) -> Iterator[FarServer]:
    """Answer until the block ends."""
    server = FarServer(directory, **options)

    class Handler(_Handler):
        far = server

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    far: FarServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        far, path = self.far, self.far.directory / unquote(self.path.lstrip("/"))
        size = path.stat().st_size if path.is_file() else 0
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
        request = Request(self.command, path.name, start, stop)
        with far.lock:
            number = len(far.requests)
            far.requests.append(request)
            far.authorizations.append(self.headers.get("Authorization", ""))
            far.now += 1
            far.most = max(far.most, far.now)
        time.sleep(far.latency)
        with far.lock:
            far.now -= 1
        fault = far.fault(number, request)
        if fault == "whole":
            found, start, stop = None, 0, size
        if fault == "drop":
            self.close_connection = True
            return
        status = fault if isinstance(fault, int) else (206 if found else 200) if path.is_file() else 404
        length = stop - start if status in (200, 206) else 0
        self.send_response(status)
        self.send_header("Content-Length", str(length - (fault == "short") + (fault == "long")))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        if path.is_file():
            self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        if fault == "long":
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "GET" and length:
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(length - (fault == "short")))
        self.wfile.flush()


def wait_for_threads() -> None:
    """Return when no thread of this process reads ahead any more."""
    gc.collect()
    for thread in [thread for thread in threading.enumerate() if thread.name == "megaresume-ahead"]:
        thread.join(60)
        assert not thread.is_alive()
