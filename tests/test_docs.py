"""The documentation: it builds without a warning, its links resolve, and its examples are true.

Python blocks are run. Command lines are read with the parsers that would read them, and the cheap ones are run; what
trains, serves, installs or tests for minutes is only read.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from pydantic import BaseModel

from dockyard_core.offline.options import parse_options
from dockyard_grpo.cli import main as app
from dockyard_sandbox.cli import _parser as sandbox_parser
from dockyard_trainer_jax import JaxPolicyConfig
from dockyard_trainer_torch import TorchPolicyConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "apps/grpo/README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
PYTHON_RUN_BY_A_WHEEL = {
    "packages/dockyard-core/README.md": "packages/dockyard-core/tests/test_core_nouns.py",
    "packages/dockyard-inference/README.md": "packages/dockyard-inference/tests/test_inference_readme.py",
    "packages/dockyard-trainer-jax/README.md": "packages/dockyard-trainer-jax/tests/test_jax_readme.py",
    "packages/dockyard-trainer-torch/README.md": "packages/dockyard-trainer-torch/tests/test_torch_readme.py",
}
WHEELS = {
    "core": "dockyard_core",
    "trainer-torch": "dockyard_trainer_torch",
    "trainer-jax": "dockyard_trainer_jax",
    "inference": "dockyard_inference",
    "sandbox": "dockyard_sandbox",
    "grpo": "dockyard_grpo.config",
}
BUILD = """
import sys
from sphinx.cmd.build import main
code = main(sys.argv[1:])
heavy = ("torch", "transformers", "jax", "flax", "vllm", "ray", "sglang")
loaded = [name for name in heavy if getattr(sys.modules.get(name), "__file__", None)]
sys.exit(code or (f"the build imported {loaded}" if loaded else 0))
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    skip_reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    index = 0
    while index < len(lines):
        opened = re.match(r"(`{3,})(\S*)", lines[index])
        index += 1
        if opened is None:
            continue
        start = index
        while lines[index] != opened[1]:
            index += 1
        marker = re.fullmatch(r"<!-- not run: (.+) -->", lines[start - 2]) if start > 1 else None
        yield Block(page, start, opened[2], "\n".join(lines[start:index]), marker and marker[1])
        index += 1


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
OWN_PYTHON = [block for block in PYTHON if str(block.page.relative_to(ROOT)) not in PYTHON_RUN_BY_A_WHEEL]


class Command(NamedTuple):
    """One simple command of a shell block."""

    block: Block
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.block.name} {' '.join(self.words)}"


def commands_of(block: Block) -> Iterator[Command]:
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:].partition("<<")[0] for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    yield Command(block, tuple(words))
                words = []
            else:
                words.append(word)


