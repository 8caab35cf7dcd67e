"""How a patch reaches the tree: both presets against the programs that they stand for, run in a real working tree."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import VerdictStatus as S
from dockyard_sandbox.apply import Applier, Delta, PatchRejected
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.gitcmd import write_git_config
from dockyard_sandbox.rungs import FUZZ, GIT_APPLY, THREE_WAY, apply_on_rungs
from dockyard_sandbox.serve import find_jailer
from dockyard_sandbox.trees import BaseTree, TreeStore

LINES = [f"line {number}\n" for number in range(40)]
FILES = {
    "text.txt": "".join(LINES),
    "crlf.txt": "".join(LINES).replace("\n", "\r\n"),
    "open.txt": "first\nlast without newline",
    "twice.txt": "".join(LINES[:6]) * 2,
    "run.sh": "#!/bin/sh\nexit 0\n",
}


OLD_TEXT = FILES["text.txt"].replace("line 18\n", "line eighteen\n")


@pytest.fixture(scope="module")
def repository(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A repository of two commits; the base is the second."""
    made = new_project(tmp_path_factory.mktemp("rungs") / "p", {**FILES, "text.txt": OLD_TEXT})
    (made.path / "text.txt").write_text(FILES["text.txt"])
    made.git("commit", "--quiet", "--all", "--message", "second")
    return made


def for_the_version_before(repository: Any) -> str:
    """A fix of the line two below the one that the base commit changed."""
    repository.git("checkout", "--quiet", "HEAD^", "--", "text.txt")
    (repository.path / "text.txt").write_text(OLD_TEXT.replace("line 20\n", "changed\n"))
    diff = str(repository.git("diff", "--no-renames", "HEAD^", "--", "text.txt"))
    repository.git("reset", "--quiet", "--hard", "HEAD")
    assert "line eighteen" in diff
    return diff


Tree = dict[str, tuple[str, str]]  # path to (mode, blob)


class Bench:
    """Our two ways of applying beside a working tree."""

    def __init__(self, repository: Any, work: Path) -> None:
        self.repository = repository
        self.scratch = work / "scratch"
        self.scratch.mkdir()
        self.scratch.chmod(0o755)
        self.jailer = find_jailer(self.scratch, None)
        git = write_git_config(work / "gitconfig")
        self.applier = Applier(git, self.scratch)
        bare = work / "bare"
        subprocess.run(["git", "clone", "--quiet", "--bare", str(repository.path), str(bare)], check=True)
        tree = repository.git("rev-parse", "HEAD^{tree}").strip()
        owner = self.jailer.isolation.uid or None
        self.base: BaseTree = TreeStore(work, git, owner_uid=owner).get(bare, tree)

    def strict(self, patch: str) -> Tree | None:
        try:
            return self.tree(self.applier.apply(self.base, patch))
        except PatchRejected:
            return None

    def tree(self, delta: Delta) -> Tree:
        entries = {**self.base.entries, **delta.changes}
        return {path: (entry.mode, entry.blob) for path, entry in entries.items() if entry is not None}

    def loose(self, patch: str) -> tuple[Tree, str] | None:
        try:
            delta, rung = apply_on_rungs(self.applier, self.jailer.run, self.base, patch, Cancellation())
        except PatchRejected:
            return None
        return self.tree(delta), rung

    def witness(self, patch: str, *commands: tuple[str, ...]) -> Tree | None:
        """The tree that the first of ``commands`` that exits with 0 makes in a clean checkout."""
        file = self.scratch / "witness.patch"
        file.write_bytes((patch if patch.endswith("\n") else patch + "\n").encode())
        try:
            for command in commands:
                self.repository.git("reset", "--quiet", "--hard", "HEAD")
                self.repository.git("clean", "--quiet", "-ffdx")
                done = subprocess.run([*command, str(file)], cwd=self.repository.path, capture_output=True, check=False)
                if done.returncode == 0:
                    self.repository.git("add", "--all")
                    lines = self.repository.git("ls-files", "--stage").splitlines()
                    fields = [(line.split("\t")[1], line.split()) for line in lines]
                    return {path: (words[0], words[1]) for path, words in fields}
            return None
        finally:
            self.repository.git("reset", "--quiet", "--hard", "HEAD")
            self.repository.git("clean", "--quiet", "-ffdx")


