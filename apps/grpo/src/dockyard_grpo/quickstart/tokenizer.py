"""The tiny policy's tokenizer: a byte alphabet plus whole pieces of the quickstart's texts, without merges.

Any text encodes losslessly; a word, an operator or a diff marker of the family is one token. That keeps a prompt near
42 tokens and a diff near 37, and lets a filling be chosen by a single token.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dockyard_core.prompt import render_numbered
from dockyard_core.task import Task
from dockyard_grpo.quickstart.family import Problem, draw_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["EOS_ID", "PAD_ID", "build_tokenizer", "render_prompt"]

PAD_ID, EOS_ID = 0, 1
_SPECIAL = ("<pad>", "<eos>", "<patch>")

# A line's start (its number or diff marker) keeps its indentation and the line end before it; a word keeps the space
# before it, "def " and "return " the space after; an operator keeps both; digits stand alone.
_PIECES = (
    r"\n[0-9]\| *|\n--- a/|\n\+\+\+ b/|--- a/|\+\+\+ b/|\n@@ -|\n[-+ ] *|\n|\.py| @@| \+(?=[0-9])|def |return (?! )"
    r"|[A-Za-z]+| [A-Za-z]+|[0-9]| [^\sA-Za-z0-9_]+ |, |[^\sA-Za-z0-9_,]+|,|_| "
)


def render_prompt(problem: Problem) -> str:
    """Return the prompt of `problem`, as the loop renders the task made from it."""
    return render_numbered(
        Task(
            instance_id="",
            repo="",
            base_commit="",
            problem_statement=problem.issue,
            test_patch="",
            fail_to_pass=(),
            prompt_files=((problem.path, problem.source(problem.wrong)),),
        )
    )


def build_tokenizer(*, num_problems: int = 6000) -> PreTrainedTokenizerFast:
    """Collect the pieces of `num_problems` problems and return the tokenizer; the same one at every call."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rng = random.Random(1)
    pieces: set[str] = set()
    for index in range(num_problems):
        problem = draw_problem(rng, num_functions=1 + index % 3, heldout=index % 4 == 0, jargon=index % 2 == 0)
        for text in (render_prompt(problem), *map(problem.patch, problem.plausible_fillings)):
            pieces.update(piece for piece, _ in split.pre_tokenize_str(text))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL, *alphabet, *sorted(pieces.difference(alphabet, _SPECIAL))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
