"""Safetensors that are read a block at a time: a Hugging Face model's, and those of the ranks of a checkpoint.

The wheels that read them need safetensors; ``framework`` is its word for what comes out, ``np`` or ``pt``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from dockyard_core.checkpoint_format import saved_regions
from dockyard_core.errors import ConfigError, UserError
from dockyard_core.regions import BlockIndex, Region

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

Framework = Literal["np", "pt"]


class WeightFiles:
    """The tensors of a Hugging Face directory, by name; a file is mapped when its first tensor is read."""

    def __init__(self, file_of: Mapping[str, Path], framework: Framework, stack: ExitStack) -> None:
        self.names = frozenset(file_of)
        self._file_of = file_of
        self._framework = framework
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def read(self, name: str, region: Region | None = None) -> Any:
        """A tensor, or a block of it, in the dtype of the file."""
        box = () if region is None else tuple(map(slice, region.offset, region.stop))
        return self._slice(name)[box or ...]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as safetensors writes it, without reading it."""
        return str(self._slice(name).get_dtype())

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError

        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(_opened(path, self._framework))
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:  # the index names a tensor that the file lacks
            raise _unreadable(path, error) from error


@contextmanager
def weight_files(model_dir: Path, framework: Framework) -> Iterator[WeightFiles]:
    """Open a directory with model.safetensors, or with shards and their index.

    Raises ConfigError when there are none, or one is missing or damaged.
    """
    if (model_dir / _INDEX).is_file():
        try:
            listed: Mapping[str, str] = json.loads((model_dir / _INDEX).read_text())["weight_map"]
            file_of = {name: model_dir / file for name, file in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(model_dir / _INDEX, error) from error
    else:
        with _opened(model_dir / _SINGLE, framework) as file:
            file_of = dict.fromkeys(file.keys(), model_dir / _SINGLE)
    with ExitStack() as stack:
        yield WeightFiles(file_of, framework, stack)


def _opened(path: Path, framework: Framework) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    found = "no such file" if isinstance(error, FileNotFoundError) else error
    return ConfigError(
        f"policy.model has no readable *.safetensors, got {str(path)!r} ({found}); "
        "complete the download, or save it with save_pretrained"
    )


class ShardFiles:
    """Any block of any tensor from the files of all ranks of a checkpoint, and of them the bytes it needs only.

    A context manager: files stay open inside. Opening reads the headers.

    Raises UserError for a file that is missing, cannot be read, is cut short, or is no file of shards.
    """

    framework: ClassVar[Framework]

    def __init__(self, paths: Sequence[Path]) -> None:
        self.metadata: dict[Path, Mapping[str, str]] = {}
        self.blocks = BlockIndex()
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        with ExitStack() as opening:
            opening.callback(self._open.close)
            for path in paths:
                self._index(path)
            opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

    def fill(self, block: Any, name: str, region: Region) -> None:
        """Read a block of a tensor into memory of its shape; the tensor must be complete."""
        for path, piece, target in self.blocks.pieces(name, region):
            block[target] = self._files[path].get_slice(name)[piece]

    def _index(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._open.enter_context(safe_open(path, self.framework))
        except FileNotFoundError as error:
            raise UserError(
                f"a checkpoint is restored from the files of every rank that wrote it, got no {path.name!r} in "
                f"{str(path.parent)!r}; copy the whole directory, or restore another save"
            ) from error
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"a checkpoint's files must be whole safetensors, got {str(path)!r} ({error}); copy it again, or "
                "restore another save"
            ) from error
        metadata = file.metadata() or {}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dictionary
        for name, region in saved_regions(shapes, metadata).items():
            self.blocks.add(path, name, region)
        self.metadata[path] = metadata
        self._files[path] = file