@pytest.fixture(scope="module")
def bench(repository: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    work = tmp_path_factory.mktemp("bench")
    for directory in (work, work.parent):
        directory.chmod(0o755)
    made = Bench(repository, work)
    yield made
    made.jailer.close()


GIT = ("git", "apply", "--whitespace=nowarn")
PATCH = ("patch", "--batch", "--fuzz=5", "-p1", "--no-backup-if-mismatch", "-i")


def edited(repository: Any, name: str = "text.txt", old: str = "line 20\n", new: str = "changed\n") -> str:
    return str(repository.patch({name: FILES[name].replace(old, new)}).replace("\r\n", "\r\n"))


def crlf_edit(repository: Any) -> str:
    content = FILES["crlf.txt"].replace("line 20\r\n", "changed\r\n").encode()
    return str(repository.patch({"crlf.txt": content}))


STALE = (" line 18\n line 19\n", " line 18\n LINE 19\n")
VARIANTS: dict[str, Any] = {
    "as git writes it": edited,
    "no final newline": lambda r: edited(r).rstrip("\n"),
    "wrong line numbers": lambda r: edited(r).replace("@@ -18,7 +18,7 @@", "@@ -8,7 +8,7 @@"),
    "wrong line numbers beyond the end": lambda r: edited(r).replace("@@ -18,7 +18,7 @@", "@@ -318,7 +318,7 @@"),
    "hunk that fits twice": lambda r: edited(r, "twice.txt", "line 2\n" + "line 3\n", "line 2\nnew\nline 3\n"),
    "CRLF patch of an LF file": lambda r: edited(r).replace("\n", "\r\n"),
    "CRLF patch of a CRLF file": crlf_edit,
    "LF patch of a CRLF file": lambda r: crlf_edit(r).replace("\r\n", "\n"),
    "file without a final newline": lambda r: edited(r, "open.txt", "first\n", "changed\n"),
    "final newline added": lambda r: edited(r, "open.txt", "newline", "newline\n"),
    "no mark of the missing newline": lambda r: edited(r, "open.txt", "first\n", "changed\n").replace(
        "\\ No newline at end of file\n", ""
    ),
    "one stale line of context": lambda r: edited(r).replace(*STALE),
    "one stale line, ids unknown": lambda r: edited(r).replace(*STALE).replace("index ", "index 1234567", 1),
    "no ids": lambda r: "".join(x for x in edited(r).splitlines(True) if not x.startswith(("index", "diff"))),
    "no ids, stale": lambda r: "".join(
        x for x in edited(r).replace(*STALE).splitlines(True) if not x.startswith(("index", "diff"))
    ),
    "new file": lambda r: r.patch({"new/deep.txt": "x\n"}),
    "deleted file": lambda r: r.patch({"run.sh": None}),
    "executable bit": lambda r: (
        "diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n--- a/run.sh\n+++ b/run.sh\n"
        "@@ -1,2 +1,2 @@\n #!/bin/sh\n-exit 0\n+exit 1\n"
    ),
    "wrong hunk length": lambda r: edited(r).replace("@@ -18,7 +18,7 @@", "@@ -18,9 +18,9 @@"),
    "two hunks, one of them stale": lambda r: (
        edited(r, new="x\n").replace(" line 17\n", " other\n", 1) + edited(r, "run.sh", "exit 0", "exit 2")
    ),
    "removed line is another": lambda r: edited(r).replace("-line 20\n", "-lime 20\n"),
    "applied already": lambda r: "".join(
        {"-": "+", "+": "-"}.get(x[0], x[0]) + x[1:] if x[:2] in ("-l", "+c") else x for x in edited(r).splitlines(True)
    ),
    "whitespace of the context": lambda r: edited(r).replace(" line 19\n", " line  19\n"),
    "made for the version before": for_the_version_before,
    "prose before the diff": lambda r: "Here is the fix.\n\n" + edited(r),
    "garbage": lambda r: "no diff at all\n",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_strict_preset_is_git_apply(name: str, bench: Bench) -> None:
    patch = VARIANTS[name](bench.repository)
    assert bench.strict(patch) == bench.witness(patch, GIT)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_swebench_preset_is_its_ladder_of_commands(name: str, bench: Bench) -> None:
    """The witness starts every command from a clean checkout, as our rungs do."""
    patch = VARIANTS[name](bench.repository)
    ours = bench.loose(patch)
    assert (None if ours is None else ours[0]) == bench.witness(patch, GIT, (*GIT, "--3way"), PATCH)


def test_each_rung_is_reached(bench: Bench) -> None:
    found = {name: bench.loose(make(bench.repository)) for name, make in VARIANTS.items()}
    rungs = {name: None if one is None else one[1] for name, one in found.items()}
    assert rungs["as git writes it"] == GIT_APPLY
    assert rungs["made for the version before"] == THREE_WAY
    assert rungs["one stale line of context"] == FUZZ
    assert rungs["CRLF patch of an LF file"] == FUZZ
    assert rungs["garbage"] is None


def test_the_rung_is_reported_and_policy_holds_on_every_rung(project: Any, judge: Any) -> None:
    stale = project.gold().replace(" def mul(a, b):", " def mul(a,  b):")
    assert judge(project.task(), stale).status is S.APPLY_FAILED
    verdict = judge(project.task(apply="swebench"), stale)
    assert (verdict.status, verdict.flags) == (S.RESOLVED, (f"rung:{FUZZ}",))
    assert judge(project.task(apply="swebench"), project.gold()).flags == (f"rung:{GIT_APPLY}",)
    evil = "--- /dev/null\n+++ b/.gitattributes\n@@ -0,0 +1 @@\n+* filter=x\n"
    assert judge(project.task(apply="swebench"), stale + evil).status is S.POLICY_VIOLATION
    link = "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"
    link += "\\ No newline at end of file\n"
    assert judge(project.task(apply="swebench"), stale + link).status is S.POLICY_VIOLATION
    conftest = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os; os._exit(0)\n"
    verdict = judge(project.task(apply="swebench"), stale + conftest)
    assert (verdict.status, verdict.flags) == (S.RESOLVED, (f"rung:{FUZZ}", "restored:conftest.py"))


def test_a_patch_that_names_paths_outside_reaches_nothing(project: Any, judge: Any) -> None:
    patch = "--- /dev/null\n+++ b/../../tmp/evil\n@@ -0,0 +1 @@\n+x\n"
    assert judge(project.task(apply="swebench"), patch).status in (S.POLICY_VIOLATION, S.APPLY_FAILED)
