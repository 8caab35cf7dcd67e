"""Talks to a server under one deadline; whatever goes wrong is a ``PushError`` of one line."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import httpx

from dockyard_core.errors import DockyardError
from dockyard_inference.push.errors import PushTimeout, TransferFailed, Unreachable, Unsuitable

_T = TypeVar("_T")
_ANSWER_S = 30.0
"""How long a question that moves no weights may take."""
_CONNECT_S = 5.0


class Server:
    """One address, and the seconds that are left for it."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.host = httpx.URL(self.url).host
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A proxy of the environment would not know a server on this machine.
        self._client = httpx.Client(base_url=self.url, headers=headers, trust_env=not is_local(self.host))

    @property
    def left_s(self) -> float:
        """Seconds left; raises PushTimeout when none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise PushTimeout(f"not done within {self.timeout_s:g} s: raise --timeout")
        return left

    def ask(self, path: str) -> Any | None:
        """The JSON of a GET, or None where the server has no such path (or answers something else)."""
        answer = self._send("GET", path, None, min(self.left_s, _ANSWER_S))
        if answer.status_code in (401, 403):
            raise Unsuitable(f"{self.url} wants a key: name the variable that holds it with --api-key-env")
        return _json(answer) if answer.status_code == 200 else None

    def tell(self, path: str, body: dict[str, Any] | None = None, *, at_least_s: float = 0.0, **query: str) -> Any:
        """The JSON of a POST that moves or guards weights; it may take as long as there is time.

        Args:
            path: of the URL.
            body: JSON.
            at_least_s: for what has to be said even after the deadline.
            query: of the URL.

        Raises:
            TransferFailed: the server refuses; the message has its words.
        """
        seconds = max(at_least_s, self._end - time.monotonic()) if at_least_s else self.left_s
        answer = self._send("POST", path, body, seconds, query)
        if answer.status_code in (401, 403):
            raise Unsuitable(f"{self.url} wants a key for {path}: name its variable with --api-key-env")
        if answer.status_code != 200:
            raise TransferFailed(f"{path} answered {answer.status_code}: {_reason(answer)}")
        return _json(answer)

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, query: dict[str, str] | None = None
    ) -> httpx.Response:
        limits = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_S))
        try:
            return self._client.request(method, path, json=body, params=query or None, timeout=limits)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(
                f"nothing answers at {self.url}: {error}; is the server up, and the port right?"
            ) from error
        except httpx.TimeoutException as error:
            raise PushTimeout(f"{path} did not answer within {seconds:.0f} s") from error
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url} broke off during {path}: {error}; see the server's log") from error


class Background(Generic[_T]):
    """A call in a thread of its own that does not keep the process alive."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._answer: list[_T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the call returned or raised."""
        return not self._thread.is_alive()

    @property
    def is_failed(self) -> bool:
        """Whether the call raised."""
        return self.is_done and not self._answer

    def result(self, timeout_s: float) -> _T:
        """What the call returned; raises what it raised, or PushTimeout."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if not self._answer:
            raise PushTimeout(f"the server did not answer within {timeout_s:.0f} s")
        return self._answer[0]

    def _run(self, call: Callable[[], _T]) -> None:
        try:
            self._answer.append(call())
        except (DockyardError, RuntimeError, OSError, ValueError) as error:
            self._error = error  # raised again where the result is asked for


def is_local(host: str) -> bool:
    """Whether a host name leads to this machine: one can listen on its address."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return any(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback or _binds(str(address))
        for address in addresses
    )


def own_address(host: str, port: int) -> str:
    """The address of this machine that a server at ``host`` can reach."""
    if is_local(host):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _binds(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return {}


def _reason(answer: httpx.Response) -> str:
    """The server's words on one line; each puts them elsewhere."""
    found: Any = _json(answer) or answer.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:400] or "no reason given"
