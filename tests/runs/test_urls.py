"""Commands that are given the URL of a run in an object store: they answer as of its directory, name the URL in what
they print and refuse, and read nothing but records."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.program import main
from megaresume.runs.mirrored import mirrored
from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import Proxied, Server
from tests.corpora import simple_corpus
from tests.hosts.torch.program import run

pytestmark = pytest.mark.process

URL = "s3://runs/run"
#: requests to look at a run in a store: three lists, the newest head, the ledger, the data config, and two records of
#: each of its three checkpoints: nothing of its ranks.
REQUESTS = 13
#: bytes that are read.
RECORDS = 20_000


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Proxied, Bucket]]:
    """A run, its data, a proxy that counts, and what is in the store."""
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    directory = tmp_path_factory.mktemp("urls")
    simple_corpus(directory / "web", [5 + k % 9 for k in range(200)])
    data = {"sources": {"web": {"path": str(directory / "web")}}, "seq_length": 8, "seed": 1}
    (directory / "data.yaml").write_text(json.dumps(data))
    server = Server()
    proxy = Proxied(server)
    with pytest.MonkeyPatch.context() as context:
        for name, value in (server.environment | {"AWS_ENDPOINT_URL": proxy.url}).items():
            context.setenv(name, value)
        context.chdir(directory)
        s3fs.S3FileSystem.clear_instance_cache()
        run(
            directory / "run",
            data=str(directory / "data.yaml"),
            steps=18,
            save_every=5,
            checkpoints={"stage_to": URL, "keep_last": 3},
        )
        yield directory / "run", proxy, Bucket(server.client(), "run")
    s3fs.S3FileSystem.clear_instance_cache()
    proxy.close()
    server.close()


def _answer(capsys: pytest.CaptureFixture[str], words: str, place: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([word.replace("PLACE", place) for word in words.split()])
    said = capsys.readouterr()
    return status, said.out.replace(place, "PLACE"), said.err.replace(place, "PLACE")


#: what is known of the local directory alone, or of the time of the question.
ALONE = re.compile(r"(copies in|left behind by|  3 complete, the newest|  step  .* ago|  checkpoint  step|\s*$)")


@pytest.mark.parametrize(
    "words",
    [
        "latest PLACE",
        "inspect PLACE",
        "inspect PLACE/global_step10",
        "verify PLACE",
        "trace PLACE --step 3",
        "plan PLACE --train-iters 40",
        "top PLACE --once",
        # refused
        "latest PLACE/global_step10",
        "verify PLACE --to 77",
        "inspect PLACE/global_step99",
    ],
)
def test_the_same_answer(words: str, where: tuple[Path, Proxied, Bucket], capsys: pytest.CaptureFixture[str]) -> None:
    local, proxy, bucket = where
    ours = _answer(capsys, words, str(local))
    proxy.plan()
    theirs = _answer(capsys, words, URL)
    _check_reads(proxy, bucket, ranks=3 if words.startswith("verify") else 0)
    assert theirs[0] == ours[0] and "megaresume-store-" not in theirs[1] + theirs[2]
    for here, there in zip(ours[1:], theirs[1:], strict=True):
        assert [x for x in there.splitlines() if not ALONE.match(x)] == [
            x for x in here.splitlines() if not ALONE.match(x)
        ]


def _check_reads(proxy: Proxied, bucket: Bucket, ranks: int = 0) -> None:
    requests, sizes = proxy.requests(), bucket.keys()
    read = [line.split("/runs/run/")[1] for line in requests if line.startswith("GET /runs/run/")]
    assert all(name.startswith("megaresume/") for name in read), read
    assert {line.split()[0] for line in requests} <= {"GET", "HEAD"}
    of_ranks = [name for name in read if "/rank_" in name]
    assert len(of_ranks) == ranks and 0 < len(requests) <= REQUESTS + ranks
    assert sum(sizes[name] for name in read if name not in of_ranks) < RECORDS


def test_a_page_a_machine_and_all_checksums(
    where: tuple[Path, Proxied, Bucket], capsys: pytest.CaptureFixture[str]
) -> None:
    """What differs from a directory: the page goes here, of the disk nothing is said, and files are read if asked."""
    local, proxy, bucket = where
    proxy.plan()
    assert _answer(capsys, "report PLACE", URL)[:2] == (0, "report: report.html\n")
    _check_reads(proxy, bucket)
    page = (local.parent / "report.html").read_text()
    assert f"<h1>{URL}</h1>" in page and "megaresume-store-" not in page
    proxy.plan()
    said = _answer(capsys, "doctor PLACE", URL)[1]
    _check_reads(proxy, bucket)
    assert "global_step18 is complete" in said and "filesystem" not in said
    proxy.plan()
    assert _answer(capsys, "inspect PLACE --checksums", URL)[0] == 0
    files = {name for name in sorted(bucket.keys()) if name.startswith("global_step") or "/rank_" in name}
    assert len(files) > 3
    assert files <= {line.split("/runs/run/")[-1] for line in proxy.requests()}


def test_what_a_url_is_not_for(where: tuple[Path, Proxied, Bucket], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latest", "s3://runs/nothing-here"]) == 2
    assert "there is nothing in this place" in capsys.readouterr().err
    assert main(["replay", URL, "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "megaresume replay needs the files of a run on a disk" in said and URL in said


def test_what_the_system_refuses_of_a_url(where: tuple[Path, Proxied, Bucket]) -> None:
    """A path in it is one of the URL; an error that names none, as that of a full disk, gets none."""
    with pytest.raises(OSError) as named, mirrored(URL) as directory:
        raise OSError(errno.EACCES, "Permission denied", f"{directory}/ledger")
    assert named.value.filename == f"{URL}/ledger"
    with pytest.raises(OSError) as nameless, mirrored(URL):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert nameless.value.filename is None
