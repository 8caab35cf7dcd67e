"""Staged weights to a server that sees none of our folders, by the group that SGLang makes for it.

A refused or broken transfer leaves the server with parts of two versions, paused.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from dockyard_core.errors import EngineDead, GeneratorError
from dockyard_inference.push.errors import PushError, PushTimeout, TransferFailed, Unreachable
from dockyard_inference.push.http import Background, Server, own_address
from dockyard_inference.sglang_engine.client import NoAnswer
from dockyard_inference.sglang_engine.requests import bucket_payload, group_payload
from dockyard_inference.sglang_engine.staging import StagedWeights


def broadcast_weights(url: str, api_key: str | None, staged: StagedWeights, label: str, limit_s: float) -> None:
    """Send every bucket to every worker of the paused server; blocks.

    Raises:
        NoAnswer: the server or a worker is late.
        EngineDead: it is gone.
        GeneratorError: it refused; what it holds is not known.
    """
    server = Server(url, limit_s, api_key)
    try:
        _send(server, staged, label)
    except PushTimeout as error:
        raise NoAnswer(f"SGLang at {url} is late: {error}") from error
    except Unreachable as error:
        raise EngineDead(f"SGLang's server is gone: {error}") from error
    except PushError as error:
        raise GeneratorError(str(error)) from error
    finally:
        server.close()


def _send(server: Server, staged: StagedWeights, label: str) -> None:
    from dockyard_inference.push.sglang_group import BroadcastGroup

    info: dict[str, Any] = server.ask("/server_info") or {}
    group = BroadcastGroup(
        host=own_address(server.host, int(info.get("port") or 80)),
        world_size=1 + int(info.get("tp_size") or 1),
        is_gpu=str(info.get("device", "cpu")) != "cpu",
        name=f"dockyard-{secrets.token_hex(6)}",
        timeout_s=server.left_s,
    )
    try:
        joining = Background(partial(server.tell, "/init_weights_update_group", group_payload(group)))
        group.open(joining)
        joining.result(server.left_s)
        _begin(server)
        runs = list(staged.runs())
        for number, (specs, payload) in enumerate(runs, start=1):
            body = bucket_payload(group.name, specs, label if number == len(runs) else None)
            taking = Background(partial(server.tell, "/update_weights_from_distributed", body))
            group.broadcast(payload, server.left_s, taking)
            taking.result(server.left_s)
        server.tell("/end_weight_update", {})
    finally:
        group.close()
    server.tell("/destroy_weights_update_group", {"group_name": group.name})


def _begin(server: Server) -> None:
    try:
        server.tell("/begin_weight_update", {})
    except TransferFailed:  # a transfer that broke has left it open
        server.tell("/end_weight_update", {})
        server.tell("/begin_weight_update", {})
