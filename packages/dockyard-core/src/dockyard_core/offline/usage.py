"""What the command line looks like: options, their meaning, and examples."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, get_args

from dockyard_core.advantage import Baseline, Scale

_EXAMPLES = {
    "sft": """\
examples:
  {prog} sft --model DIR --data rows.jsonl --out runs/sft
  {prog} sft --model DIR --data rows.jsonl --out runs/sft --epochs 3 --shuffle \\
      --lr 2e-5 --schedule cosine --warmup-steps 20
a row: {{"token_ids": [11, 12, 21, 1], "prompt_length": 2}}
""",
    "grpo": """\
examples:
  {prog} grpo --model DIR --data rows.jsonl --out runs/grpo --batch-size 64
  {prog} grpo --model DIR --data rows.jsonl --out runs/grpo --lr 1e-6 \\
      --loss clip_high=0.28 kl_coef=0.01 --policy dtype=bfloat16
a row: {{"token_ids": [11, 12, 21, 1], "prompt_length": 2, "logprobs": [-0.7, -0.1], "reward": 1, "group": "a"}}
""",
}
_EPILOG = """
The same command again goes on where OUT's last checkpoint is. Ctrl-C or SIGTERM: the step is finished and saved;
twice: stop at once.
exit codes: 0 done; 2 a mistake in arguments, data or OUT; 1 a fault of ours; 130, 143 stopped by a signal
"""


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):  # argparse takes -1e-5 for an option
            message += " (write OPTION=VALUE where the value begins with -)"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser; `options.parse_options` says what the values mean together."""
    parser = _Parser(prog=prog, description="Trains a policy on rows of a file.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="sft|grpo")
    for name, text in (
        ("sft", "supervised: the likelihood of the trained tokens"),
        ("grpo", "GRPO on sampled tokens with their log-probabilities and rewards or advantages"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text}.",
            epilog=_EXAMPLES[name].format(prog=prog) + _EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_files(command)
        _add_batches(command)
        _add_optimizer(command, "1e-5" if name == "sft" else "1e-6")
        if name == "grpo":
            _add_grpo(command)
        _add_run(command)
    return parser


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, metavar="DIR", help="directory of a Hugging Face model, or a hub id")
    command.add_argument("--data", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="metrics, checkpoints and the result")


def _add_batches(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("batches").add_argument
    add("--batch-size", type=_integer(1), metavar="N", help="rows of a step; groups are never split (default: 64)")
    add("--epochs", type=_integer(1), metavar="N", help="passes over the data (default: 1, or as --steps needs)")
    add("--steps", type=_integer(1), metavar="N", help="stop after so many steps")
    add("--shuffle", action="store_true", help="another order in every epoch, by --seed")
    add("--seed", type=_integer(0, 2**32 - 1), default=0, metavar="N", help="(default: %(default)s)")
    add(
        "--micro-batch-tokens",
        type=_integer(1),
        default=4096,
        metavar="N",
        help="tokens of one forward and backward pass: memory against speed (default: %(default)s)",
    )


def _add_optimizer(command: argparse.ArgumentParser, default_rate: str) -> None:
    add = command.add_argument_group("optimizer and loss").add_argument
    add("--lr", dest="learning_rate", type=float, metavar="X", help=f"peak learning rate (default: {default_rate})")
    add("--schedule", choices=("constant", "linear", "cosine"), help="after the warm-up (default: constant)")
    add("--warmup-steps", type=int, metavar="N")
    add("--weight-decay", type=float, metavar="X", help="decoupled, on matrices (default: 0)")
    add("--max-grad-norm", type=float, metavar="X", help="clip the gradient's norm (default: 1)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the computation (default: float32)")
    add("--device", metavar="NAME", help="(default: a GPU if there is one)")
    add("--loss", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="fields of LossConfig")
    add(
        "--policy",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="any other field of the policy's configuration; values are JSON or text",
    )


def _add_grpo(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("grpo").add_argument
    add("--temperature", type=_positive, default=1.0, metavar="X", help="the rows' sampling temperature (default: 1)")
    baselines, scales = get_args(Baseline), get_args(Scale)
    add("--baseline", choices=baselines, default=baselines[0], help="of rewards in a group (default: %(default)s)")
    add("--scale", choices=scales, default=scales[0], help="of rewards in a group (default: %(default)s)")


def _add_run(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("run").add_argument
    add("--save-every", type=_integer(0), default=100, metavar="N", help="steps; 0 = at the end (default: %(default)s)")
    add("--keep", type=_integer(1), default=2, metavar="N", help="newest checkpoints to keep (default: %(default)s)")
    add(
        "--resume",
        choices=("auto", "must", "never"),
        default="auto",
        help="auto: go on with what OUT holds, or begin; must, never: refuse the other case (default: %(default)s)",
    )
    add("--plain", action="store_true", help="a line per step, also on a terminal")


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        rule = f">= {least}" if most is None else f"in {least}..{most}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer {rule}, got {text!r}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be an integer {rule}, got {text!r}")
        return value

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value
