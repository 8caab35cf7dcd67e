"""The quickstart's family of tiny repositories: one module, two one-line functions, one wrong piece.

A problem names a function and says in plain words what it should return. Six bug classes have five fillings each for
the piece that may be wrong, so a plausible edit picked blindly is right one time in four. Which filling a plain phrase
asks for can only be learned from the tests.

The warm start also draws problems whose issue is written in `JARGON`, an invented vocabulary that the frozen tasks
never use.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

__all__ = ["BUG_CLASSES", "JARGON", "BugClass", "Function", "Problem", "draw_problem"]

Arguments = tuple[object, ...]

_NUMBERS: tuple[Arguments, ...] = ((2, 3), (7, 2), (9, 4), (5, 5), (4, 9), (12, 5))
_LISTS: tuple[Arguments, ...] = (([3, 1, 2],), ([5, 9, 4, 4],), ([8, 2, 6, 7],))
_HOURS: tuple[Arguments, ...] = ((1,), (3,), (0,), (5,))
_TEXTS: tuple[Arguments, ...] = (("aB c",), (" Xy Z ",), ("hey",), ("HEY you",))


@dataclass(frozen=True, kw_only=True, slots=True)
class BugClass:
    """One shape of function and the five fillings of its `{slot}`."""

    name: str
    body: str
    """Format string over `a`, `b` (parameter names) and `slot`."""
    num_params: int
    fillings: tuple[str, ...]
    phrases: Mapping[str, str]
    """Right filling -> what a plain issue says about it."""
    arguments: tuple[Arguments, ...]
    """Calls of the hidden tests; no two fillings agree on all of them."""


BUG_CLASSES: tuple[BugClass, ...] = (
    BugClass(
        name="operator",
        body="return {a} {slot} {b}",
        num_params=2,
        fillings=("+", "-", "*", "//", "%"),
        phrases={"+": "the sum", "-": "the difference"},
        arguments=_NUMBERS,
    ),
    BugClass(
        name="comparison",
        body="return {a} {slot} {b}",
        num_params=2,
        fillings=(">", "<", "==", "!=", ">="),
        phrases={">": "True if larger", "<": "True if smaller"},
        arguments=_NUMBERS,
    ),
    BugClass(
        name="builtin",
        body="return {slot}({a})",
        num_params=1,
        fillings=("max", "min", "sum", "len", "sorted"),
        phrases={"max": "the maximum", "min": "the minimum"},
        arguments=_LISTS,
    ),
    BugClass(
        name="index",
        body="return {a}[{slot}]",
        num_params=1,
        fillings=("0", "-1", "::-1", "1:", ":-1"),
        phrases={"0": "the first", "-1": "the last"},
        arguments=_LISTS,
    ),
    BugClass(
        name="constant",
        body="return {a} * {slot}",
        num_params=1,
        fillings=("60", "24", "7", "12", "100"),
        phrases={"60": "minutes as seconds", "24": "days as hours"},
        arguments=_HOURS,
    ),
    BugClass(
        name="method",
        body="return {a}.{slot}()",
        num_params=1,
        fillings=("upper", "lower", "strip", "title", "swapcase"),
        phrases={"upper": "capital letters", "lower": "small letters"},
        arguments=_TEXTS,
    ),
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_VERBS = _words("get make find load build check scan pick read plan sort mark hold send open draw push pull join wrap")
_NOUNS = _words(
    "price cart user order score team page node tree item card game book rate file path cell grid word line "
    "task road shop seat room wind rain farm boat lamp"
)
_MODULES = _words("core util tools ops calc text base main lib app engine report helper kit")
_PARAMS = tuple("abcdefghkmnpqrstuvwxyz")
_JARGON_FRAMES = ("{0}", "the {0}", "True if {0}", "{0} {1}", "{0} as {1}", "the {0} {1}")


def _function_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS]
    random.Random(20).shuffle(names)
    cut = len(names) * 3 // 4
    return tuple(names[:cut]), tuple(names[cut:])


TRAIN_NAMES, HELDOUT_NAMES = _function_names()
"""Held-out tasks use only function names that neither the warm start nor training sees (their words are seen)."""


def _invent_jargon() -> Mapping[str, tuple[str, ...]]:
    rng = random.Random(30)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    fillings = [filling for bug_class in BUG_CLASSES for filling in bug_class.fillings]
    words = ["".join(rng.sample(syllables, 3)) for _ in range(4 * len(fillings))]
    return MappingProxyType({filling: tuple(words[4 * i : 4 * i + 4]) for i, filling in enumerate(fillings)})


JARGON: Mapping[str, tuple[str, ...]] = _invent_jargon()
"""Filling -> the four invented words for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """One function of a module."""

    name: str
    params: tuple[str, ...]
    bug_class: BugClass
    right: str
    """The filling that its tests expect."""

    def lines(self, filling: str) -> tuple[str, str]:
        """Return the two source lines with `filling` in the slot, without line ends."""
        body = self.bug_class.body.format(a=self.params[0], b=self.params[-1], slot=filling)
        return f"def {self.name}({', '.join(self.params)}):", f"    {body}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A module with one function filled wrongly, and the issue about it."""

    functions: tuple[Function, ...]
    buggy: int
    """Index of the wrong function."""
    wrong: str
    """The filling it has at the base commit."""
    path: str
    issue: str
    phrase: str
    """What the issue asks for."""

    @property
    def function(self) -> Function:
        """The function with the bug."""
        return self.functions[self.buggy]

    def source(self, filling: str) -> str:
        """Return the module's text with `filling` in the buggy function."""
        blocks = []
        for index, function in enumerate(self.functions):
            blocks.append("\n".join(function.lines(filling if index == self.buggy else function.right)))
        return "\n\n".join(blocks) + "\n"

    def patch(self, filling: str) -> str:
        """Return the unified diff, one line of context, that puts `filling` in place of `wrong`."""
        head, old = self.function.lines(self.wrong)
        new = self.function.lines(filling)[1]
        tail = [" \n"] if self.buggy + 1 < len(self.functions) else []
        span = f"{1 + 3 * self.buggy},{2 + len(tail)}"
        lines = [f"--- a/{self.path}\n", f"+++ b/{self.path}\n", f"@@ -{span} +{span} @@\n"]
        return "".join([*lines, f" {head}\n", f"-{old}\n", f"+{new}\n", *tail])

    @cached_property
    def plausible_fillings(self) -> tuple[str, ...]:
        """The four fillings that an edit may choose; exactly one of them is right."""
        return tuple(filling for filling in self.function.bug_class.fillings if filling != self.wrong)


