"""Our programs for the sandbox, as source that the interpreters of old images can read."""

from __future__ import annotations

import ast

OLDEST = (3, 6)
"""The oldest interpreter that reads it, which SWE-bench's images still have."""


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if node.value is None else ast.Assign(targets=[node.target], value=node.value)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module == "__future__" else node


def portable(source: str) -> str:
    """``source`` without annotations, whose syntax and names change from version to version."""
    tree = _WithoutAnnotations().visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
