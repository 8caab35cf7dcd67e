"""The command ``dockyard-refit``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from dockyard_inference.push.checkpoint_dir import Checkpoint, read_checkpoint
from dockyard_inference.push.errors import CheckpointError, PushError, TransferFailed, Unsuitable
from dockyard_inference.push.http import Server
from dockyard_inference.push.sglang_server import SglangServer
from dockyard_inference.push.target import Target
from dockyard_inference.push.vllm_server import VllmServer

_EPILOG = """\
exit codes: 0 pushed; 2 a wrong argument or directory; 3 nothing answers; 4 the server cannot take weights as it was
started; 5 names or shapes differ, nothing changed; 6 the deadline passed; 7 it failed on the way; 130 interrupted
"""
DEV_MODE_OFF = (
    "this vLLM has no routes for weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment "
    "(in a trusted network only: the routes ask for no key)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; whatever goes wrong is one line on stderr and an exit code of its own."""
    arguments = _parser().parse_args(argv)
    try:
        return _push(arguments)
    except PushError as error:
        print(f"dockyard-refit: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("dockyard-refit: interrupted; if the server was paused it still is: push again", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dockyard-refit", description="Brings weights to running inference servers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    push = commands.add_parser(
        "push",
        help="push a checkpoint directory into a running vLLM or SGLang server",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    push.add_argument(
        "directory", type=Path, metavar="DIR", help="config.json and *.safetensors, or a checkpoint of Dockyard"
    )
    push.add_argument(
        "--to", required=True, type=_url, metavar="URL", help="the server, for example http://127.0.0.1:8000"
    )
    push.add_argument(
        "--version", type=_version, metavar="N", help="label of the weights (default: the server's plus 1)"
    )
    push.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="for everything (default: %(default)g)"
    )
    push.add_argument(
        "--transport",
        choices=("auto", "disk", "collective"),
        default="auto",
        help="disk: the server reads DIR, which it must see under the same path; collective: the bytes are sent "
        "(default: the best that the server takes)",
    )
    push.add_argument("--host", metavar="ADDRESS", help="address of this machine for the server (default: found out)")
    push.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the server's key")
    return parser


def _push(arguments: argparse.Namespace) -> int:
    checkpoint = read_checkpoint(arguments.directory)
    variable = arguments.api_key_env
    if variable is not None and not os.environ.get(variable):
        raise CheckpointError(f"--api-key-env names {variable}, which is not set")
    started = time.perf_counter()
    server = Server(arguments.to, arguments.timeout, variable and os.environ[variable])
    try:
        target = find_target(server, arguments.host)
        held = target.held_version
        version = next_version(held) if arguments.version is None else arguments.version
        _say(f"{target.kind} at {server.url} serves version {held}")
        compared = target.check(checkpoint)
        if not compared:
            _say("the server does not tell its tensors in a way that can be compared: names and shapes are unchecked")
        pushed = target.push(checkpoint, version, arguments.transport, _say)
        now = target.held_version
        if now != str(version):
            raise TransferFailed(f"the server says that it serves version {now}, not {version}: push again")
    finally:
        server.close()
    rate = checkpoint.num_bytes / max(pushed.transfer_s, 1e-9) / 1e6
    print(
        f"pushed {_size(checkpoint)} to {target.kind}: version {version}, {pushed.transport}, {rate:.0f} MB/s "
        f"({pushed.transfer_s:.2f} s; requests waited {pushed.paused_s:.2f} s; {time.perf_counter() - started:.2f} s "
        f"in all); compared: {compared or 'nothing'}"
    )
    return 0


def find_target(server: Server, advertise: str | None = None) -> Target:
    """Which program answers there.

    Raises:
        Unsuitable: neither vLLM nor SGLang, or a vLLM without its development mode.
    """
    model_info = server.ask("/model_info")
    if isinstance(model_info, dict) and "model_path" in model_info:
        return SglangServer(server, model_info, advertise)
    version = server.ask("/version")
    if isinstance(version, dict) and "version" in version:
        info = server.ask("/server_info?config_format=json")
        if isinstance(info, dict) and isinstance(info.get("vllm_config"), dict):
            return VllmServer(server, str(version["version"]), info["vllm_config"], advertise)
        models = server.ask("/v1/models")
        cards = models.get("data", []) if isinstance(models, dict) else []
        if any(isinstance(card, dict) and card.get("owned_by") == "vllm" for card in cards):
            raise Unsuitable(DEV_MODE_OFF)
    raise Unsuitable(f"what answers at {server.url} is neither vLLM nor SGLang: name the server's root, without a path")


def next_version(held: str) -> int:
    """One more than the last number of a label; 1 after a label without one."""
    numbers = re.findall(r"\d+", held)
    return int(numbers[-1]) + 1 if numbers else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _size(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.num_bytes / 1e6:.1f} MB in {len(checkpoint.specs)} tensors"


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        is_usable = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        is_usable = False
    if not is_usable:
        raise argparse.ArgumentTypeError(f"must be http://HOST:PORT, got {text!r}")
    return text


def _version(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds > 0, got {text!r}")
    return value
