"""Waits until an SGLang server is up, and makes sure that it is the right one."""

from __future__ import annotations

import asyncio
import resource
import secrets
import time

from dockyard_core.errors import GeneratorError
from dockyard_core.generator import SamplingParams
from dockyard_inference.sglang_engine.client import SglangClient
from dockyard_inference.sglang_engine.config import SglangConfig
from dockyard_inference.sglang_engine.requests import resume_payload, rollout_payload
from dockyard_inference.sglang_engine.server import ServerProcess

_POLL_S = 0.2
_POLL_ANSWER_S = 5.0
_OPEN_FILES = 65_536


def allow_connections() -> None:
    """Each request under way is an open file; many systems start with 1024 and allow more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def await_server(config: SglangConfig, server: ServerProcess, client: SglangClient) -> None:
    """Return when the server has sampled a token: its HTTP side answers even when its scheduler is stuck.

    Raises:
        GeneratorError: it ended, is late, or is another one; the message has its last lines.
    """
    what = f"SGLang did not start for {config.model}" if config.python else f"no SGLang server serves at {config.url}"
    end = time.monotonic() + config.start_timeout_s
    while True:
        try:
            info = await client.ask("/model_info", _POLL_ANSWER_S)
            break
        except GeneratorError as error:
            if not server.is_running:
                raise GeneratorError(f"{what}: exit code {server.exit_code}; {server.last_words()}") from error
            if config.url is not None or time.monotonic() > end:
                late = "" if config.url else f" within {config.start_timeout_s:g} s"
                raise GeneratorError(f"{what}{late}: {error}") from error
        await asyncio.sleep(_POLL_S)
    if config.python is not None and info.get("weight_version") != server.label:
        raise GeneratorError(f"{what}: another server answers at {server.url}; start it again")
    try:
        async with asyncio.timeout(max(_POLL_ANSWER_S, end - time.monotonic())):
            if config.url is not None:
                await client.tell("/continue_generation", resume_payload(), _POLL_ANSWER_S)
            payload = rollout_payload((0,), SamplingParams(temperature=0.0), 1, "first")
            reply = await client.generate(payload, lambda: f"first-{secrets.token_hex(4)}#")
    except TimeoutError as error:
        raise GeneratorError(f"{what}: no token within {config.start_timeout_s:g} s; {server.last_words()}") from error
    if not reply.get("output_ids"):
        raise GeneratorError(f"{what}: it sampled nothing: {str(reply)[:200]}")
