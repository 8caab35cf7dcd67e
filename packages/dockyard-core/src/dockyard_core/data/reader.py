"""JSONL of SWE-bench-style rows -> tasks that carry their prompt files.

rows     a line is validated by itself, with its line number in every message
repos    a row's repository is resolved, once per repository
files    the paths that the gold patch touches (the oracle files) are read at the base commit
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dockyard_core.data.repos import BlobReader, RepoError, default_cache_dir, open_repo, resolve_repo
from dockyard_core.data.rows import TaskRow, parse_row
from dockyard_core.errors import DataError
from dockyard_core.patch import touched_paths
from dockyard_core.task import Task

_logger = logging.getLogger(__name__)


class _Located(NamedTuple):
    where: str  # file:line
    row: TaskRow


def read_tasks(path: Path, *, limit: int | None = None, cache_dir: Path | None = None) -> tuple[Task, ...]:
    """Read, validate and complete the tasks of a JSONL file, in its order.

    ``prompt_files`` are the paths that the row's ``patch`` touches and that exist as UTF-8 text at
    ``base_commit``. They stay empty where the dataset has no ``patch``, and where ``repo`` is a name
    that only the sandbox knows (logged once).

    Args:
        path: one JSON object per line; blank lines are skipped. A relative ``repo`` is relative to
            its folder.
        limit: read the first so many rows only; None = all.
        cache_dir: where bundles and ``https://`` repositories are cloned to; None = `default_cache_dir`.

    Raises:
        DataError: ``file:line: field: rule, value, way out``.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}; use None for all rows")
    located = list(islice(_rows(path), limit))
    if not located:
        raise DataError(f"{path}: file: must hold at least one row, got none; add tasks")
    repos = [_resolve(item, path.parent) for item in located]
    cache_dir = (cache_dir or default_cache_dir()).expanduser().absolute()
    files: dict[int, tuple[tuple[str, str], ...]] = {}
    for repo in dict.fromkeys(repos):
        indices = [index for index, other in enumerate(repos) if other == repo]
        files.update(_prompt_files(repo, {index: located[index] for index in indices}, cache_dir))
    num_unseen = sum(index not in files for index in range(len(located)))
    if num_unseen:
        _logger.warning("%s: %d tasks name a repository known only to the sandbox; no prompt files", path, num_unseen)
    return tuple(
        _task(item.row, repo, files.get(index, ()))
        for index, (item, repo) in enumerate(zip(located, repos, strict=True))
    )


def dataset_fingerprint(tasks: Sequence[Task]) -> str:
    """SHA-256 (hex) over the tasks in their order.

    Of a local repository only the last path component counts: commits name the content, and the same
    dataset must have the same fingerprint wherever it lies.
    """
    digest = hashlib.sha256()
    for task in tasks:
        fields = asdict(task)
        if Path(task.repo).is_absolute():
            fields["repo"] = Path(task.repo).name
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _rows(path: Path) -> Iterator[_Located]:
    lines_by_id: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                row = parse_row(line, where)
                if row.instance_id in lines_by_id:
                    raise DataError(
                        f"{where}: instance_id: must be unique, got {row.instance_id!r} as on line "
                        f"{lines_by_id[row.instance_id]}; rename or remove one"
                    )
                lines_by_id[row.instance_id] = number
                yield _Located(where, row)
    except OSError as error:
        raise DataError(f"{path}: file: must be a readable file, got {error.strerror}; check the path") from error


def _resolve(item: _Located, folder: Path) -> str:
    try:
        return resolve_repo(item.row.repo, folder)
    except RepoError as error:
        raise DataError(f"{item.where}: repo: {error}") from error


def _prompt_files(repo: str, located: dict[int, _Located], cache_dir: Path) -> dict[int, tuple[tuple[str, str], ...]]:
    """Oracle files of the rows (by index) that share ``repo``; {} when it cannot be seen from here."""
    files: dict[int, tuple[tuple[str, str], ...]] = {}
    current = next(iter(located.values()))
    try:
        git_dir = open_repo(repo, cache_dir)
        if git_dir is None:
            return {}
        with ExitStack() as stack:
            reader = stack.enter_context(BlobReader(git_dir))
            for index, current in located.items():
                files[index] = _oracle_files(current, reader)
    except (RepoError, OSError) as error:
        raise DataError(f"{current.where}: repo: {error}") from error
    return files


def _oracle_files(item: _Located, reader: BlobReader) -> tuple[tuple[str, str], ...]:
    commit = item.row.base_commit
    if not reader.has_commit(commit):
        raise DataError(
            f"{item.where}: base_commit: must be a commit of {item.row.repo!r}, got {commit}; "
            "fetch it, or remove a stale clone from the cache folder"
        )
    texts = ((path, reader.read_text(commit, path)) for path in touched_paths(item.row.patch or ""))
    return tuple((path, text) for path, text in texts if text is not None)


def _task(row: TaskRow, repo: str, prompt_files: tuple[tuple[str, str], ...]) -> Task:
    return Task(
        instance_id=row.instance_id,
        repo=repo,
        base_commit=row.base_commit,
        problem_statement=row.problem_statement,
        test_patch=row.test_patch,
        fail_to_pass=row.FAIL_TO_PASS,
        pass_to_pass=row.PASS_TO_PASS,
        gold_patch=row.patch,
        prompt_files=prompt_files,
        environment=row.environment,
        test_command=row.test_command,
        plugins=row.plugins,
        timeout_s=row.timeout_s,
        apply=row.apply,
        labels=tuple((name, str(value)) for name, value in row.labels.items()),
    )
