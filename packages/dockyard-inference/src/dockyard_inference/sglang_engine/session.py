"""What an engine keeps while its server is up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dockyard_inference.sglang_engine.client import SglangClient
from dockyard_inference.sglang_engine.loading import WeightLoader
from dockyard_inference.sglang_engine.model_facts import ModelFacts
from dockyard_inference.sglang_engine.server import ServerProcess


@dataclass
class LiveRequest:
    """A request under way."""

    name: str
    num_tries: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rid(self) -> str:
        """What the server calls it. It takes a rid to abort as a prefix, so each ends with a mark."""
        return f"{self.name}.{self.num_tries}#"

    def new_rid(self) -> str:
        """For another try."""
        self.num_tries += 1
        return self.rid


@dataclass(frozen=True)
class Session:
    """A server that is up."""

    server: ServerProcess
    client: SglangClient
    loader: WeightLoader
    facts: ModelFacts
