"""One server of the sandbox fleet: a real `dockyard-sandbox serve` process behind HTTP."""

from __future__ import annotations

import shutil
from pathlib import Path

from dockyard_grpo import compose, scratch
from dockyard_grpo.config import Config


class SandboxWorker:
    """Owns the server's process and its folder."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._root: Path | None = None
        self._server: compose.SandboxServer | None = None

    def start(self) -> str:
        """Start the server; returns its base URL."""
        scratch.sweep()
        self._root = scratch.make("sandbox")
        self._server = compose.start_sandbox_server(self._config, self._root)
        return self._server.url

    def stop(self) -> None:
        """End the server and remove its folder."""
        if self._server is not None:
            self._server.stop()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
