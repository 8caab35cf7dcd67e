"""Make a virtual environment with an SGLang server, which the workspace's own cannot hold beside vLLM.

    python tools/sglang_env.py VENV          a server that runs on CPU
    python tools/sglang_env.py VENV --gpu    plain `sglang` for NVIDIA GPUs (nobody has run this yet)
    python tools/sglang_env.py --lock        write tools/sglang_cpu/requirements.txt anew

SGLang's dependencies contradict vLLM's, and its wheel asks for GPU libraries that a machine without a GPU has no use
for. On CPU this installs the wheel alone, the pinned libraries of tools/sglang_cpu/requirements.txt, and the two
stand-ins of tools/sglang_cpu/standins for compiled code that has no CPU build; each says what it replaces. Run again
on the same directory, it installs only what is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent / "sglang_cpu"
REQUIREMENTS = HERE / "requirements.txt"
STANDINS = HERE / "standins"
SGLANG = "sglang==0.5.23"
PYTHONS = ((3, 11), (3, 12), (3, 13))  # the versions that SGLang has wheels for
# torch's wheel pins these itself, and a CPU build of torch has none of them.
OF_TORCH = re.compile(r"(cuda-|nvidia-(?!ml-py)|triton==)")
CHECK = (
    "import importlib.metadata as m, torch, torchvision, sgl_kernel; "
    "print('sglang', m.version('sglang'), 'with torch', torch.__version__)"
)


def default_python() -> str:
    """The version that runs this script if SGLang has a wheel for it, else the newest that it has one for."""
    running = sys.version_info[:2]
    return ".".join(map(str, running if running in PYTHONS else PYTHONS[-1]))


def pinned(text: str) -> dict[str, str]:
    """Name and version of each `name==version` line; any other line is an error."""
    pins = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            if not separator or re.fullmatch(r"[a-z0-9-]+", name) is None or re.fullmatch(r"[\w.]+", version) is None:
                raise ValueError(f"not a pinned requirement: {line}")
            pins[name] = version
    return pins


def refusal(venv: Path, gpu: bool) -> str | None:
    """Why this directory must not be touched, or None."""
    if venv.exists() and not (venv / "pyvenv.cfg").is_file() and (not venv.is_dir() or any(venv.iterdir())):
        return f"{venv} exists and is no virtual environment: name another directory"
    kernels = list(venv.glob("lib/python3*/site-packages/sgl_kernel*"))
    found = {path.name for path in kernels}
    if gpu and "sgl_kernel.py" in found:
        return f"{venv} was made for CPU: name another directory for --gpu"
    if not gpu and "sgl_kernel" in found:
        return f"{venv} was made with --gpu: name another directory for CPU"
    return None


def run(*command: str | Path) -> None:
    """Say what is run, then run it."""
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def site_packages(venv: Path) -> Path:
    """Where the environment's packages are."""
    [found] = venv.glob("lib/python3*/site-packages")
    return found


def install_standins(venv: Path) -> None:
    """Copy the stand-ins beside the packages they stand in for."""
    target = site_packages(venv)
    for source in sorted(path for path in STANDINS.iterdir() if path.is_file()):
        print(f"+ copy {source.relative_to(HERE.parent)} to {target}")
        shutil.copyfile(source, target / source.name)


def make(venv: Path, python_version: str, gpu: bool) -> Path:
    """Make or complete the environment; returns its interpreter."""
    interpreter = venv / "bin" / "python"
    if (venv / "pyvenv.cfg").is_file():
        print(f"{venv} is a virtual environment already: installing what is missing")
    else:
        run("uv", "venv", "--python", python_version, venv)
    install = ("uv", "pip", "install", "--python", interpreter)
    if gpu:
        print("--gpu has never been run: it installs what the sglang wheel itself asks for")
        run(*install, SGLANG)
    else:
        run(*install, "--requirement", REQUIREMENTS)
        run(*install, "--no-deps", SGLANG)
        install_standins(venv)
    run(interpreter, "-c", CHECK)
    return interpreter


def lock() -> None:
    """Pin what requirements.in asks for; SGLang has no lock of its own."""
    command = ("uv", "pip", "compile", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet")
    resolved = subprocess.run(
        (*command, HERE / "requirements.in"), check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    lines = [line for line in resolved.splitlines() if OF_TORCH.match(line) is None]
    header = "# Written by `python tools/sglang_env.py --lock` from requirements.in.\n"
    text = header + "\n".join(lines) + "\n"
    pinned(text)
    REQUIREMENTS.write_text(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="tools/sglang_env.py", description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("venv", type=Path, nargs="?", help="directory of the virtual environment")
    parser.add_argument("--gpu", action="store_true", help="plain sglang for NVIDIA GPUs; never run so far")
    parser.add_argument("--python", default=default_python(), help="Python version (default: %(default)s)")
    parser.add_argument("--lock", action="store_true", help="resolve requirements.in and write requirements.txt")
    parsed = parser.parse_args(argv)
    if parsed.lock == (parsed.venv is not None):
        parser.error("name either a directory for the environment or --lock")
    return parsed


def main(argv: list[str]) -> None:
    """Do what the command line says."""
    options = arguments(argv)
    if shutil.which("uv") is None:
        sys.exit("this needs uv: pip install uv")
    try:
        if options.lock:
            lock()
            return
        venv = options.venv.absolute()
        reason = refusal(venv, options.gpu)
        if reason is not None:
            print(reason, file=sys.stderr)
            raise SystemExit(2)
        interpreter = make(venv, options.python, options.gpu)
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with exit code {error.returncode}: {' '.join(map(str, error.cmd))[:200]}")
    print(f"generation.backend=sglang generation.sglang.python={interpreter}")


if __name__ == "__main__":
    main(sys.argv[1:])
