"""How it is known that S3 has received the bytes that were sent: by a checksum that it compares.

    md5     of small objects, and of parts wherever the store is not known to do better: it compares ``Content-MD5``,
            and its ETag is the MD5 of what it has received. Stores that ignore the one give the other
    crc32   of the parts of large files, if the store refuses a part with a wrong one: a fifth of the processor time

Amazon's S3, MinIO and SeaweedFS refuse it. Others take the header, and some give it back, without comparing
anything; so each process tries it once, with a part of an upload that is then given up.
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

#: of a method of S3's client, as botocore names it.
Call = Callable[..., Any]

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_CRC32 = "ChecksumCRC32"
#: what a store says of a part whose checksum is another one; the second is MinIO's.
_REFUSED = ("BadDigest", "XAmzContentChecksumMismatch")
_TRIED = b"megaresume"


class OtherBytesError(OSError):
    """A store has received other bytes than were sent, and has not refused them."""


def send_with_md5(call: Call, method: str, data: bytes | Buffer, **parameters: Any) -> Any:
    """Send bytes; what the store answers. Raises OtherBytesError, and what the client does."""
    digest = hashlib.md5(data, usedforsecurity=False)
    answer = call(method, Body=data, ContentMD5=base64.b64encode(digest.digest()).decode(), **parameters)
    # Of bytes that are encrypted with keys of one's own, it is something else.
    is_plain = not any(name in answer for name in ("SSEKMSKeyId", "SSECustomerAlgorithm"))
    received = _MD5.fullmatch(answer.get("ETag", ""))
    if is_plain and received is not None and received[1] != digest.hexdigest():
        raise OtherBytesError(f"the store has received other bytes: {received[1]}, sent were {digest.hexdigest()}")
    return answer


class UploadedParts:
    """The parts of an upload, each with its checksum.

    Args:
        call: the client's.
        key: of the object.
        with_crc32: whether the store `compares_crc32`.
    """

    def __init__(self, call: Call, key: str, *, with_crc32: bool) -> None:
        self._call, self._key, self._with_crc32 = call, key, with_crc32
        self._upload = ""

    def begin(self) -> str:
        """The id of the upload."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._with_crc32 else {}
        self._upload = self._call("create_multipart_upload", Key=self._key, **algorithm)["UploadId"]
        return self._upload

    def send(self, number: int, data: Buffer) -> dict[str, Any]:
        """Send a part; what the end of the upload says of it. Raises OtherBytesError, and what the client does."""
        where = {"Key": self._key, "UploadId": self._upload, "PartNumber": number}
        if not self._with_crc32:
            answer = send_with_md5(self._call, "upload_part", data, **where)
            return {"PartNumber": number, "ETag": answer["ETag"]}
        sent = _crc32(data)
        answer = self._call("upload_part", Body=data, **{_CRC32: sent}, **where)
        if (received := answer.get(_CRC32, sent)) != sent:  # not every store repeats what it has compared
            raise OtherBytesError(f"the store has received other bytes: CRC32 {received}, sent were {sent}")
        return {"PartNumber": number, "ETag": answer["ETag"], _CRC32: sent}


def compares_crc32(call: Call, key: str) -> bool:
    """Whether a store refuses a part with another CRC32 than that of its bytes.

    Args:
        call: of a client that tries nothing again: it would wait for seconds.
        key: of the object that is going to be uploaded: nothing is left there.

    Raises:
        OSError: it does not answer, or says something else.
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
        with contextlib.suppress(Exception):  # the next start tries again, and a rule of the bucket can
            call("abort_multipart_upload", Key=key, UploadId=upload)
    return False


def _crc32(data: bytes | Buffer) -> str:
    """As S3 writes it: base64 of its four bytes, the highest first."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
