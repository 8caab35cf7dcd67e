"""Image archives: unpacked as they say, and refused when they lie or reach out."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import start_server
from dockyard_sandbox.environments import MOUNT_POINTS, BadEnvironment, import_image
from dockyard_sandbox.layers import ImageBounds

_spec = importlib.util.spec_from_file_location("image_archives", Path(__file__).with_name("image_archives.py"))
assert _spec is not None
assert _spec.loader is not None
archives: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(archives)

PYTHON = ("usr/local/bin/python3", ("file", 0o755, b"#!/bin/true\n"))
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the archives say amd64")


def unpack(tmp_path: Path, *layers: bytes, make: Callable[..., Path] | None = None) -> Path:
    """Import an image that has an interpreter below ``layers``; return its root."""
    make = make or archives.docker_archive
    environment = import_image(tmp_path / "root", "e", make(tmp_path / "image.tar", archives.layer(PYTHON), *layers))
    return Path(environment.rootfs)


@pytest.mark.parametrize("kind", ["docker_archive", "oci_archive"])
def test_layers_lie_over_each_other_with_their_whiteouts(kind: str, tmp_path: Path) -> None:
    root = unpack(
        tmp_path,
        archives.layer(
            ("a/one", "1"),
            ("a/two", "2"),
            ("b/x", "x"),
            ("b/y/z", "z"),
            ("c", "file"),
            ("d/e", "e"),
            ("l", ("symlink", "a")),
        ),
        archives.layer(
            ("a/.wh.one", ""),
            ("b/new", "new"),
            ("b/.wh..wh..opq", ""),
            ("c", ("dir", 0o755)),
            ("c/in", "in"),
            (".wh.d", ""),
            ("./l/three", "3"),
            ("h", ("link", "a/two")),
            ("su", ("file", 0o6755, b"s")),
            ("dev0", ("char",)),
            ("p", ("fifo",)),
        ),
        make=getattr(archives, kind),
    )
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    assert found - {"usr/local/bin/python3"} == {"a/two", "a/three", "b/new", "c/in", "h", "su"}
    assert (root / "h").stat().st_ino == (root / "a/two").stat().st_ino
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert (root / "a/two").stat().st_mtime == 1_600_000_000
    assert all((root / point).is_dir() for point in MOUNT_POINTS)


ATTACKS = {
    "a name with dots": [("../out", "x")],
    "a name with dots inside": [("a/../../out", "x")],
    "an absolute name": [("/out", "x")],
    "a symlink out, then a file through it": [("s", ("symlink", "../../../..")), ("s/out", "x")],
    "a chain of symlinks out": [("a", ("symlink", ".")), ("a/s", ("symlink", "../../..")), ("a/s/out", "x")],
    "a loop of symlinks": [("s", ("symlink", "t")), ("t", ("symlink", "s")), ("s/out", "x")],
    "a hard link out": [("h", ("link", "../../../../etc/passwd"))],
    "a hard link to an absolute name": [("h", ("link", "/etc/passwd"))],
    "a hard link to a directory": [("d", ("dir", 0o755)), ("h", ("link", "d"))],
    "a hard link to nothing": [("h", ("link", "nowhere"))],
    "a whiteout of the parent": [("a/.wh...", "")],
    "a whiteout of nothing": [("a/.wh.", "")],
    "a file below a file": [("f", "x"), ("f/g", "x")],
}


@pytest.mark.parametrize("what", ATTACKS)
def test_a_layer_that_reaches_out_is_refused_and_writes_nothing(what: str, tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment):
        unpack(tmp_path, archives.layer(*ATTACKS[what]))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"image.tar", "root", "root/environments"}


CONTAINED = {
    "an absolute symlink": [("s", ("symlink", "{tmp}")), ("s/out", "x")],
    "a whiteout through an absolute symlink": [("s", ("symlink", "{tmp}")), ("s/.wh.precious", "")],
    "an opaque directory through an absolute symlink": [("s", ("symlink", "{tmp}")), ("s/.wh..wh..opq", "")],
    "a file in place of a symlink out": [("s", ("symlink", "{tmp}/precious")), ("s", "x")],
    "a directory in place of a symlink out": [("s", ("symlink", "{tmp}")), ("s", ("dir", 0o777)), ("s/out", "x")],
    "a hard link to a symlink out": [("s", ("symlink", "{tmp}/precious")), ("h", ("link", "s")), ("h", "x")],
}


@pytest.mark.parametrize("what", CONTAINED)
def test_a_symlink_means_what_it_means_inside_the_image(what: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    members = json.loads(json.dumps(CONTAINED[what]).replace("{tmp}", str(tmp_path)))
    root = unpack(tmp_path, archives.layer(*((name, content) for name, content in members)))
    assert precious.read_text() == "kept"
    assert not (tmp_path / "out").exists()
    assert root.is_relative_to(tmp_path / "root")


@pytest.mark.parametrize("blob", ["config", "manifest", "layer"])
def test_a_blob_that_is_not_what_its_digest_says_is_refused(blob: str, tmp_path: Path) -> None:
    archive = archives.oci_archive(tmp_path / "image.tar", archives.layer(PYTHON), damage=blob)
    with pytest.raises(BadEnvironment):
        import_image(tmp_path / "root", "e", archive)
    assert list((tmp_path / "root" / "environments").iterdir()) == []


def test_a_layer_that_the_configuration_does_not_name_is_refused_before_it_is_written(tmp_path: Path) -> None:
    good, evil = archives.layer(PYTHON), archives.layer(PYTHON, ("evil", "x"))
    archive = archives.docker_archive(tmp_path / "image.tar", evil, config=archives.config_of([good]))
    with pytest.raises(BadEnvironment, match="has digest"):
        import_image(tmp_path / "root", "e", archive)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no tar at all"), "no tar archive"),
        (lambda path: tarfile.open(path, "w").close(), "neither manifest.json"),
        (lambda path: archives.docker_archive(path, config=b"{}"), "interpreter"),
        (lambda path: archives.docker_archive(path, archives.layer(("x", "")), config=b"{}"), "0 layers"),
        (lambda path: archives.docker_archive(path, archives.layer(("x", "")), config=b"["), "not JSON"),
        (lambda path: archives.docker_archive(path, archives.layer(("x", "")), config_name="x.json"), "digest"),
        (lambda path: archives.docker_archive(path, b"no layer" * 200), "damaged"),
        (lambda path: archives.docker_archive(path, archives.layer(("x", ""))), "interpreter"),
        (lambda path: archives.oci_archive(path, archives.layer(PYTHON), pack=lambda _: b"\x28\xb5\x2f\xfd"), "zstd"),
        (lambda path: archives.docker_archive(path, archives.layer(PYTHON, ("tmp", ("symlink", "usr")))), "symlink"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    make(tmp_path / "image.tar")
    command = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "env", "import", str(tmp_path / "image.tar")]
    done = subprocess.run([*command, "--root", str(tmp_path / "r")], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert re.search(message, line), line
    assert list((tmp_path / "r" / "environments").glob("*")) == []


def test_an_image_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    archive = archives.oci_archive(tmp_path / "image.tar", archives.layer(PYTHON, ("zeros", bytes(10_000_000))))
    assert archive.stat().st_size < 100_000
    for bounds in (ImageBounds(max_bytes=1_000_000), ImageBounds(max_entries=1)):
        with pytest.raises(BadEnvironment, match="more than"):
            import_image(tmp_path / "root", "e", archive, bounds=bounds)


def test_a_name_keeps_its_image(tmp_path: Path) -> None:
    one = archives.docker_archive(tmp_path / "1.tar", archives.layer(PYTHON))
    two = archives.docker_archive(tmp_path / "2.tar", archives.layer(PYTHON, ("x", "x")))
    first = import_image(tmp_path / "root", "e", one)
    assert import_image(tmp_path / "root", "e", one) == first
    with pytest.raises(BadEnvironment, match="another image"):
        import_image(tmp_path / "root", "e", two)
    with pytest.raises(BadEnvironment, match="own interpreter"):
        import_image(tmp_path / "root", "default", two)


def python_image(path: Path) -> Path:
    """A small root file system around a copy of the running interpreter, with pytest in a layer of its own."""
    executable = Path(sys.executable).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(os.__file__).resolve().parent
    listed = subprocess.run(["ldd", str(executable)], capture_output=True, text=True, check=True).stdout
    needed = {Path(word) for word in re.findall(r"(/\S+)", listed)}
    for module in (stdlib / "lib-dynload").glob("*.so"):
        listed = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=False).stdout
        needed |= {Path(word) for word in re.findall(r"=> (/\S+)", listed)}
    files = [(library.resolve(), str(library).lstrip("/")) for library in sorted(needed) if library.exists()]
    shell = Path("/bin/sh").resolve()
    base = archives.layer(
        ("etc/marker", "of the image\n"),
        ("etc/passwd", "root:x:0:0::/:/bin/sh\n"),
        ("removed", "x"),
        ("usr/local/bin/python3", ("symlink", version)),
        without=("test", "idlelib", "ensurepip", "site-packages", "lib2to3", "tkinter"),
        copied=[
            (executable, f"usr/local/bin/{version}"),
            (stdlib, f"usr/local/lib/{version}"),
            (shell, "bin/sh"),
            *files,
        ],
    )
    site = Path(pytest.__file__).parent.parent
    packages = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
    paths = [path for name in packages for path in (site / name, *site.glob(f"{name}-*.dist-info")) if path.exists()]
    names = [(path, f"usr/local/lib/{version}/site-packages/{path.name}") for path in paths]
    return Path(archives.docker_archive(path, base, archives.layer((".wh.removed", ""), copied=names)))


@pytest.fixture(scope="module")
def py_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_image(tmp_path_factory.mktemp("image") / "py.tar")


HELD_OUT = """\
import os
import sys

