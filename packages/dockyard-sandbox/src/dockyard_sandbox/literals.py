"""Expected values that are written in a test, and other values of the same kind."""

from __future__ import annotations

import ast
import random
import string

_ASSERT_METHODS = frozenset(
    {"assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual"}
    | {"assertIs", "assertMultiLineEqual", "assertSequenceEqual"}
)
_ALPHABETS = (string.ascii_lowercase, string.ascii_uppercase)


def decisive_values(function: ast.FunctionDef) -> list[ast.expr]:
    """The literal sides of equality assertions that are executed whenever the test passes."""
    found = []
    for statement in function.body:
        sides: list[ast.expr] = []
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            test = statement.test
            if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
                sides = [test.left, test.comparators[0]]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            is_method = isinstance(call.func, ast.Attribute) and call.func.attr in _ASSERT_METHODS
            if is_method and len(call.args) >= 2 and not any(isinstance(one, ast.Starred) for one in call.args):
                sides = call.args[:2]
        values = [value for side in sides if (value := _literal(side)) is not None]
        if len(values) == 1:  # two literals decide nothing
            found.append(values[0])
    return found


def leaves(value: ast.expr) -> list[ast.Constant]:
    """The constants of a literal, any one of which makes another value when it changes."""
    if isinstance(value, ast.Constant):
        return [value] if value.value is None or type(value.value) in (bool, int, float, str, bytes) else []
    if isinstance(value, ast.UnaryOp):
        return leaves(value.operand)
    if isinstance(value, ast.Dict):
        return [leaf for one in value.values for leaf in leaves(one)]
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return [leaf for one in value.elts for leaf in leaves(one)]
    return []


def mutate(leaf: ast.Constant, draw: random.Random) -> None:
    """Give ``leaf`` another value: one that no tolerance and no change of case makes equal again.

    Nor may code with a state reach it by being run once more: a counter is at the next number then, and
    what was added for the first time is no longer new. So numbers go far, and a truth value becomes ``...``.
    """
    value = leaf.value
    if value is None or isinstance(value, bool):
        leaf.value = Ellipsis
    elif isinstance(value, int | float):
        leaf.value = 2 * value + draw.randint(3, 250)
    elif isinstance(value, str):
        leaf.value = _other_text(value, draw)
    elif isinstance(value, bytes):
        leaf.value = _other_text(value.decode("latin-1"), draw).encode("latin-1")


def _literal(node: ast.expr) -> ast.expr | None:
    """The literal that ``node`` is, through ``approx(literal)`` too; None = it is computed."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return node.args[0] if name == "approx" and _is_literal(node.args[0]) else None
    return node if _is_literal(node) else None


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.UnaryOp):
        operand = node.operand
        return (
            isinstance(node.op, ast.USub) and isinstance(operand, ast.Constant) and type(operand.value) in (int, float)
        )
    if isinstance(node, ast.Dict):
        return all(key is not None and _is_literal(key) for key in node.keys) and all(map(_is_literal, node.values))
    return isinstance(node, ast.List | ast.Tuple | ast.Set) and all(map(_is_literal, node.elts))


def _other_text(text: str, draw: random.Random) -> str:
    places = [(index, letters) for index, one in enumerate(text) for letters in _ALPHABETS if one in letters]
    if not places:
        return text + "".join(draw.choices(string.ascii_lowercase, k=2))
    index, letters = draw.choice(places)
    others = [letter for letter in letters if letter != text[index]]
    return text[:index] + draw.choice(others) + text[index + 1 :]
