"""``.. public-names:: MODULE`` documents exactly what the module's ``__all__`` lists.

``automodule`` passes over names that a module loads on first use, and over imported data; this does not.
"""

from __future__ import annotations

import inspect
from importlib import import_module

from docutils import nodes  # type: ignore[import-untyped]
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata


class PublicNames(SphinxDirective):
    """The module's docstring, then its public names in alphabetical order."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """What autodoc makes of each name."""
        module_name: str = self.arguments[0]
        module = import_module(module_name)
        names: list[str] = module.__all__
        directives = [f".. automodule:: {module_name}\n   :no-members:\n"]
        directives += [f".. auto{_kind(getattr(module, name))}:: {module_name}.{name}\n" for name in sorted(names)]
        return self.parse_text_to_nodes("\n".join(directives))


def _kind(documented: object) -> str:
    if isinstance(documented, type):
        return "exception" if issubclass(documented, Exception) else "class"
    return "function" if inspect.isroutine(documented) else "data"


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("public-names", PublicNames)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