from calc.ops import add


def test_add(two):
    assert add(two, 3) == 5


def test_the_root_is_the_images():
    assert open("/etc/marker").read() == "of the image\\n"
    assert not os.path.exists("/removed")
    assert not os.path.exists("/usr/bin/git")
    assert not os.path.exists(SECRET)
    assert sys.prefix == "/usr/local"
    assert os.listdir("/testbed/calc")


def test_the_root_is_read_only():
    for path in ("/etc/marker", "/new", "/usr/local/bin/new", "/opt/dockyard/new", "/dev/new", "/proc/new"):
        try:
            open(path, "a").close()
        except OSError:
            continue
        raise AssertionError(path)
    open("/tmp/x", "w").close()
"""


def listing(root: Path) -> list[tuple[str, int, float]]:
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime) for path in root.rglob("*"))


@pytest.mark.ci
def test_a_task_runs_inside_an_imported_image(project: Any, body: Any, py_tar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    command = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "env", "import", str(py_tar), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["python"] == "/usr/local/bin/python3"
    rootfs = root / "environments" / "py" / "rootfs"
    before = listing(rootfs)
    held_out = HELD_OUT.replace("SECRET", repr(str(py_tar)))
    names = ("test_add", "test_the_root_is_the_images", "test_the_root_is_read_only")
    task = project.task(
        environment="py",
        test_patch=project.patch({"tests/test_add.py": held_out}),
        fail_to_pass=tuple(f"tests/test_add.py::{name}" for name in names),
    )
    handle = start_server(root)
    try:
        with httpx.Client(base_url=handle.url, timeout=120.0, trust_env=False) as http:
            assert http.get("/readyz").json()["environments"] == ["default", "py"]
            verdict = http.post("/task/submit", json=body(task, project.gold())).json()
            assert verdict["status"] == "resolved", verdict["log"]
            assert http.post("/task/submit", json=body(task, "")).json()["status"] == "unresolved"
            shadow = project.patch({"pluggy.py": "raise SystemExit\n"})
            assert "restored:pluggy.py" in http.post("/task/submit", json=body(task, shadow)).json()["flags"]
            import_image(root, "late", py_tar)  # beside the running server
            assert http.get("/readyz").json()["environments"] == ["default", "late", "py"]
            assert http.post("/task/submit", json={**body(task, ""), "environment": "late"}).status_code == 200
            opened = http.post("/session", json=body(task, "")).json()
            path = f"/session/{opened['session_id']}"
            seen = http.post(
                f"{path}/exec", json={"command": "python3 -c 'print(open(\"/etc/marker\").read())'"}
            ).json()
            assert (seen["exit_code"], seen["output"]) == (0, "of the image\n\n")
            fix = {"path": "calc/ops.py", "content": "def add(a, b): return a + b\ndef mul(a, b): return a * b\n"}
            assert http.post(f"{path}/write", json=fix).status_code == 200
            assert http.post(f"{path}/finish", json={}).json()["verdict"]["status"] == "resolved"
    finally:
        assert handle.stop() == 0
    assert listing(rootfs) == before


@pytest.mark.ci
def test_environments_are_put_by_path(tmp_path: Path, py_tar: Path, judge: Any) -> None:
    without_pytest = archives.docker_archive(tmp_path / "1.tar", archives.layer(PYTHON))
    import_image(tmp_path / "elsewhere", "e", py_tar)
    directory = tmp_path / "elsewhere" / "environments" / "e"
    name = f"put-{tmp_path.name}"

    def put(environments: dict[str, str]) -> tuple[int, str]:
        reply = httpx.put(
            f"{judge.server.url}/environments", json={"environments": environments}, timeout=120.0, trust_env=False
        )
        return reply.status_code, reply.json().get("error", {}).get("field", "")

    assert put({name: str(without_pytest)}) == (422, f"environments.{name}")
    assert put({name: str(directory)}) == (200, "")
    assert put({name: str(directory)}) == (200, "")
    assert put({name: str(py_tar)}) == (200, "")  # the same image by another way
    for bad in (str(without_pytest), str(tmp_path / "nowhere"), "relative.tar", str(tmp_path), __file__):
        assert put({name: bad}) == (422, f"environments.{name}"), bad
    assert put({"../x": str(py_tar)})[0] == 422
    assert put({"default": str(py_tar)}) == (422, "environments.default")
