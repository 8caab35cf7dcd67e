"""What runs the tests: the executor's own interpreter, or an imported image as a read-only root."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from dockyard_sandbox.images import Image, open_image
from dockyard_sandbox.layers import BadImage, ImageBounds, resolve_inside

OWN = "default"
_METADATA = "environment.json"
_ROOT_DIRECTORY = "rootfs"
MOUNT_POINTS = ("testbed", "tmp", "dev", "proc", "opt/dockyard", ".disk")
"""Directories that a run mounts over; an import makes those that an image lacks."""
_PYTHONS = (
    "opt/miniconda3/envs/testbed/bin/python",  # where SWE-bench's images keep the interpreter of the tests
    "usr/local/bin/python3",
    "usr/bin/python3",
)
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
_MAX_LINKS = 40
_BOOT = "import sys; sys.path.pop(0); exec(compile(open({path!r}).read(), 'runner.py', 'exec'))"


class UnknownEnvironment(ValueError):
    """A task names an environment that is not registered, or that this level cannot give."""


class BadEnvironment(ValueError):
    """An image or directory cannot become an environment."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The interpreter that runs the tests, and what it needs."""

    python: str
    binds: tuple[str, ...] = ()
    """Directories of the host that a run sees, read-only, at the same place."""
    import_paths: tuple[str, ...] = ()
    """Where pytest lies, if the interpreter does not find it by itself."""
    modules: frozenset[str] = frozenset()
    """Top-level modules installed beside the interpreter: a tree must not shadow them anew."""
    rootfs: str = ""
    """Directory that becomes the root of a run; "" = the host's own system directories."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the image adds, such as PATH."""
    digest: str = ""

    def command(self, runner: str) -> list[str]:
        """The command that executes ``runner``; its configuration follows as the last argument."""
        if self.rootfs:  # its interpreter may be older than the option -P, and than our byte code
            return [self.python, "-s", "-B", "-c", _BOOT.format(path=runner.removesuffix("c"))]
        return [self.python, "-P", "-s", "-B", runner]


def own_environment() -> Environment:
    """The executor's own interpreter with its pytest. Raises ModuleNotFoundError when it has none."""
    spec = find_spec("pytest")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the executor's interpreter has no pytest; install it beside dockyard-sandbox")
    site = str(Path(spec.origin).parent.parent)
    prefixes = {os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix}
    binds = prefixes | ({site} if not any(site.startswith(f"{prefix}/") for prefix in prefixes) else set())
    outer = [path for path in sorted(binds) if not any(path.startswith(f"{other}/") for other in binds)]
    return Environment(
        python=sys.executable,
        binds=tuple(outer),
        import_paths=() if site.startswith(f"{sys.prefix}/") else (site,),
        modules=_modules_in(Path(path) for path in {site, *map(sysconfig.get_path, ("purelib", "platlib"))}),
    )


def _modules_in(directories: Iterable[Path]) -> frozenset[str]:
    stems = set()
    for directory in directories:
        for path in directory.glob("*"):
            if path.suffix in (".py", ".so") or path.is_dir():
                stems.add(path.name.split(".")[0] if path.is_file() else path.name)
    return frozenset(stem for stem in stems if stem.isidentifier() and stem != "__pycache__")


class EnvironmentStore:
    """Imported environments under ``root/environments``, by name; they outlive the server."""

    def __init__(self, root: Path, own: Environment, *, level: str) -> None:
        self._root = root
        self._own = own
        self._level = level
        self._lock = threading.Lock()
        self._importing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="import")
        self.probe: Callable[[str], str | None] | None = None
        """Runs a test in the environment of this name; returns why that fails."""
        self._known: dict[str, Environment] = {}
        self._look(skips_broken=False)

    def names(self) -> list[str]:
        """Names that a task may give."""
        self._look()
        return [OWN, *sorted(self._known)]

    def _look(self, *, skips_broken: bool = True) -> None:
        """Find what was imported by another process, such as ``env import`` beside a running server."""
        for path in _directory(self._root).glob(f"[!.]*/{_METADATA}"):
            if path.parent.name not in self._known:
                try:
                    self._known[path.parent.name] = load(path.parent)
                except BadEnvironment:
                    if not skips_broken:
                        raise

    def check(self, name: str | None) -> None:
        """Raise UnknownEnvironment unless a task may name it here."""
        if name is None or name == OWN:
            return
        if name not in self._known:
            self._look()
        if name not in self._known:
            raise UnknownEnvironment(
                f"must be one of {self.names()}, got {name!r}; import it with 'dockyard-sandbox env import' or "
                "PUT /environments"
            )
        if self._level != "namespaces":
            raise UnknownEnvironment(f"{name!r} needs the level namespaces, this server gives {self._level}")

    def get(self, name: str | None) -> Environment:
        """The environment of a task. Raises UnknownEnvironment."""
        self.check(name)
        return self._own if name is None or name == OWN else self._known[name]

    async def register_soon(self, name: str, source: str) -> None:
        """`register` on a thread of its own: an import takes minutes, and one at a time is enough."""
        await asyncio.get_running_loop().run_in_executor(self._importing, self.register, name, source)

    def register(self, name: str, source: str, *, python: str | None = None) -> Environment:
        """Add an environment: an image archive is unpacked, an unpacked directory is linked.

        One whose interpreter cannot run pytest here is not kept. Raises BadEnvironment.
        """
        path = Path(source)
        if not path.is_absolute() or not path.exists():
            raise BadEnvironment(f"must be an absolute path on the server's machine, got {source!r}")
        with self._lock:
            place = _directory(self._root) / name
            is_new = not place.exists()
            if path.is_dir():
                found = link_directory(self._root, name, path)
            else:
                found = import_image(self._root, name, path, python=python)
            self._known[name] = found
            failure = self.probe(name) if self.probe is not None and self._level == "namespaces" else None
            if failure is not None and is_new:
                del self._known[name]
                _remove(place)
            if failure is not None:
                raise BadEnvironment(
                    f"{found.python} of the image must be Python 3.6 or later with pytest 5 or later: {failure}"
                )
            return found


