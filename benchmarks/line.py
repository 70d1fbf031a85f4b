"""A line between here and a server: every byte of a request waits, and answers share so many bytes a second."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.server import served

CHUNK = 1 << 16


def line(host: str, port: int, *, latency: float, rate: float, cores: set[int]) -> AbstractContextManager[int]:
    """The port, on this machine, of a process that passes everything on.

    Args:
        host, port: of the server.
        latency: seconds.
        rate: bytes a second of all connections together.
        cores: that the process may use.
    """
    return served(_serve, host, port, latency, rate, cores=cores)


def _serve(host: str, port: int, latency: float, rate: float, said: Any) -> None:
    free = 0.0  # when the line has passed on all that was given to it

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await asyncio.sleep(latency)
            writer.write(data)
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free
        clock = asyncio.get_running_loop().time
        while data := await reader.read(CHUNK):
            free = max(free, clock()) + len(data) / rate
            if (wait := free - clock()) > 0:
                await asyncio.sleep(wait)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        of_server, to_server = await asyncio.open_connection(host, port)
        try:
            await asyncio.gather(ask(reader, to_server), answer(of_server, writer))
        except OSError:  # one side has gone
            writer.close()
            to_server.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        said.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
