"""The command ``dockyard-sandbox``: serve, run, certify, env import, doctor."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dockyard_core import UserError
from dockyard_sandbox.isolation import LEVELS


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


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dockyard-sandbox", description="Turns a patch into a test verdict.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve POST /task/submit")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=9090, help="0 picks a free one (default: %(default)s)")
    serve.add_argument("--token-file", type=Path, help="bearer token, or lines tenant:token; needed in public")
    serve.add_argument("--workers", type=int, help="tests run at once (default: the CPUs that it may use)")
    serve.add_argument("--max-queue", type=int, default=1024, help="tasks that may wait (default: %(default)s)")
    serve.add_argument("--max-sessions", type=int, default=256, help="sessions open at once (default: %(default)s)")
    serve.add_argument(
        "--repos-from",
        action="append",
        default=[],
        metavar="PREFIX",
        help="path or URL below which tasks may name repositories themselves; may be given again (default: any)",
    )
    serve.add_argument("--no-warm", action="store_true", help="start a new interpreter for every run")
    serve.add_argument("--die-with-parent", action="store_true", help="stop when the starting process ends")
    serve.set_defaults(command=_serve)
    run = commands.add_parser("run", help="judge the task in a JSON file and print the verdict")
    run.add_argument("task", type=Path, metavar="TASK.json")
    run.set_defaults(command=_run)
    certify = commands.add_parser("certify", help="say which tasks of a file a policy may be trained on")
    certify.add_argument("tasks", type=Path, metavar="TASKS.jsonl", help="rows with SWE-bench's columns")
    certify.add_argument("--out", type=Path, required=True, help="directory of the certificates")
    certify.add_argument("--runs", type=int, default=5, help="fresh runs of base and fix (default: %(default)s)")
    certify.add_argument("--workers", type=int, help="tests run at once (default: the CPUs that it may use)")
    certify.set_defaults(command=_certify)
    env = commands.add_parser("env", help="environments that tasks may name")
    env_import = env.add_subparsers(required=True, metavar="ACTION").add_parser(
        "import", help="unpack an image archive (OCI layout or docker save) as a read-only environment"
    )
    env_import.add_argument("image", type=Path, metavar="IMAGE.tar")
    env_import.add_argument("--root", type=Path, required=True, help="directory of the server")
    env_import.add_argument("--name", help="what tasks call it (default: the file's name without its ending)")
    env_import.add_argument("--python", help="the interpreter, as a path inside the image")
    env_import.set_defaults(command=_env_import)
    doctor = commands.add_parser("doctor", help="say what this machine gives")
    doctor.set_defaults(command=_doctor)
    for command in (serve, run, certify):
        command.add_argument("--root", type=Path, required=command is serve, help="directory of repositories and trees")
        command.add_argument("--min-isolation", choices=LEVELS[::-1], help="refuse to start below this level")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from dockyard_sandbox.serve import ServeConfig, serve
    from dockyard_sandbox.tokens import read_tokens

    options = {} if arguments.workers is None else {"workers": arguments.workers}
    config = ServeConfig(
        root=arguments.root,
        host=arguments.host,
        port=arguments.port,
        tokens=None if arguments.token_file is None else read_tokens(arguments.token_file),
        max_sessions=arguments.max_sessions,
        min_isolation=arguments.min_isolation,
        max_queue=arguments.max_queue,
        repos_from=tuple(arguments.repos_from),
        warm=not arguments.no_warm,
        dies_with_parent=arguments.die_with_parent,
        **options,
    )
    serve(config, lambda line: print(line, flush=True))
    return 0


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


def _certify(arguments: argparse.Namespace) -> int:
    from dockyard_sandbox.certify import certify_tasks, write_certificates
    from dockyard_sandbox.task_rows import read_tasks

    if arguments.runs < 1:
        raise UserError(f"--runs must be >= 1, got {arguments.runs}")
    tasks = read_tasks(arguments.tasks)
    _check_out(arguments.out)
    with tempfile.TemporaryDirectory(prefix="dockyard-sandbox-") as temporary:
        certificates = certify_tasks(
            tasks,
            root=arguments.root or Path(temporary),
            num_runs=arguments.runs,
            min_isolation=arguments.min_isolation,
            workers=arguments.workers,
        )
    for certificate, path in zip(certificates, write_certificates(certificates, arguments.out), strict=True):
        fields = {"instance_id": certificate.instance_id, "is_certified": certificate.is_certified}
        print(json.dumps({**fields, "reasons": certificate.reasons, "certificate": str(path)}))
    return 0 if all(certificate.is_certified for certificate in certificates) else 1


def _check_out(out: Path) -> None:
    """Refuse an ``--out`` that cannot be written before the work rather than after it; makes nothing."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(
            f"--out must be a directory that this user may write, got {str(out)!r}: {error.strerror or error}; "
            "name another one"
        ) from error


def _env_import(arguments: argparse.Namespace) -> int:
    from dockyard_sandbox.environments import BadEnvironment
    from dockyard_sandbox.serve import environments_on
    from dockyard_sandbox.wire import ENVIRONMENT_NAME

    name = arguments.name or arguments.image.name.split(".tar")[0]
    if not re.match(ENVIRONMENT_NAME, name):
        raise UserError(f"--name must be letters, digits, '_', '.' or '-', got {name!r}")
    if not arguments.image.exists():
        raise UserError(f"{arguments.image} must be an image archive or an unpacked environment, and is not there")
    with environments_on(arguments.root) as environments:
        try:
            found = environments.register(name, str(arguments.image.resolve()), python=arguments.python)
        except BadEnvironment as error:
            raise UserError(f"{arguments.image}: {error}") from error
    print(json.dumps({"name": name, "python": found.python, "digest": found.digest}, indent=1))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from dockyard_sandbox import preflight
    from dockyard_sandbox.isolation import REMEDIES
    from dockyard_sandbox.probing import probe_groups, probe_levels

    git = preflight.git_version()
    try:
        git_notes: tuple[str, ...] = preflight.git_notes(git)
        has_git = True
    except UserError as error:
        git_notes, has_git = (str(error),), False
    with tempfile.TemporaryDirectory(prefix="dockyard-sandbox-") as temporary:
        Path(temporary).chmod(0o755)
        findings, groups = probe_levels(Path(temporary)), probe_groups(Path(temporary))
        free_gib = shutil.disk_usage(temporary).free / 2**30
    best = next((finding.isolation for finding in findings if finding.failure is None), None)
    report = {
        "isolation": "none" if best is None else best.level,
        "tree": None if best is None else best.tree,
        "seccomp": best is not None and best.seccomp,
        "run_as_uid": None if best is None else best.uid or "own",
        "levels": {
            finding.isolation.level: {"available": True, "lacks": finding.isolation.notes}
            if finding.failure is None
            else {"available": False, "why": finding.failure, "remedy": REMEDIES[finding.isolation.level]}
            for finding in findings
        },
        "control_groups": {"in_use": groups.controllers, "lacks": groups.notes},
        "git": git or "missing",
        "git_lacks": git_notes,
        "cpus": preflight.num_cpus(),
        "free_disk_gib": round(free_gib, 1),
        "python": sys.version.split()[0],
    }
    print(json.dumps(report, indent=1))
    return 0 if best is not None and has_git else 1


if __name__ == "__main__":
    sys.exit(main())
