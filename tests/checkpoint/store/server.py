"""moto's S3 server as a process of its own: ``python server.py`` prints its URL and serves until it is killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

#: how it is reached, by the environment alone.
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """A server with one bucket, ``runs``."""

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


class Proxied:
    """A proxy in front of a server, see proxy.py."""

    def __init__(self, server: Server) -> None:
        command = [sys.executable, str(Path(__file__).with_name("proxy.py")), server.url]
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
