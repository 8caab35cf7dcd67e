"""Declare torchvision's operators where its compiled part cannot be loaded.

The torchvision that an index offers for x86-64 is linked against CUDA. Beside a CPU build of torch its compiled part
does not load, and `import torchvision`, which SGLang does at start, fails with "operator torchvision::nms does not
exist": torchvision describes the shapes of operators that nobody declared. SGLang calls none of them for a language
model, so declaring them is enough. With a matching pair of builds the compiled part loads and nothing is declared.

`torchvision_schemas.pth` imports this module whenever an interpreter of the environment starts, so it must stay
cheap: torch is imported only at the moment somebody imports torchvision.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[Any] = []  # a torch.library.Library takes its operators along when it is collected


def declare_missing(package: Path) -> bool:
    """Declare the operators unless the compiled part in `package` loads; True if they were declared."""
    import torch

    try:
        torch.ops.load_library(str(package / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        _declared.append(library)
        return True
    return False


class _BeforeTorchvision(MetaPathFinder):
    """Sees the first import of torchvision, declares what is missing, and steps aside."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The real torchvision, with its operators declared."""
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            declare_missing(Path(spec.origin).parent)
        return spec


def install() -> None:
    """Wait for torchvision to be imported."""
    sys.meta_path.insert(0, _BeforeTorchvision())
