"""An HTTP proxy in front of a real server that fails requests on demand."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
_SLOW_DOWN = (
    b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>%s</Code><Message>from the proxy</Message>"
    b"<Resource>/</Resource><RequestId>1</RequestId></Error>"
)
_CODES = {500: b"InternalError", 503: b"SlowDown", 403: b"AccessDenied", 400: b"BadRequest"}


@dataclass
class Fault:
    """What is done to the next ``times`` requests that match."""

    kind: str
    """``status`` answers it with ``status`` and never asks the server; ``lost`` has the server do it and answers
    nothing; ``cut`` breaks off in the middle of the answer's body; ``silent`` neither asks nor answers."""
    times: int = 1
    status: int = 503
    method: str | None = None
    containing: str = ""
    """A part of the request's target: path and query."""
    skip: int = 0
    """So many matching requests are let through first."""
    hits: int = 0

    def meets(self, method: str, target: str) -> bool:
        """Whether this request is one of those, which counts it."""
        if self.hits == self.times or self.method not in (None, method) or self.containing not in target:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.hits += 1
        return True


@dataclass
class Seen:
    """One request that came by, and what became of it."""

    method: str
    target: str
    fault: str | None


@dataclass
class FlakyProxy:
    """Listens on a port of its own and passes everything on to ``server`` (host:port), except as told."""

    server: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    on_request: Callable[[str, str], None] | None = None
    """Called with method and target before a request is passed on."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.ending = threading.Event()
        self._open: set[socket.socket] = set()
        self._listening: ThreadingHTTPServer | None = None
        self.port = 0
        self.listen()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Accept connections, on the same port as before."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._listening = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._listening.daemon_threads = True
        self.port = self._listening.server_address[1]
        threading.Thread(target=self._listening.serve_forever, args=(0.02,), daemon=True).start()

    def refuse(self) -> None:
        """Refuse connections, and drop those that are there."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.shutdown()
            listening.server_close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.ending.set()
        self.refuse()

    def fail(self, kind: str = "status", **facts: object) -> Fault:
        """Add a fault; the first one that matches a request counts."""
        fault = Fault(kind, **facts)  # type: ignore[arg-type]
        with self._lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Pass everything on from now."""
        with self._lock:
            self.faults.clear()
        self.on_request = None

    def take(self, method: str, target: str) -> Fault | None:
        """Note a request; the fault that it meets."""
        with self._lock:
            fault = next((one for one in self.faults if one.meets(method, target)), None)
            self.seen.append(Seen(method, target, fault.kind if fault else None))
        return fault

    def count(self, method: str, containing: str = "") -> int:
        """How many such requests came by, failed ones too."""
        with self._lock:
            return sum(one.method == method and containing in one.target for one in self.seen)

    def connected(self, connection: socket.socket, *, is_open: bool) -> None:
        with self._lock:
            (self._open.add if is_open else self._open.discard)(connection)


class _Handler(BaseHTTPRequestHandler):
    owner: FlakyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.owner.connected(self.connection, is_open=True)

    def finish(self) -> None:
        self.owner.connected(self.connection, is_open=False)
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def _pass_on(self) -> None:
        body = self._read_body()
        fault = self.owner.take(self.command, self.path)
        if fault is not None and fault.kind == "status":
            return self._answer(fault.status, [], _SLOW_DOWN % _CODES.get(fault.status, b"Odd"))
        if fault is not None and fault.kind == "silent":
            self.owner.ending.wait()
            self.close_connection = True
            return None
        if self.owner.on_request is not None:
            self.owner.on_request(self.command, self.path)
        try:
            answer, content = self._ask(body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # the server is gone: so is this connection
            return None
        if fault is not None and fault.kind == "lost":
            self.close_connection = True
            return None
        return self._answer(answer.status, answer.getheaders(), content, cut=fault is not None and fault.kind == "cut")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _read_body(self) -> bytes:
        """The body as it came: in chunks, where it came in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        lines = bytearray()
        while True:
            head = self.rfile.readline()
            lines += head + self.rfile.read(int(head.split(b";")[0] or b"0", 16)) + self.rfile.readline()
            if head.strip() in (b"0", b""):
                return bytes(lines)

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        asked = http.client.HTTPConnection(self.owner.server, timeout=30)
        try:
            asked.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    asked.putheader(name, value)
            asked.endheaders(body)
            answer = asked.getresponse()
            return answer, answer.read()
        finally:
            asked.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        nbytes = len(content)
        if self.command == "HEAD":
            nbytes = int(next((value for name, value in headers if name.lower() == "content-length"), 0))
            content = b""
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()
        self.wfile.write(content[: nbytes // 2] if cut else content)
        if cut:
            self.close_connection = True
