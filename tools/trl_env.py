"""Make a virtual environment with TRL, which the workspace itself has no use for.

    python tools/trl_env.py VENV

`benchmarks/train_step.py` runs TRL's step as its peer. torch, transformers and numpy are those of the environment that
runs this, so that both sides compute with the same libraries and uv's cache serves both. Run again on the same
directory, it installs only what is missing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PINNED = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
SHARED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
CHECK = (
    "import importlib.metadata as m; from trl import GRPOConfig, GRPOTrainer; "
    "print('trl', m.version('trl'), 'with torch', m.version('torch'), 'and transformers', m.version('transformers'))"
)


def requirements() -> tuple[str, ...]:
    """What is installed: TRL, and the libraries that both sides share at the versions found here."""
    # A local label such as "+cpu" says where a build came from; the index that is configured decides that again.
    return (*PINNED, *(f"{name}=={version(name).partition('+')[0]}" for name in SHARED))


def refusal(venv: Path) -> str | None:
    """Why this directory must not be touched, or None."""
    if venv.exists() and not (venv / "pyvenv.cfg").is_file() and (not venv.is_dir() or any(venv.iterdir())):
        return f"{venv} exists and is no virtual environment: name another directory"
    return None


def run(*command: str | Path) -> None:
    """Say what is run, then run it."""
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def make(venv: Path) -> Path:
    """Make or complete the environment; returns its interpreter."""
    interpreter = venv / "bin" / "python"
    if (venv / "pyvenv.cfg").is_file():
        print(f"{venv} is a virtual environment already: installing what is missing")
    else:
        run("uv", "venv", "--python", ".".join(map(str, sys.version_info[:2])), venv)
    run("uv", "pip", "install", "--python", interpreter, *requirements())
    run(interpreter, "-c", CHECK)
    return interpreter


def main(argv: list[str]) -> None:
    """Do what the command line says."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="tools/trl_env.py", description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("venv", type=Path, help="directory of the virtual environment")
    venv = parser.parse_args(argv).venv.absolute()
    if shutil.which("uv") is None:
        sys.exit("this needs uv: pip install uv")
    reason = refusal(venv)
    if reason is not None:
        print(reason, file=sys.stderr)
        raise SystemExit(2)
    try:
        interpreter = make(venv)
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with exit code {error.returncode}: {' '.join(map(str, error.cmd))[:200]}")
    print(f"DOCKYARD_TRL_PYTHON={interpreter}")


if __name__ == "__main__":
    main(sys.argv[1:])
