from __future__ import annotations

import difflib
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dockyard_core.patch import extract_patch, touched_paths

DIFF = "--- a/pkg/core.py\n+++ b/pkg/core.py\n@@ -1,3 +1,3 @@\n def f(a):\n-    return a + 1\n+    return a - 1\n\n"
OTHER = "diff --git a/x.md b/x.md\nindex 1..2 100644\n--- a/x.md\n+++ b/x.md\n@@ -1 +1,2 @@\n ```diff\n+--- a/y\n"

WRAPPERS = {
    "raw": "{diff}",
    "fenced": "```diff\n{diff}```\n",
    "fenced in prose": "The sum is wrong.\n\n```python\nx = 1\n```\n\n```diff\n{diff}```\n\nIt works now.\n- really\n",
    "fence opened by the prompt": "{diff}```\n\nThis changes the sign.\n",
    "fence never closed": "Here:\n```diff\n{diff}",
    "tags": "<patch>\n{diff}</patch>\n",
    "tag on the first line": "<patch>{diff}</patch>",
    "tag closed only": "{diff}</patch>\n",
    "prose": "Sure, this is the fix:\n\n{diff}\nHope it helps!\n",
}


def git(*arguments: str, cwd: Path, ok: tuple[int, ...] = (0,)) -> bytes:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "core.autocrlf=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, capture_output=True, check=False)
    assert done.returncode in ok, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("diff", [DIFF, OTHER, OTHER + DIFF], ids=["plain", "git", "two files"])
def test_a_wrapped_diff_comes_back_as_it_was(wrapper: str, diff: str) -> None:
    assert extract_patch(wrapper.format(diff=diff)) == diff


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_carriage_returns_of_the_transport_are_dropped(wrapper: str) -> None:
    assert extract_patch(wrapper.format(diff=DIFF).replace("\n", "\r\n")) == DIFF


def test_carriage_returns_of_the_patched_file_are_kept() -> None:
    diff = "--- a/dos.py\n+++ b/dos.py\n@@ -1,2 +1,2 @@\n--- SQL comment\r\n-x\r\n+y\r\n+z\r\n"
    assert extract_patch(f"```diff\n{diff}```\n") == diff


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "no diff here",
        "```python\nx\n```",
        "--- a/x\nnot a header",
        "@@ -1 +1 @@\n-a\n+b\n",
        "<patch></patch>",
    ],
)
def test_text_without_a_diff_gives_an_empty_patch(text: str) -> None:
    assert extract_patch(text) == ""


def test_a_missing_final_newline_is_added() -> None:
    assert extract_patch("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b") == "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


def test_the_no_newline_mark_is_part_of_the_hunk() -> None:
    diff = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    assert extract_patch(f"```diff\n{diff}```") == diff


def test_a_later_diff_of_the_same_file_replaces_the_draft() -> None:
    draft, answer = DIFF, DIFF.replace("a - 1", "a * 2")
    text = f"First idea:\n```diff\n{draft}```\nNo, better:\n```diff\n{answer}```\nand\n```diff\n{OTHER}```\n"
    assert extract_patch(text) == answer + OTHER


@pytest.mark.parametrize(
    "diff",
    [
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n+one line too many\n",
        "--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n-a\n+b\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\n@@ -9 +9 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@\n-a\n+b\n",
    ],
    ids=["too few counted", "too many counted", "ran into the next file", "blank between hunks", "no numbers"],
)
def test_a_malformed_diff_is_handed_on_unrepaired(diff: str) -> None:
    assert extract_patch(diff) == diff


def test_touched_paths_reads_every_kind_of_header() -> None:
    patch = (
        "--- a/old name.py\t2024-01-01\n+++ /dev/null\n@@ -1 +0,0 @@\n---- a/not/a/path\n"
        "diff --git a/r.py b/s.py\nsimilarity index 100%\nrename from r.py\nrename to s.py\n"
        "diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n"
        'diff --git "a/\\303\\251.py" "b/\\303\\251.py"\n--- "a/\\303\\251.py"\n'
        '+++ "b/\\303\\251.py"\n@@ -1 +1 @@\n-a\n+b\n'
    )
    assert touched_paths(patch) == ("old name.py", "r.py", "s.py", "run.sh", "é.py")


