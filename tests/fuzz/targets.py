"""All targets by name."""

from __future__ import annotations

from tests.fuzz import corpora, records
from tests.fuzz.target import Target


def _fault(data: bytes) -> None:
    if data[:2] == b"me" and data[4:5] == b"!":
        raise ZeroDivisionError("planted")


def _hang(data: bytes) -> None:
    while data[:1] == b"h" and data[2:3] == b"g":
        pass


#: The planted ones show that the fuzzer finds such things; they are run only when they are asked for.
TARGETS: dict[str, Target] = {
    **records.TARGETS,
    **corpora.TARGETS,
    "planted-fault": Target(seeds=lambda: [b"mega?"], check=_fault),
    "planted-hang": Target(seeds=lambda: [b"hat"], check=_hang),
}
PLANTED = ("planted-fault", "planted-hang")
