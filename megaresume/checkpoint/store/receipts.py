"""How we know that S3 has received the bytes that were sent: by a checksum that it compares.

    md5     for small objects, and for parts unless the store is known to do better: it compares ``Content-MD5``, and
            its ETag is the MD5 of what it has received. Stores that ignore one provide the other
    crc32   for the parts of large files, if the store refuses a part with a wrong one: a fifth of the CPU time

Amazon's S3, MinIO and SeaweedFS refuse it. Others accept the header, and some return it, without comparing anything; so
each process tries it once, with a part of an upload that is then aborted.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import zlib
from collections.abc import Callable
from typing import Any

from megaresume.checkpoint.store.buffer import Buffer
from megaresume.data.remote import s3_code

#: a method of S3's client, by botocore's name.
Call = Callable[..., Any]

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_CRC32 = "ChecksumCRC32"
#: errors for a part whose checksum is wrong; the second is MinIO's.
_REFUSED = ("BadDigest", "XAmzContentChecksumMismatch")
_TRIED = b"megaresume"


class OtherBytesError(OSError):
    """Raised if a store has received other bytes than were sent, and has not refused them."""


def send_with_md5(call: Call, method: str, data: bytes | Buffer, **parameters: Any) -> Any:
    """Send bytes and return the store's answer. Raises OtherBytesError, and the client's errors."""
    digest = hashlib.md5(data, usedforsecurity=False)
    answer = call(method, Body=data, ContentMD5=base64.b64encode(digest.digest()).decode(), **parameters)
    # If bytes are encrypted with customer keys, the ETag is not their MD5.
    is_plain = not any(name in answer for name in ("SSEKMSKeyId", "SSECustomerAlgorithm"))
    received = _MD5.fullmatch(answer.get("ETag", ""))
    if is_plain and received is not None and received[1] != digest.hexdigest():
        raise OtherBytesError(f"the store has received other bytes: {received[1]}, sent were {digest.hexdigest()}")
    return answer


class UploadedParts:
    """The parts of an upload, each sent with its checksum.

    Args:
        call: calls the client.
        key: of the object.
        with_crc32: the result of `compares_crc32`.
    """

    def __init__(self, call: Call, key: str, *, with_crc32: bool) -> None:
        self._call, self._key, self._with_crc32 = call, key, with_crc32
        self._upload = ""

    def begin(self) -> str:
        """Begin the upload; returns its id."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._with_crc32 else {}
        self._upload = self._call("create_multipart_upload", Key=self._key, **algorithm)["UploadId"]
        return self._upload

    def send(self, number: int, data: Buffer) -> dict[str, Any]:
        """Send a part; returns its entry for completing the upload. Raises OtherBytesError, and the client's errors."""
        where = {"Key": self._key, "UploadId": self._upload, "PartNumber": number}
        if not self._with_crc32:
            answer = send_with_md5(self._call, "upload_part", data, **where)
            return {"PartNumber": number, "ETag": answer["ETag"]}
        sent = _crc32(data)
        answer = self._call("upload_part", Body=data, **{_CRC32: sent}, **where)
        if (received := answer.get(_CRC32, sent)) != sent:  # not every store returns what it has compared
            raise OtherBytesError(f"the store has received other bytes: CRC32 {received}, sent were {sent}")
        return {"PartNumber": number, "ETag": answer["ETag"], _CRC32: sent}


def compares_crc32(call: Call, key: str) -> bool:
    """Whether a store refuses a part whose CRC32 is not that of its bytes.

    Args:
        call: calls a client without retries, which would wait for seconds.
        key: of the object that will be uploaded: nothing is left there.

    Raises:
        OSError: it does not answer, or returns another error.
    """
    parts = UploadedParts(call, key, with_crc32=True)
    upload = parts.begin()
    try:
        call("upload_part", Key=key, UploadId=upload, PartNumber=1, Body=_TRIED, **{_CRC32: _crc32(_TRIED[1:])})
    except OSError as error:
        if s3_code(error) in _REFUSED:
            return True
        raise
    finally:
        with contextlib.suppress(Exception):  # the next start retries, and a rule of the bucket can do it
            call("abort_multipart_upload", Key=key, UploadId=upload)
    return False


def _crc32(data: bytes | Buffer) -> str:
    """The CRC32 in S3's notation: base64 of its four bytes, most significant first."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