def _jargon_phrase(rng: random.Random, filling: str) -> str:
    words = JARGON[filling]
    return rng.choice(_JARGON_FRAMES).format(rng.choice(words), rng.choice(words))


def draw_problem(rng: random.Random, *, heldout: bool = False, num_functions: int = 2, jargon: bool = False) -> Problem:
    """Draw one problem.

    Plain problems are right about one of the fillings that have a phrase; jargon problems about any filling.
    """
    choices = [
        (bug_class, filling)
        for bug_class in BUG_CLASSES
        for filling in (bug_class.fillings if jargon else bug_class.phrases)
    ]
    names = rng.sample(HELDOUT_NAMES if heldout else TRAIN_NAMES, num_functions)
    functions = tuple(
        Function(name=name, params=tuple(rng.sample(_PARAMS, bug_class.num_params)), bug_class=bug_class, right=right)
        for name, (bug_class, right) in zip(names, rng.sample(choices, num_functions), strict=True)
    )
    buggy = rng.randrange(num_functions)
    target = functions[buggy]
    phrase = _jargon_phrase(rng, target.right) if jargon else target.bug_class.phrases[target.right]
    return Problem(
        functions=functions,
        buggy=buggy,
        wrong=rng.choice([filling for filling in target.bug_class.fillings if filling != target.right]),
        path=f"{rng.choice(_MODULES)}.py",
        issue=f"{target.name} should return {phrase}",
        phrase=phrase,
    )
