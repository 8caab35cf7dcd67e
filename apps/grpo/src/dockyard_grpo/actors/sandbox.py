"""One server of the sandbox fleet: a real `dockyard-sandbox serve` process behind HTTP."""

from __future__ import annotations

import shutil

from dockyard_grpo import compose, scratch
from dockyard_grpo.config import Config


class SandboxWorker:
    """Owns the server's process and its folder."""

    def __init__(self, config: Config) -> None:
        scratch.sweep()
        self._root = scratch.make("sandbox")
        self._server = compose.start_sandbox_server(config, self._root)

    def url(self) -> str:
        """Base URL of the server."""
        return str(self._server.url)

    def stop(self) -> None:
        """End the server and remove its folder."""
        self._server.stop()
        shutil.rmtree(self._root, ignore_errors=True)
