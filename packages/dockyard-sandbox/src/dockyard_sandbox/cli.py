"""The command ``dockyard-sandbox``: serve, run, doctor."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dockyard_core import UserError
from dockyard_sandbox.isolation import LEVELS

_MIN_TOKEN_LENGTH = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a mistake of the user is one line on stderr and exit code 2."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except UserError as error:
        print(f"dockyard-sandbox: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dockyard-sandbox", description="Turns a patch into a test verdict.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve POST /task/submit")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=9090, help="0 picks a free one (default: %(default)s)")
    serve.add_argument("--token-file", type=Path, help="file with the bearer token; needed for a public bind")
    serve.add_argument("--workers", type=int, help="tests run at once (default: number of CPUs)")
    serve.add_argument("--max-queue", type=int, default=1024, help="tasks that may wait (default: %(default)s)")
    serve.add_argument("--die-with-parent", action="store_true", help="stop when the starting process ends")
    serve.set_defaults(command=_serve)
    run = commands.add_parser("run", help="judge the task in a JSON file and print the verdict")
    run.add_argument("task", type=Path, metavar="TASK.json")
    run.set_defaults(command=_run)
    doctor = commands.add_parser("doctor", help="say what this machine gives")
    doctor.set_defaults(command=_doctor)
    for command in (serve, run):
        command.add_argument("--root", type=Path, required=command is serve, help="directory of repositories and trees")
        command.add_argument("--min-isolation", choices=LEVELS[::-1], help="refuse to start below this level")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from dockyard_sandbox.serve import ServeConfig, serve

    options = {} if arguments.workers is None else {"workers": arguments.workers}
    config = ServeConfig(
        root=arguments.root,
        host=arguments.host,
        port=arguments.port,
        token=_read_token(arguments.token_file),
        min_isolation=arguments.min_isolation,
        max_queue=arguments.max_queue,
        dies_with_parent=arguments.die_with_parent,
        **options,
    )
    serve(config, lambda line: print(line, flush=True))
    return 0


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"--token-file {path} cannot be read: {error.strerror}") from error
    if len(token) < _MIN_TOKEN_LENGTH:
        raise UserError(f"--token-file {path} must hold at least {_MIN_TOKEN_LENGTH} characters, got {len(token)}")
    return token


def _run(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from dockyard_sandbox.repos import UnknownRepo
    from dockyard_sandbox.serve import ServeConfig, executor_on
    from dockyard_sandbox.wire import TaskRequest, TaskResponse

    try:
        request = TaskRequest.model_validate_json(arguments.task.read_bytes())
    except OSError as error:
        raise UserError(f"{arguments.task} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{arguments.task}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    async def judge(root: Path) -> TaskResponse:
        with executor_on(ServeConfig(root=root, min_isolation=arguments.min_isolation, workers=1)) as executor:
            try:
                return await executor.submit(request)
            finally:
                await executor.close()

    with tempfile.TemporaryDirectory(prefix="dockyard-sandbox-") as temporary:
        try:
            response = asyncio.run(judge(arguments.root or Path(temporary)))
        except UnknownRepo as error:
            raise UserError(f"{arguments.task}: {error}") from error
    print(response.model_dump_json(indent=1))
    return 0 if response.resolved else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from dockyard_sandbox.serve import find_jailer

    git = subprocess.run(["git", "--version"], capture_output=True, text=True, check=False).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="dockyard-sandbox-") as temporary:
        Path(temporary).chmod(0o755)
        jailer = find_jailer(Path(temporary), None)
        jailer.close()
        free_gib = shutil.disk_usage(temporary).free / 2**30
    isolation = jailer.isolation
    report = {
        "isolation": isolation.level,
        "tree": isolation.tree,
        "seccomp": isolation.seccomp,
        "run_as_uid": isolation.uid or "own",
        "git": git or "missing",
        "free_disk_gib": round(free_gib, 1),
        "python": sys.version.split()[0],
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
