from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dockyard_core import DataError
from dockyard_core.offline.rows import parse_row
from dockyard_core.offline.usage import build_parser

VALID = {
    "token_ids": [5, 6, 7, 8],
    "prompt_length": 2,
    "logprobs": [-0.5, -1.5],
    "reward": 1.0,
    "group": "a",
}
SFT = ("token_ids", "prompt_length")


def parse(fields: dict[str, Any] | bytes, command: str = "grpo"):
    line = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_row(line, "rows.jsonl:7", command=command, vocab_size=64)


def changed(command: str = "grpo", /, **fields: Any) -> dict[str, Any]:
    """A valid row with changes; None removes a field."""
    names = VALID if command == "grpo" else SFT
    return {name: value for name, value in ({n: VALID[n] for n in names} | fields).items() if value is not None}


def test_logprobs_are_spread_over_the_trained_tokens() -> None:
    row = parse(changed(prompt_length=None, loss_mask=[0, 1, 0, 1]))
    assert row.loss_mask_T.tolist() == [False, True, False, True]
    assert row.logprobs_T.tolist() == [0.0, -0.5, 0.0, -1.5]
    assert (row.logprobs_T.dtype, row.token_ids_T.dtype) == (np.float32, np.int64)
    assert (row.advantage, row.reward, row.group, row.step) == (None, 1.0, "a", None)


def test_a_prompt_length_is_the_mask_of_everything_after_it() -> None:
    by_length = parse(changed("sft"), "sft")
    by_mask = parse(changed("sft", prompt_length=None, loss_mask=[False, False, True, True]), "sft")
    assert by_length.loss_mask_T.tolist() == by_mask.loss_mask_T.tolist() == [False, False, True, True]
    assert by_length.logprobs_T.tolist() == [0.0] * 4


def test_a_rollout_without_a_trained_token_may_still_vote_in_its_group() -> None:
    row = parse(changed(prompt_length=4, logprobs=[]))
    assert not row.loss_mask_T.any()
    assert row.reward == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b"{", "json: must be one JSON object, got Expecting"),
        (b"[1]", "json: must be one JSON object, got [1]; write one object per line"),
        (b"\xff{}", "json: must be UTF-8, got byte 0; convert the file to UTF-8"),
        (b'{"reward": NaN}', "json: numbers must be finite, got NaN; leave the row out"),
        (changed(token_ids=None), "token_ids: must be a list of integers, got nothing; give token ids"),
        (changed(token_ids=[]), "token_ids: must hold at least 1 token, got []; leave the row out"),
        (changed(token_ids=[1, 2.0, 3]), "token_ids: must be a list of integers, got [1, 2.0, 3]; give token ids"),
        (changed(token_ids=[1, True, 3]), "token_ids: must be a list of integers, got [1, true, 3]"),
        (changed(token_ids="1 2"), 'token_ids: must be a list of integers, got "1 2"'),
        (changed(token_ids=[[1], [2, 3]]), "token_ids: must be a list of integers, got [[1], [2, 3]]"),
        (changed(token_ids=[1, 2**70]), "token_ids: must be a list of integers, got [1, 11805"),
        (changed(token_ids=[1, -1, 3]), "token_ids: must lie in 0..63, the model's vocabulary, got -1 at 1; tokenize"),
        (changed(token_ids=[1, 2, 64]), "token_ids: must lie in 0..63, the model's vocabulary, got 64 at 2; tokenize"),
        (changed(prompt_length=None), "loss_mask: a row has either loss_mask or prompt_length, got neither; say"),
        (changed(loss_mask=[0, 0, 1, 1]), "either loss_mask or prompt_length, got loss_mask and prompt_length; say"),
        (changed(prompt_length=0), "prompt_length: must be an integer >= 1, got 0; correct it"),
        (changed(prompt_length=5), "prompt_length: must be <= 4, the number of token_ids, got 5; correct it"),
        (changed(prompt_length=True), "prompt_length: must be an integer >= 1, got true; correct it"),
        (changed(prompt_length=None, loss_mask=[0, 1]), "loss_mask: must have 4 values, one per token, got 2; 1 ="),
        (changed(prompt_length=None, loss_mask=[1, 1, 0, 0]), "loss_mask: must be 0 for the first token, which has"),
        (
            changed(prompt_length=None, loss_mask=[0, 2, 1, 0]),
            "a list of 0 and 1 (or false and true), got [0, 2, 1, 0]",
        ),
        (changed(prompt_length=None, loss_mask=[0, 0.5, 1, 0]), "got [0, 0.5, 1, 0]; 1 = trained"),
        (changed(logprobs=None), "logprobs: grpo needs one value per trained token, got nothing; give the log-"),
        (changed(logprobs=[0, 0, -1, -1]), "logprobs: must have 2 values, one per trained token, got 4; leave out"),
        (changed(logprobs=[-1, 0.3]), "logprobs: must be finite and <= 0, got 0.3 at 1; give natural logarithms"),
        (changed(logprobs=[-1, -1e39]), "logprobs: must be finite and <= 0, got -1e+39 at 1; give natural logarithms"),
        (
            b'{"token_ids": [1, 2], "token_ids": [1, 3]}',
            'json: must be one JSON object, got "token_ids" twice',
        ),
        (changed(**{"a\x1b[31m\n": 1}), "a\\u001b[31m\\n: must be a field of the format"),
        (changed(logprobs=[None, -1]), "logprobs: must be a list of numbers, got [null, -1]; give natural logarithms"),
        (changed(proximal_logprobs=[-1]), "proximal_logprobs: must have 2 values, one per trained token, got 1"),
        (changed(reward=None), "advantage: a row has either advantage, or reward and group, got neither; give one"),
        (changed(advantage=1), "a row has either advantage, or reward and group, got advantage and reward; give one"),
        (changed(group=None), "group: a reward is compared within a group, got nothing; give rollouts of one prompt"),
        (changed(group=1.5), "group: must be a string or an integer, got 1.5; name the prompt's group"),
        (changed(reward="1"), 'reward: must be a finite number, got "1"; leave the row out, or correct it'),
        (changed(reward=True), "reward: must be a finite number, got true; leave the row out, or correct it"),
        (b'{"token_ids": [1, 2], "prompt_length": 1, "logprobs": [-1], "advantage": 1e999}', "must be a finite number"),
        (changed(step=-1), "step: must be an integer >= 0, got -1; correct it"),
        (changed(log_probs=[]), 'log_probs: must be a field of the format, got "log_probs"; did you mean logprobs?'),
        (changed(tokens=[]), 'tokens: must be a field of the format, got "tokens"; did you mean token_ids?'),
    ],
)
def test_a_bad_row_says_where_what_and_the_way_out(fields, message) -> None:
    with pytest.raises(DataError) as caught:
        parse(fields)
    said = str(caught.value)
    assert said.startswith("rows.jsonl:7: ")
    assert message in said
    assert "\n" not in said
    assert len(said) < 260


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": 1.0}, "reward: is read by grpo only, got command sft; leave the field out, or run grpo"),
        ({"prompt_length": 4}, "prompt_length: must leave at least one trained token, got none; leave the row out"),
    ],
)
def test_rows_of_sft_have_rules_of_their_own(fields, message) -> None:
    with pytest.raises(DataError) as caught:
        parse(changed("sft", **fields), "sft")
    assert message in str(caught.value)


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_the_row_in_the_help_is_a_valid_one(capsys, command) -> None:
    with pytest.raises(SystemExit):
        build_parser("trainer").parse_args([command, "--help"])
    (example,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a row: ")]
    assert parse(example.removeprefix("a row: ").encode(), command).num_tokens == 4
