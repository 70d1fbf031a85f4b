"""A proxy in front of an S3 server that does harm at one request: ``python proxy.py UPSTREAM PORT``
prints its URL.

``PUT /__plan__`` with JSON sets what is to happen, and begins to count anew; ``GET /__log__`` gives the requests since.

    kill before, kill after      SIGKILL to a process, before the request is passed on, or when the server has done it
    stop before, stop after      SIGSTOP, likewise
    503, slow                    an answer that the server is too busy: SlowDown
    half, half reset             503 to the first request of each part, or a closed connection, after half of its body
    403                          ExpiredToken
    reset before, reset after    the connection is closed, before the request is passed on, or instead of the answer
    torn                         half of the body of the answer, then the connection is closed
    flipped answer, flipped body one byte of the body of the answer, or of the request, is another one
    quota                        507, from this request on
    files                        507 for everything in a tag directory, of every request
    unconditional                If-None-Match is dropped, of every request
    terse                        what a condition refuses is not said to be refused by which
    skewed                       403 RequestTimeTooSkewed, of every request
    rotated                      ExpiredToken, unless the request is signed by the plan's ``key``
    pages                        lists come in pages of two names
    size                         the first list with files of 1024 bytes says that they have 1025
    late                         lists leave out what was written in the last half of a second

With ``compares``, a body that has another CRC32 than its request says is refused, as S3 does and moto does not.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
CRC32 = "x-amz-checksum-crc32"
ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>as planned</Message></Error>"


async def _message(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | None = None,
    is_cut: Callable[[bytes], bool] = lambda first: False,
) -> tuple[bytes, dict[str, str], bytes]:
    """First line, headers, body, or half of it; ``writer``: to a client that waits before it sends its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    headers = dict(line.decode().split(": ", 1) for line in lines if b": " in line)
    lower = {name.lower(): value for name, value in headers.items()}
    body = b""
    if writer is not None and "expect" in lower:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in lower.get("transfer-encoding", ""):
        while size := int((await reader.readline()).strip() or b"0", 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        headers = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
        headers["Content-Length"] = str(len(body))
    elif length := int(lower.get("content-length", 0)):
        body = await reader.readexactly(length // 2 if is_cut(first) else length)
    return first, headers, body


def _bytes(first: bytes, headers: dict[str, str], body: bytes) -> bytes:
    return b"\r\n".join([first, *(f"{n}: {v}".encode() for n, v in headers.items()), b"", b""]) + body


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


def _crc32(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


class Proxy:
    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self.host, self.port = parts.hostname, parts.port
        self.plan: dict[str, Any] = {}
        self.log: list[str] = []
        #: when an object was written, by its key.
        self.written: dict[str, float] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, headers, body = await _message(reader, writer, self._is_cut)
        method, path, _ = first.decode().split(" ")
        if path == "/__plan__":
            self.plan, self.log = json.loads(body), []
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return True
        if path == "/__log__":
            data = json.dumps(self.log).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            return True
        is_cut = self._is_cut(first)
        self.log.append(f"{method} {path}")
        if is_cut and self.plan["fault"] == "half":
            writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
            await reader.readexactly(int(headers["Content-Length"]) - len(body))
            return True
        if is_cut:
            return False
        fault = self.plan.get("fault", "") if len(self.log) == self.plan.get("at") else ""
        if self.plan.get("fault") == "quota" and len(self.log) >= self.plan["at"] and method in ("PUT", "POST"):
            fault = "quota"
        fault = self._always(method, path, headers) or fault
        if fault == "flipped body":
            body = _flipped(body)
        if (
            self.plan.get("compares")
            and fault in ("", "flipped body")
            and headers.get(CRC32, _crc32(body)) != _crc32(body)
        ):
            fault = "other bytes"
        for status, name, code in (
            (503, "503", b"SlowDown"),
            (403, "403", b"ExpiredToken"),
            (403, "skewed", b"RequestTimeTooSkewed"),
            (507, "quota", b"Quota"),
            (400, "other bytes", b"BadDigest"),
        ):
            if fault == name:
                data = ERROR % code
                writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
                return True
        if fault.endswith(" before"):
            if (number := SIGNALS.get(fault.split()[0])) is not None:
                os.kill(self.plan["pid"], number)
            if not fault.startswith("stop"):
                return False
        if self.plan.get("fault") == "unconditional":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        is_list = method == "GET" and "list-type=2" in path
        if is_list and self.plan.get("fault") == "pages":
            first = first.replace(b"list-type=2", b"list-type=2&max-keys=2")
        answer, after, content = await self._forward(first, headers, body)
        if method == "PUT" or "uploadId" in path:
            self.written[unquote(urlsplit(path).path).split("/", 2)[-1]] = time.monotonic()
        if is_list and self.plan.get("fault") == "size" and b"<Size>1024<" in content:
            content, self.plan = content.replace(b"<Size>1024<", b"<Size>1025<"), {}
        if is_list and self.plan.get("fault") == "late":
            content = re.sub(rb"<Contents>.*?</Contents>", self._unless_late, content, flags=re.DOTALL)
            after = {name: value for name, value in after.items() if name.lower() != "content-length"}
            after["Content-Length"] = str(len(content))
        if self.plan.get("fault") == "terse":
            content = re.sub(rb"<Condition>.*?</Condition>", lambda found: b" " * len(found[0]), content)
        if fault.endswith(" after"):
            if (number := SIGNALS.get(fault.split()[0])) is not None:
                os.kill(self.plan["pid"], number)
            if not fault.startswith("stop"):
                return False
        if fault == "flipped answer":
            content = _flipped(content)
        if fault == "torn":
            writer.write(_bytes(answer, after, content)[: -(len(content) // 2) or None])
            await writer.drain()
            return False
        if method == "HEAD":
            content = b""
        writer.write(_bytes(answer, after, content))
        await writer.drain()
        return True

    def _is_cut(self, first: bytes) -> bool:
        """Whether this is the first request of a part, which gets half of its body through."""
        method, path, _ = first.decode().split(" ")
        is_part = self.plan.get("fault", "").startswith("half") and "partNumber=" in path
        return is_part and f"{method} {path}" not in self.log

    def _always(self, method: str, path: str, headers: dict[str, str]) -> str:
        """What happens to every request."""
        fault = self.plan.get("fault", "")
        signed = headers.get("Authorization", headers.get("authorization", ""))
        if fault == "rotated" and f"Credential={self.plan['key']}/" not in signed:
            return "403"
        if fault == "files" and method in ("PUT", "POST") and "/global_step" in path:
            return "quota"
        return fault if fault == "skewed" else ""

    def _unless_late(self, found: re.Match[bytes]) -> bytes:
        name = re.search(rb"<Key>(.*?)</Key>", found[0])
        assert name is not None
        return b"" if time.monotonic() - self.written.get(unquote(name[1].decode()), 0.0) < 0.5 else found[0]

    async def _forward(self, first: bytes, headers: dict[str, str], body: bytes) -> tuple[bytes, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        headers = {n: v for n, v in headers.items() if n.lower() not in ("expect", "connection")}
        writer.write(_bytes(first, headers | {"Connection": "close"}, body))
        await writer.drain()
        try:
            if first.startswith(b"HEAD"):
                head = await reader.readuntil(b"\r\n\r\n")
                line, *lines = head[:-4].split(b"\r\n")
                return line, dict(one.decode().split(": ", 1) for one in lines if b": " in one), b""
            answer, after, content = await _message(reader)
        finally:
            writer.close()
        return answer, {n: v for n, v in after.items() if n.lower() != "connection"}, content


async def main(upstream: str, port: int) -> None:
    server = await asyncio.start_server(Proxy(upstream).serve, "127.0.0.1", port, limit=1 << 24)
    print("http://{}:{}".format(*server.sockets[0].getsockname()), flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
