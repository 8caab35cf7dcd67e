"""Sphinx configuration.

Build with ``python -m sphinx -W --keep-going -n docs docs/_build/html``: a warning is an error. The frameworks are
mocked, so that a build imports neither torch nor vLLM nor Ray.
"""

import sys
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.ext.autodoc.mock import mock

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Dockyard"
author = "The Dockyard authors"
copyright = "The Dockyard authors"
release = version = installed_version("dockyard-grpo")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
extensions += ["config_reference", "plain_docstrings", "public_names"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}

nitpicky = True
# Only this project's own names are documented here; annotations also name the standard library and the frameworks.
nitpick_ignore_regex = [("py:.*", r"(?!dockyard_).*")]
# Told for programs, and no public name.
nitpick_ignore = [("py:class", "dockyard_trainer_jax.shapes.Shape")]
default_role = "literal"

autodoc_mock_imports = ["ray", "safetensors", "sglang", "torch", "transformers", "vllm"]
autodoc_mock_imports += ["flax", "jax", "optax", "orbax"]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True, "exclude-members": "model_config"}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "Dockyard"
html_copy_source = False

# Some wheels load a public name on first use, which autodoc does outside its mock: load them all under it here.
with mock(autodoc_mock_imports):
    for _wheel in map(import_module, ("dockyard_trainer_torch", "dockyard_trainer_jax")):
        for _name in _wheel.__all__:
            getattr(_wheel, _name)
