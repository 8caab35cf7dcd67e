"""The client and server together are a `dockyard_core.Sandbox`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from dockyard_core import Sandbox, SessionSandbox
from dockyard_core.testing.sandbox_contract import SandboxCase, SandboxContract, SessionContract
from dockyard_sandbox import SandboxClient, ServerHandle


class Served:
    """A server and its client."""

    @pytest.fixture(autouse=True)
    def _use(self, project: Any, server: ServerHandle) -> None:
        self._project, self._server = project, server

    def make_case(self) -> SandboxCase:
        case: SandboxCase = self._project.case()
        return case

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[SandboxClient]:
        async with SandboxClient(self._server.url, timeout_s=120.0) as client:
            yield client


class TestSandboxClientContract(Served, SandboxContract):
    def open_sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        return self.opened()


class TestSandboxClientSessionContract(Served, SessionContract):
    def open_session_sandbox(self) -> AbstractAsyncContextManager[SessionSandbox]:
        return self.opened()
