"""A base tree with changes, against the plain sets that it stands for."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from dockyard_sandbox.patched import PatchedTree
from dockyard_sandbox.trees import BaseTree, Entry, directories_of

PATHS = st.lists(st.sampled_from(["a", "b", "a0", "a-", "conftest.py", "t.py"]), min_size=1, max_size=4).map("/".join)
NAMES = frozenset({"conftest.py", "t.py"})


def tree_of(base: set[str], changes: dict[str, bool]) -> PatchedTree:
    entry = Entry("100644", "1")
    made = BaseTree(
        tree="0" * 40,
        bare=Path("/nowhere"),
        directory=Path("/nowhere"),
        entries=dict.fromkeys(base, entry),
        index_path=Path("/nowhere"),
    )
    there = {path: entry if is_there else None for path, is_there in changes.items()}
    return PatchedTree(base=made, changes=there, contents={"1": b"abc"})


@given(st.sets(PATHS, max_size=12), st.dictionaries(PATHS, st.booleans(), max_size=6), st.sets(PATHS, max_size=3))
def test_it_is_the_base_with_the_changes(base: set[str], changes: dict[str, bool], places: set[str]) -> None:
    tree = tree_of(base, changes)
    final = (base - changes.keys()) | {path for path, is_there in changes.items() if is_there}
    assert {path for path in base | changes.keys() if path in tree} == final
    assert tree.below(places) == {path for path in final if any(path.startswith(f"{place}/") for place in places)}
    assert tree.named(NAMES) == {path for path in final if PurePosixPath(path).name in NAMES}
    assert tree.size() == 3 * sum(changes.values())
    above = {str(parent) for path in final for parent in PurePosixPath(path).parents}
    added = {path for path, is_there in changes.items() if is_there}
    clashes = {path for path in added if path in above}
    clashes |= {str(parent) for path in added for parent in PurePosixPath(path).parents if str(parent) in final}
    found = tree.clash()
    assert found in clashes if clashes else found is None


@given(st.sets(PATHS, max_size=12))
def test_directories_are_the_parents(paths: set[str]) -> None:
    expected = {str(parent) for path in paths for parent in PurePosixPath(path).parents} | {"."}
    assert directories_of(paths) == expected


def test_the_key_names_what_differs_from_the_base_and_nothing_else() -> None:
    base = {"a", "b"}
    plain = tree_of(base, {}).key()
    assert tree_of(base, {"a": True}).key() == plain  # written anew with the same content
    assert tree_of(base, {"c": False}).key() == plain  # deleted, and never there
    different = [tree_of(base, changes).key() for changes in ({}, {"a": False}, {"b": False}, {"c": True})]
    assert len(set(different)) == 4
