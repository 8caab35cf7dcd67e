"""One server of the sandbox fleet: a real `dockyard-sandbox serve` process behind HTTP, with a token."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from dockyard_grpo import compose, scratch
from dockyard_grpo.config import Config
from dockyard_grpo.seams import SandboxServer


class SandboxWorker:
    """Owns the server's process and its folder. Every call may be made while another one waits.

    Args:
        config: of the run.
        token: the run's bearer token, which the server demands of its clients.
    """

    def __init__(self, config: Config, token: str) -> None:
        self._config = config
        self._token = token
        self._root: Path | None = None
        self._server: SandboxServer | None = None
        self._changing = asyncio.Lock()

    async def start(self) -> str:
        """Start the server on a free port of this node; returns its base URL.

        Raises SandboxUnavailable if it does not start.
        """
        async with self._changing:
            await asyncio.to_thread(scratch.sweep)
            self._root = scratch.make("sandbox")
            self._token_path.touch(mode=0o600, exist_ok=False)
            self._token_path.write_text(self._token)
            return await self._serve(port=0)

    async def wait_dead(self) -> int:
        """Return when the server's process has ended, by itself or by `stop`, with its exit code; -N = signal N."""
        server = self._living
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(server.pid)
        except ProcessLookupError:  # ended, and `stop` has taken note of it
            return server.stop()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return server.stop()

    async def restart(self) -> str:
        """End the server if it lives, and start it again: same URL, same folder, same token.

        What verdicts it had cached is lost; what a killed one left in the folder is removed. Raises
        SandboxUnavailable if it does not start.
        """
        async with self._changing:
            server = self._living
            await asyncio.to_thread(server.stop)
            return await self._serve(port=urlsplit(server.url).port or 0)

    async def stop(self) -> None:
        """End the server and remove its folder."""
        async with self._changing:
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)
            if self._root is not None:
                await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def _serve(self, port: int) -> str:
        self._server = await asyncio.to_thread(
            compose.start_sandbox_server, self._config, self._folder, self._token_path, port
        )
        return self._server.url

    @property
    def _living(self) -> SandboxServer:
        assert self._server is not None, "start() comes first"
        return self._server

    @property
    def _folder(self) -> Path:
        assert self._root is not None, "start() comes first"
        return self._root

    @property
    def _token_path(self) -> Path:
        return self._folder / "token"