def import_image(
    root: Path, name: str, archive: Path, *, python: str | None = None, bounds: ImageBounds | None = None
) -> Environment:
    """Unpack an image archive as the environment ``name`` of the server at ``root``.

    Args:
        root: the server's directory.
        name: what tasks call it. It keeps its content for ever, since verdicts are remembered under it.
        archive: an OCI layout or ``docker save``, as a tar file.
        python: path of the interpreter inside the image; None = found by itself.
        bounds: what it may unpack to.

    Raises:
        BadEnvironment: it is no image, is damaged, has no interpreter, or the name is another image's.
    """
    directory = _directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with open_image(archive) as image:
            known = _known(directory / name, name, image.digest)
            if known is not None:
                return known
            temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=directory))
            try:
                rootfs = temporary / _ROOT_DIRECTORY
                for path in (temporary, rootfs):
                    path.mkdir(exist_ok=True)
                    path.chmod(0o755)
                image.unpack(rootfs, bounds or ImageBounds())
                _finish(rootfs, image, python)
                temporary.replace(directory / name)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except (BadImage, OSError) as error:
        raise BadEnvironment(str(error)) from error
    return load(directory / name)


def link_directory(root: Path, name: str, source: Path) -> Environment:
    """Give the environment unpacked at ``source`` a name on the server at ``root``. Raises BadEnvironment."""
    environment = load(source)
    place = _directory(root) / name
    if _known(place, name, environment.digest) is None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)
    return load(place)


def load(directory: Path) -> Environment:
    """Read an unpacked environment. Raises BadEnvironment."""
    try:
        fields = json.loads((directory / _METADATA).read_bytes())
        rootfs = (directory / _ROOT_DIRECTORY).resolve(strict=True)
        return Environment(
            python=fields["python"],
            modules=frozenset(fields["modules"]),
            rootfs=str(rootfs),
            env=fields["env"],
            digest=fields["digest"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadEnvironment(f"{directory} is no unpacked environment: {error}") from error


def _directory(root: Path) -> Path:
    return root / "environments"


def _remove(place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    else:
        shutil.rmtree(place, ignore_errors=True)


def _known(place: Path, name: str, digest: str) -> Environment | None:
    if name == OWN:
        raise BadEnvironment(f"{OWN!r} is the executor's own interpreter; choose another name")
    if not place.exists():
        return None
    known = load(place)
    if known.digest != digest:
        raise BadEnvironment(f"{name!r} is another image already ({known.digest[:23]}…); choose another name")
    return known


def _finish(rootfs: Path, image: Image, python: str | None) -> None:
    """Choose the interpreter, make the mount points, and write down what a run needs to know."""
    path = image.env().get("PATH", "/usr/local/bin:/usr/bin:/bin")
    choices = [python] if python else [f"/{one}" for one in _PYTHONS]
    choices += [] if python else [f"{one.rstrip('/')}/python3" for one in path.split(":") if one.startswith("/")]
    found = next((one for one in choices if _is_file(rootfs, one)), None)
    if found is None:
        raise BadEnvironment(
            f"the image must have an interpreter, none at {', '.join(map(str, choices))}; give --python"
        )
    for point in MOUNT_POINTS:
        place = resolve_inside(rootfs, f"{point}/x", make_parents=True).parent
        if place != rootfs / point:
            raise BadEnvironment(f"/{point} of the image must be a directory, it is a symlink")
    prefix = Path(found).parent.parent
    sites = [rootfs / str(one).lstrip("/") for one in (prefix, "/usr", "/usr/local")]
    modules = _modules_in(
        site for one in sites for kind in ("site", "dist") for site in one.glob(f"lib/python3*/{kind}-packages")
    )
    env = {name: value for name, value in image.env().items() if name in _KEPT_VARIABLES}
    fields = {
        "python": found,
        "env": {**env, "PATH": f"{Path(found).parent}:{path}"},
        "modules": sorted(modules),
        "digest": image.digest,
    }
    (rootfs.parent / _METADATA).write_text(json.dumps(fields, indent=1))


def _is_file(rootfs: Path, path: str) -> bool:
    """Whether ``path``, with symlinks resolved as inside the image, is a file that may be executed."""
    for _ in range(_MAX_LINKS):
        place = resolve_inside(rootfs, path.lstrip("/"))
        if not place.is_symlink():
            return place.is_file() and os.access(place, os.X_OK)
        target = place.readlink()
        inside = "/" + str(place.parent.relative_to(rootfs))
        path = os.path.normpath(target if target.is_absolute() else f"{inside}/{target}")
    return False
