"""`HttpSession`: sends the requests of uploads: parts by threads, as boto3 does, all others by aiohttp.

aiobotocore creates and signs all requests, with the configured endpoint, credentials and retries. aiohttp would copy
every part, and write the copies piece by piece, all in one thread.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import URLLib3Session

from megaresume.checkpoint.store.buffer import Buffer
from megaresume.checkpoint.store.threads import senders

#: bytes for which a connection gets the timeout of S3's client.
PIECE = 1 << 20


class HttpSession(AIOHTTPSession):  # type: ignore[misc,unused-ignore]  # which has no types
    """Sends requests by threads or aiohttp.

    Args:
        connector_args: aiohttp's.
        settings: those that both take.
    """

    def __init__(self, *, connector_args: Any = None, **settings: Any) -> None:
        super().__init__(connector_args=connector_args, **settings)
        self._blocking = URLLib3Session(**settings)

    async def send(self, request: Any) -> Any:
        """Send a signed request and return the answer. Raises botocore's errors."""
        if not isinstance(request.body, Buffer):
            return await super().send(request)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(senders(os.getpid()), self._send, request)
        return AioAWSResponse(answer.url, answer.status_code, answer.headers, _Content(answer.content))

    def _send(self, request: Any) -> Any:
        body = request.body
        with memoryview(body) as view:
            pieces = [view[begin : begin + PIECE] for begin in range(0, len(view), PIECE)]
        request.body = pieces
        try:
            return self._blocking.send(request)
        finally:
            request.body = body  # another attempt sends it again
            for piece in pieces:
                piece.release()

    async def close(self) -> None:
        """Close the connections."""
        self._blocking.close()
        await super().close()


class _Content:
    """The content of an answer, as aiobotocore reads it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data
