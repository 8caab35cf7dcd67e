"""What an engine keeps while its server is up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dockyard_inference.sglang_engine.client import SglangClient
from dockyard_inference.sglang_engine.loading import WeightLoader
from dockyard_inference.sglang_engine.model_facts import ModelFacts
from dockyard_inference.sglang_engine.server import ServerProcess

_T = TypeVar("_T")


@dataclass
class LiveRequest:
    """A request under way."""

    name: str
    num_tries: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """SGLang keeps a request that comes in a pause where no abort reaches it: nobody waits for it any more."""

    @property
    def rid(self) -> str:
        """What the server calls it. It takes a rid to abort as a prefix, so each ends with a mark."""
        return f"{self.name}.{self.num_tries}#"

    def new_rid(self) -> str:
        """For another try."""
        self.num_tries += 1
        return self.rid

    async def unless_given_up(self, answer: Coroutine[Any, Any, _T]) -> _T | None:
        """What the server answers; None if it is given up before."""
        answering, giving_up = asyncio.ensure_future(answer), asyncio.ensure_future(self.given_up.wait())
        try:
            await asyncio.wait((answering, giving_up), return_when=asyncio.FIRST_COMPLETED)
            return await answering if answering.done() else None
        finally:
            answering.cancel()  # the server ends a request whose client is gone
            giving_up.cancel()


@dataclass(frozen=True)
class Session:
    """A server that is up."""

    server: ServerProcess
    client: SglangClient
    loader: WeightLoader
    facts: ModelFacts