NASTY = st.sampled_from(
    [
        "", " ", "x", "-- a/f", "++ b/f", "--- a/f", "+++ b/f", "@@ -1 +1 @@", "diff --git a/f b/f", "```", "```diff",
        "<patch>", "</patch>", "\\ No newline at end of file", "x\r", "\x0c", "a\u2028b", "\ttab", "é",
    ]
)  # fmt: skip
FILE = st.lists(NASTY, min_size=1, max_size=14)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    old=FILE,
    new=FILE,
    wrapper=st.sampled_from(sorted(WRAPPERS)),
    final_newlines=st.tuples(st.booleans(), st.booleans()),
)
def test_git_applies_what_was_wrapped(
    old: list[str], new: list[str], wrapper: str, final_newlines: tuple[bool, bool]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        contents = ["\n".join(lines) + "\n" * ends for lines, ends in zip((old, new), final_newlines, strict=True)]
        assume(contents[0] != contents[1])
        for folder, content in zip(("a", "b"), contents, strict=True):
            (root / folder).mkdir()
            (root / folder / "f.txt").write_bytes(content.encode())
        diff = git("diff", "--no-index", "--no-prefix", "--no-color", "a/f.txt", "b/f.txt", cwd=root, ok=(1,)).decode()
        extracted = extract_patch(WRAPPERS[wrapper].format(diff=diff))
        assert extracted == diff
        (root / "fix.diff").write_bytes(extracted.encode())
        git("apply", "--whitespace=nowarn", "--directory=a", "fix.diff", cwd=root)
        assert (root / "a" / "f.txt").read_bytes() == contents[1].encode()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(NASTY, st.just("--- a/f\n+++ b/f\n@@ -1,2 +1 @@"), st.text(max_size=8)), max_size=20))
def test_garbage_never_crashes_and_nothing_is_made_up(parts: list[str]) -> None:
    text = "\n".join(parts)
    patch = extract_patch(text)
    written = {line.removesuffix("\r") for line in text.replace("<patch>", "").split("\n")}
    written |= {line.rstrip().removesuffix("</patch>") for line in written}
    assert {line.removesuffix("\r") for line in patch.split("\n")} <= written | {""}
    assert all(path in text for path in touched_paths(patch))
    assert extract_patch(patch) == patch


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_accepted(text: str) -> None:
    assert extract_patch(text) == "" or extract_patch(text).endswith("\n")


def test_difflib_output_passes_unchanged() -> None:
    old, new = ["a\n", "b\n", "c\n"], ["a\n", "B\n", "c\n", "d\n"]
    diff = "".join(difflib.unified_diff(old, new, "a/x.py", "b/x.py", n=1))
    assert extract_patch(diff) == diff


def test_a_git_diff_of_renames_modes_and_binaries_survives_a_fence(tmp_path: Path) -> None:
    git("init", "-q", cwd=tmp_path)
    for name, content in {
        "move.txt": b"one\ntwo\nthree\n",
        "run.sh": b"echo\n",
        "blob.bin": bytes(range(256)) * 9,
    }.items():
        (tmp_path / name).write_bytes(content)
    git("add", "-A", cwd=tmp_path)
    git("commit", "-qm", "base", cwd=tmp_path)
    (tmp_path / "move.txt").rename(tmp_path / "moved.txt")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "blob.bin").write_bytes(bytes(reversed(range(256))) * 7)
    (tmp_path / "empty.txt").touch()
    git("add", "-A", cwd=tmp_path)
    diff = git("diff", "--cached", "--binary", "-M", "HEAD", cwd=tmp_path).decode()
    wanted_tree = git("write-tree", cwd=tmp_path)
    extracted = extract_patch(f"Done:\n\n```diff\n{diff}```\nbye\n")
    git("read-tree", "HEAD", cwd=tmp_path)
    (tmp_path / "fix.diff").write_bytes(extracted.encode())
    git("apply", "--cached", "fix.diff", cwd=tmp_path)
    assert git("write-tree", cwd=tmp_path) == wanted_tree
    assert set(touched_paths(extracted)) == {"move.txt", "moved.txt", "run.sh", "blob.bin", "empty.txt"}
