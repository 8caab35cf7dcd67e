"""The loop's state machines, without IO and without a clock. Private to the app."""

from dockyard_core.loop.adaptive_limit import AdaptiveLimit
from dockyard_core.loop.buffer import ReplayBuffer
from dockyard_core.loop.config import EMPTY_LOOP, INVALID_CAUSES, ZERO_SIGNAL, LoopConfig, Member
from dockyard_core.loop.ledger import EMPTY_LEDGER, EventSink, Ledger, recount, surviving
from dockyard_core.loop.machine import LoopMachine
from dockyard_core.loop.refit_order import RefitOrder

__all__ = [
    "EMPTY_LEDGER",
    "EMPTY_LOOP",
    "INVALID_CAUSES",
    "ZERO_SIGNAL",
    "AdaptiveLimit",
    "EventSink",
    "Ledger",
    "LoopConfig",
    "LoopMachine",
    "Member",
    "RefitOrder",
    "ReplayBuffer",
    "recount",
    "surviving",
]
