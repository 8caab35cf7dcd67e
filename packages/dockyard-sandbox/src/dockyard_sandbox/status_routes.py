"""HTTP about the server itself: alive, ready, metrics, version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from dockyard_sandbox.metrics import CONTENT_TYPE, Labels
from dockyard_sandbox.service import Service

Handler = Callable[[Request], Awaitable[Response]]


class StatusRoutes:
    """Handlers that only look."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[tuple[str, str, Handler]]:
        """(path, method, handler) of each route that needs a token."""
        return [("/readyz", "GET", self._ready), ("/metrics", "GET", self._metrics), ("/version", "GET", self._version)]

    async def healthy(self, request: Request) -> Response:
        """Say that the server answers."""
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        executor = self._service.executor
        state = {"status": "ready", "isolation": executor.isolation, "workers": executor.workers}
        state |= {"num_executions": executor.num_executions, "num_held": self._service.admission.num_held}
        state |= {"num_sessions": len(self._service.sessions), "environments": self._service.environments.names()}
        state |= {"warm": executor.is_warm}
        return JSONResponse({**state, "notes": self._service.notes})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"name": "dockyard-sandbox", "version": version("dockyard-sandbox")})

    async def _metrics(self, request: Request) -> Response:
        service = self._service
        runs: dict[Labels, float] = {(("path", path),): num for path, num in service.executor.trials.num_runs.items()}
        gauges: list[tuple[str, str, Mapping[Labels, float]]] = [
            ("tasks_held", "Tasks accepted and not answered.", _by_tenant(service.admission.held_by_tenant())),
            ("body_bytes", "Bytes of requests on their way or held.", _by_tenant(service.bodies.held_by_tenant())),
            ("sessions_open", "Sessions that are open.", {(): float(len(service.sessions))}),
            ("workers", "Tests that may run at once.", {(): float(service.executor.workers)}),
            ("executions", "Trees judged by runs since the start.", {(): float(service.executor.num_executions)}),
            ("runs", "Runs since the start; failed and differed ones are warm ones.", runs),
            ("isolation", "1 for the level in use.", {(("level", service.executor.isolation),): 1.0}),
        ]
        return PlainTextResponse(service.metrics.text(gauges), media_type=CONTENT_TYPE)


def _by_tenant(counts: Mapping[str, int]) -> dict[Labels, float]:
    return {(("tenant", name),): float(count) for name, count in counts.items()}