COMMANDS = [command for block in BLOCKS if block.language in ("bash", "console") for command in commands_of(block)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    options = ["-W", "--keep-going", "-n", "-q", "-d", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")]
    built = subprocess.run([sys.executable, "-c", BUILD, *options], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return out / "html"


class Anchors(HTMLParser):
    """Ids and links of one built page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(values["id"] or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")


def test_the_documentation_builds_without_a_warning_and_without_a_framework(site: Path) -> None:
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    written = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in ROOT.glob("docs/**/*.md")}
    assert "index.html" in written
    assert written - built == set()


def test_links_between_built_pages_lead_to_a_page_and_an_anchor(site: Path) -> None:
    pages = {page: Anchors(page) for page in site.rglob("*.html")}
    broken, checked = [], 0
    for page, anchors in pages.items():
        for link in anchors.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            checked += 1
            is_known = target in pages and (not url.fragment or unquote(url.fragment) in pages[target].ids)
            if not (is_known or (target.is_file() and not url.fragment)):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert checked > 100
    assert sorted(set(broken)) == []


def test_every_key_of_the_configuration_is_documented(site: Path) -> None:
    from dockyard_grpo.config import Config

    ids = Anchors(site / "getting-started/configuration.html").ids

    def leaves(model: BaseModel, prefix: str) -> Iterator[str]:
        for key, value in model:
            if isinstance(value, BaseModel):
                yield from leaves(value, f"{prefix}{key}-")
            else:
                yield f"{prefix}{key}"

    names = list(leaves(Config.model_validate({"policy": {"model": "m"}, "data": {"train": "t"}}), ""))
    assert len(names) > 50
    assert [name for name in names if f"config-{name.replace('_', '-')}" not in ids] == []


@pytest.mark.parametrize("page", WHEELS)
def test_every_public_name_of_a_wheel_is_documented(site: Path, page: str) -> None:
    ids = Anchors(site / f"apidocs/{page}.html").ids
    names = importlib.import_module(WHEELS[page]).__all__
    assert names
    assert [name for name in names if f"{WHEELS[page]}.{name}" not in ids] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    paths = re.findall(r"`((?:\.ci|apps|benchmarks|docs|packages|tests|tools)/[^`*\s]*)`", text)
    missing = [link for link in links if not urlsplit(link).scheme and not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize(("page", "test"), PYTHON_RUN_BY_A_WHEEL.items(), ids=str)
def test_python_that_is_not_run_here_is_run_by_its_wheel(page: str, test: str) -> None:
    source = (ROOT / test).read_text()
    assert "README.md" in source
    assert "subprocess.run" in source
    assert any(str(block.page.relative_to(ROOT)) == page for block in PYTHON)


@pytest.mark.parametrize("block", OWN_PYTHON, ids=lambda block: block.name)
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    if block.skip_reason is not None:
        compile(block.text, block.name, "exec")
        pytest.skip(f"{block.name} is not run: {block.skip_reason}")
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def messages() -> str:
    """Every text that the sources hold; … stands for what is filled in."""
    texts = []
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts))
    return "\n".join(texts)


def test_messages_that_troubleshooting_quotes_are_messages_of_the_sources() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    symptoms = re.findall(r"^(`[^`]+`(?: or `[^`]+`)*)\n: ", page, flags=re.MULTILINE)
    quoted = [message for symptom in symptoms for message in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 10
    known = messages()
    parts = {part.strip() for message in quoted for part in re.split("…|null|; ", message) if part.strip(" ,;?")}
    assert sorted(part for part in parts if part not in known) == []


# What each program of a command line is checked against. A program that is missing here fails the test: say how it is
# checked, or leave it out of the documentation.


def check_app(arguments: Sequence[str], tmp_path: Path) -> None:
    """`uv run apps/grpo`: values are validated; ``config`` and the options that only print are run for real."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text((ROOT / "apps/grpo/src/dockyard_grpo/quickstart.yaml").read_text())
    placeholders = {"FILE": str(run_dir / "config.yaml"), "run.resume=RUN_DIR": f"run.resume={run_dir}"}
    words = [placeholders.get(word, word) for word in arguments]
    if {"--help", "--version", "config"} & set(words):
        program = [sys.executable, "apps/grpo", *words]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        return
    if words and words[0] == "doctor":
        words = [word for word in words if word != "--json"]
    assert app(["config", *(word for word in words if word not in ("train", "doctor"))]) == 0


def check_sandbox(arguments: Sequence[str], tmp_path: Path) -> None:
    """`dockyard-sandbox`: read by its parser; ``doctor`` is run for real."""
    try:
        sandbox_parser().parse_args(arguments)
    except SystemExit as error:
        raise AssertionError(f"dockyard-sandbox {shlex.join(arguments)} is not understood") from error
    if list(arguments) == ["doctor"]:
        command = [sys.executable, "-m", "dockyard_sandbox.cli", "doctor"]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=60)


def check_uv(arguments: Sequence[str], tmp_path: Path) -> None:
    """`uv run` and `uv sync`: groups exist, and what is run is checked in turn."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    command, *words = arguments
    assert command in ("run", "sync")
    while words and words[0].startswith("--"):
        option = words.pop(0)
        assert option in ("--no-sync", "--group", "--no-group"), f"uv {command} {option}"
        if option != "--no-sync":
            assert words.pop(0) in groups
    if command == "sync":
        assert not words
    elif words[0] == "apps/grpo":
        check_app(words[1:], tmp_path)
    else:
        assert words[0] not in ("uv", "pip")
        check(words, tmp_path)


def check_pytest(arguments: Sequence[str], tmp_path: Path) -> None:
    """`pytest`: markers and paths exist; it is not run inside itself."""
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "-m":
            assert words.pop(0) in [marker.partition(":")[0] for marker in markers]
        else:
            assert (ROOT / word).exists()


def check_python(arguments: Sequence[str], tmp_path: Path) -> None:
    """`python`: a script of the repository and its option, or Sphinx with the options that the test above uses."""
    if list(arguments[:2]) == ["-m", "sphinx"]:
        assert set(arguments[2:-2]) <= {"-W", "--keep-going", "-n"}
        assert (ROOT / arguments[-2] / "conf.py").is_file()
        return
    script, *options = arguments
    source = (ROOT / script).read_text()
    assert [option for option in options if option not in source] == []


def check_pip(arguments: Sequence[str], tmp_path: Path) -> None:
    """`pip install`: uv, or wheels and extras of this repository."""
    assert arguments[0] == "install"
    for requirement in arguments[1:]:
        if requirement == "uv":
            continue
        found = re.fullmatch(r"(\./packages/[\w-]+)(?:\[([\w,-]+)\])?", requirement)
        assert found is not None, requirement
        project = tomllib.loads((ROOT / found[1] / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        assert [extra for extra in (found[2] or "").split(",") if extra and extra not in extras] == []


def check_train_torch(arguments: Sequence[str], tmp_path: Path) -> None:
    """`dockyard-train-torch`: its own parser takes the options, and its records the fields."""
    parse_options(arguments, prog="dockyard-train-torch", policy_config=TorchPolicyConfig)


def check_train_jax(arguments: Sequence[str], tmp_path: Path) -> None:
    """`dockyard-train-jax`: its own parser takes the options, and its records the fields."""
    parse_options(arguments, prog="dockyard-train-jax", policy_config=JaxPolicyConfig)


def check_torchrun(arguments: Sequence[str], tmp_path: Path) -> None:
    """`torchrun`: a module of ours, whose own check takes the rest."""
    start = list(arguments).index("-m")
    module, *rest = arguments[start + 1 :]
    assert module == "dockyard_trainer_torch"
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    check_train_torch(rest, tmp_path)


def check_script(arguments: Sequence[str], tmp_path: Path) -> None:
    """`.ci/run` exists and may be executed."""
    assert not arguments
    assert os.access(ROOT / ".ci/run", os.X_OK)


def check_shell(arguments: Sequence[str], tmp_path: Path) -> None:
    """Nothing of ours is said: the shell's own words and common programs."""


CHECKS = {
    ".ci/run": check_script,
    "cd": check_shell,
    "curl": check_shell,
    "dockyard-sandbox": check_sandbox,
    "dockyard-train-jax": check_train_jax,
    "dockyard-train-torch": check_train_torch,
    "echo": check_shell,
    "export": check_shell,
    "git": check_shell,
    "mkdir": check_shell,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "torchrun": check_torchrun,
    "uv": check_uv,
}


def check(words: Sequence[str], tmp_path: Path) -> None:
    program, *arguments = words
    assert program in CHECKS, f"no check for {program!r}: add one, or leave the command out"
    CHECKS[program](arguments, tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_commands_are_understood_by_what_they_name(command: Command, tmp_path: Path) -> None:
    check(command.words, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "uv run apps/grpo grpo.max_stalenes=0",
        "uv run apps/grpo config --no-such-option",
        "uv run --group cuda apps/grpo",
        "uv run pytest -m weekly",
        "dockyard-sandbox serve --port 9090",
        "dockyard-sandbox bake TASK.json",
        "python tools/lock.py --uninstall",
        "pip install ./packages/dockyard-core[torch]",
        "make docs",
    ],
)
def test_the_checks_notice_what_does_not_exist(line: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(shlex.split(line), tmp_path)
