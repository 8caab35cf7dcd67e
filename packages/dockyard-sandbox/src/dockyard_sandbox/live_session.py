"""The server's side of one session in the jail: a run that stays, and its calls."""

from __future__ import annotations

import json
import marshal
import os
import selectors
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.jailer import Jailer
from dockyard_sandbox.wire import Limits

MAX_LIFETIME_S = 7 * 86_400.0
_START_TIMEOUT_S = 60.0
_GRACE_S = 10.0  # past a call's deadline, within which the jail must have answered
_FILE_TIMEOUT_S = 60.0
_LIST_TIMEOUT_S = 300.0
_MAX_LIST_BYTES = 64 * 1024 * 1024


class SessionEnded(Exception):
    """The processes of the session are gone: a limit, or the machine."""


class CallFailed(Exception):
    """A call on a file was refused inside the session; the message says why."""


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What one call left behind."""

    end: str
    """exited, deadline or cancelled."""
    exit_code: int
    """Negative for a signal."""
    output: bytes
    """The first and the last half of what fits, when it wrote more."""
    num_dropped_bytes: int
    duration_s: float


class LiveSession:
    """A tree that stays, with the processes on it. One call at a time; blocks its thread."""

    def __init__(self, jailer: Jailer, *, lower: Path, limits: Limits, environment: str | None) -> None:
        """Start it. Raises OSError, SessionEnded, UnknownEnvironment."""
        self._jailer = jailer
        job = jailer.job(lower=lower, limits=limits, environment=environment, timeout_s=MAX_LIFETIME_S)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._result, result_write = os.pipe()
        control_read, self._control = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        fds = [jailer.message_file({**job, "is_session": True}), null, theirs.detach(), result_write, control_read]
        try:
            try:
                jailer.send(fds)
            finally:
                for fd in fds:
                    os.close(fd)
            self._channel.settimeout(_START_TIMEOUT_S)
            if self._channel.recv(16) != b"ready":
                raise SessionEnded(self.why_ended())
        except BaseException:
            self.close()
            raise

    def exec(self, command: str, *, timeout_s: float, max_output_bytes: int, cancellation: Cancellation) -> CallResult:
        """Run a shell command to its end, or to its deadline. Raises SessionEnded."""
        call = {"op": "exec", "command": command, "timeout_s": timeout_s}
        return self._call(call, max_output_bytes, cancellation)

    def read(self, path: str, *, offset: int, max_bytes: int, cancellation: Cancellation) -> tuple[bytes, int]:
        """Part of a file, and the file's size. Raises SessionEnded, CallFailed."""
        call = {"op": "read", "path": path, "offset": offset, "max_bytes": max_bytes, "timeout_s": _FILE_TIMEOUT_S}
        header, content = self._file_call(call, max_bytes + 4096, cancellation)
        return content, int(header["size"])

    def write(self, path: str, content: bytes, *, cancellation: Cancellation) -> None:
        """Write a file, whole. Raises SessionEnded, CallFailed."""
        call = {"op": "write", "path": path, "content": content, "timeout_s": _FILE_TIMEOUT_S}
        self._file_call(call, 4096, cancellation)

    def list_tree(self, algorithm: str, *, cancellation: Cancellation) -> dict[str, tuple[str, str]]:
        """Path to (mode, blob id) of every file, after every process has been killed.

        Raises SessionEnded, CallFailed.
        """
        call = {"op": "list", "algorithm": algorithm, "timeout_s": _LIST_TIMEOUT_S}
        _, content = self._file_call(call, _MAX_LIST_BYTES, cancellation)
        found = {}
        for line in content.split(b"\0")[:-1]:
            mode, blob, path = line.split(b" ", 2)
            found[os.fsdecode(path)] = (mode.decode(), blob.decode())
        return found

    def fetch(self, paths: list[str], *, max_bytes: int, cancellation: Cancellation) -> list[bytes]:
        """Contents of files and targets of symlinks. Raises SessionEnded, CallFailed."""
        encoded = [os.fsencode(path) for path in paths]
        call = {"op": "fetch", "paths": encoded, "max_bytes": max_bytes, "timeout_s": _LIST_TIMEOUT_S}
        header, content = self._file_call(call, max_bytes + 64 * len(paths) + 4096, cancellation)
        contents, offset = [], 0
        for size in header["sizes"]:
            contents.append(content[offset : offset + size])
            offset += size
        return contents

    def close(self) -> None:
        """End every process of the session; safe to call more than once."""
        self._channel.close()
        for name in ("_control", "_result"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)

    def why_ended(self) -> str:
        """What the jail says about the end of the session, once it has ended."""
        if self._result < 0:
            return "the session is closed"
        with selectors.DefaultSelector() as selector:
            selector.register(self._result, selectors.EVENT_READ)
            data = os.read(self._result, 1 << 20) if selector.select(_GRACE_S) else b""
        message = marshal.loads(data) if data else {"end": "launcher_died"}
        reasons = {"memory": "its processes held more than limits.memory_mb together"}
        return str(message.get("error") or reasons.get(message["end"], message["end"]))

    def _file_call(
        self, call: dict[str, Any], max_output_bytes: int, cancellation: Cancellation
    ) -> tuple[dict[str, Any], bytes]:
        result = self._call(call, max_output_bytes, cancellation)
        if result.end != "exited" or result.exit_code != 0 or result.num_dropped_bytes:
            said = result.output[:500].decode(errors="replace").strip()
            raise CallFailed(said or f"the call ended early ({result.end}, exit code {result.exit_code})")
        header, _, content = result.output.partition(b"\n")
        try:
            fields: dict[str, Any] = json.loads(header)
        except ValueError as error:
            raise CallFailed(f"the answer is malformed: {error}") from error
        return fields, content

    def _call(self, call: dict[str, Any], max_output_bytes: int, cancellation: Cancellation) -> CallResult:
        output_read, output_write = os.pipe()
        result_read, result_write = os.pipe()
        control_read, control_write = os.pipe()
        theirs = [self._jailer.message_file(call), output_write, result_write, control_read]
        cancellation.attach(control_write)
        try:
            try:
                socket.send_fds(self._channel, [b"call"], theirs)
            except OSError as error:
                raise SessionEnded(self.why_ended()) from error
            finally:
                for fd in theirs:
                    os.close(fd)
            output, message = _collect(output_read, result_read, max_output_bytes, call["timeout_s"] + _GRACE_S)
        finally:
            cancellation.release()
            os.close(output_read)
            os.close(result_read)
        if not message:
            raise SessionEnded(self.why_ended())
        found = marshal.loads(message)
        return CallResult(
            end=found["end"],
            exit_code=os.waitstatus_to_exitcode(found["wait_status"]),
            output=output.content(),
            num_dropped_bytes=output.num_dropped,
            duration_s=found["duration_s"],
        )


class _Ends:
    """The first and the last half of a stream that may be longer."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        room = self._limit - self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[max(0, room) :]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    @property
    def num_dropped(self) -> int:
        return max(0, self._size - self._limit)

    def content(self) -> bytes:
        return bytes(self._head) + bytes(self._tail[-self._half :])


def _collect(output: int, result: int, limit: int, timeout_s: float) -> tuple[_Ends, bytes]:
    """Read until the call has ended; what its background processes write later is theirs."""
    ends, message = _Ends(limit), b""
    os.set_blocking(output, False)
    with selectors.DefaultSelector() as selector:
        for fd in (output, result):
            selector.register(fd, selectors.EVENT_READ)
        while not message:
            ready = [key.fd for key, _ in selector.select(timeout_s)]
            if not ready:
                break  # the jail does not answer: as if it had died
            if output in ready and not _drain(output, ends):
                selector.unregister(output)
            if result in ready:
                message = os.read(result, 65536)
                if not message:
                    break
    _drain(output, ends)
    return ends, message


def _drain(fd: int, ends: _Ends) -> bool:
    """Read what is there, up to a point; returns False at the end of the stream."""
    for _ in range(64):
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        ends.add(chunk)
    return True
