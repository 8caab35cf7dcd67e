"""One row of an offline data file: a closed JSON record, checked by itself.

Shape legend: T = tokens of the row.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from dockyard_core.errors import DataError

Command = Literal["sft", "grpo"]

SFT_FIELDS = ("token_ids", "loss_mask", "prompt_length", "step")
GRPO_FIELDS = (*SFT_FIELDS, "logprobs", "proximal_logprobs", "advantage", "reward", "group")

_MAX_SHOWN = 60
_ROUNDING = 1e-3
"""How far above 0 a log-probability may lie: engines round, but a probability lies far above."""
_LEAST_LOGPROB = -1e30
"""Below it, a float32 would be infinite; no engine means such a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineRow:
    """One token sequence to train on."""

    token_ids_T: np.ndarray  # int64
    loss_mask_T: np.ndarray  # bool, never True at 0
    logprobs_T: np.ndarray  # float32, 0 where the mask is False; all 0 for sft
    proximal_logprobs_T: np.ndarray | None  # the same; None = the row has none
    advantage: float | None
    """None = sft, or to be computed from the rewards of the group."""
    reward: float | None
    group: str | int | None
    """Rows of one group stand together and are trained in one step; None = a row by itself."""
    step: int | None
    """Rows of one step stand together; None = steps are made by number of rows."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids_T)


def parse_row(line: bytes, where: str, *, command: Command, vocab_size: int) -> OfflineRow:
    """Read and check one JSON line.

    Args:
        line: UTF-8 JSON.
        where: ``file:line``, the start of every message.
        command: which fields the row may and must have.
        vocab_size: token ids lie below it.

    Raises:
        DataError: ``file:line: field: rule, value, way out``.
    """
    return _Reader(_parse_object(line, where), where).row(command, vocab_size)


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    def refuse_constant(name: str) -> NoReturn:
        raise DataError(f"{where}: json: numbers must be finite, got {name}; leave the row out, or correct it")

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{_shown(repeated)} twice, of which only one would count")
        return fields

    try:
        text = line.decode("utf-8")
        value = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_repeats)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: json: must be UTF-8, got byte {error.start}; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: json: must be one JSON object, got {error}; write one object per line") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: json: must be one JSON object, got {_shown(value)}; write one object per line")
    return value


class _Reader:
    """Takes fields out of one object; knows where it stands for the messages."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def row(self, command: Command, vocab_size: int) -> OfflineRow:
        self._check_names(command)
        token_ids = self._token_ids(vocab_size)
        mask = self._mask(len(token_ids))
        logprobs, proximal, advantage, reward, group = np.zeros(len(mask), np.float32), None, None, None, None
        if command == "grpo":
            logprobs = self._logprobs("logprobs", mask)
            proximal = self._logprobs("proximal_logprobs", mask) if "proximal_logprobs" in self._fields else None
            advantage, reward, group = self._signal()
        elif not mask.any():
            self._refuse(
                "loss_mask" if "loss_mask" in self._fields else "prompt_length",
                "must leave at least one trained token",
                "none",
                "leave the row out, or train some of it",
            )
        return OfflineRow(
            token_ids_T=token_ids,
            loss_mask_T=mask,
            logprobs_T=logprobs,
            proximal_logprobs_T=proximal,
            advantage=advantage,
            reward=reward,
            group=group,
            step=self._integer("step", least=0) if "step" in self._fields else None,
        )

    def _check_names(self, command: Command) -> None:
        allowed = GRPO_FIELDS if command == "grpo" else SFT_FIELDS
        for name in self._fields:
            if name in allowed:
                continue
            if name in GRPO_FIELDS:
                self._refuse(name, "is read by grpo only", "command sft", "leave the field out, or run grpo")
            (closest,) = difflib.get_close_matches(name, allowed, n=1, cutoff=0.0)
            fields = ", ".join(allowed)
            self._refuse(
                _shown(name)[1:-1], "must be a field of the format", _shown(name), f"did you mean {closest}? ({fields})"
            )

    def _token_ids(self, vocab_size: int) -> np.ndarray:
        token_ids = self._array("token_ids", kinds="i", rule="must be a list of integers", way_out="give token ids")
        if not len(token_ids):
            self._refuse("token_ids", "must hold at least 1 token", "[]", "leave the row out")
        wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
        if len(wrong):
            self._refuse(
                "token_ids",
                f"must lie in 0..{vocab_size - 1}, the model's vocabulary",
                f"{token_ids[wrong[0]]} at {wrong[0]}",
                "tokenize with the tokenizer of --model",
            )
        return token_ids.astype(np.int64)

    def _mask(self, num_tokens: int) -> np.ndarray:
        given = [name for name in ("loss_mask", "prompt_length") if name in self._fields]
        if len(given) != 1:
            self._refuse(
                "loss_mask",
                "a row has either loss_mask or prompt_length",
                " and ".join(given) or "neither",
                "say which tokens are trained, once",
            )
        if given == ["prompt_length"]:
            length = self._integer("prompt_length", least=1)
            if length > num_tokens:
                self._refuse("prompt_length", f"must be <= {num_tokens}, the number of token_ids", length, "correct it")
            return np.arange(num_tokens) >= length
        rule = "must be a list of 0 and 1 (or false and true)"
        mask = self._array("loss_mask", kinds="ib", rule=rule, way_out="1 = trained")
        if len(mask) != num_tokens:
            rule = f"must have {num_tokens} values, one per token"
            self._refuse("loss_mask", rule, len(mask), "1 = trained, 0 = read only")
        if ((mask != 0) & (mask != 1)).any():
            self._refuse("loss_mask", rule, _shown(self._fields["loss_mask"]), "1 = trained")
        if mask[0]:
            self._refuse("loss_mask", "must be 0 for the first token, which has no past", mask[0], "set it to 0")
        return mask.astype(bool)

    def _logprobs(self, field: str, mask: np.ndarray) -> np.ndarray:
        """Spread one value per trained token over the row."""
        if field not in self._fields:
            way_out = "give the log-probabilities that the tokens were sampled with"
            self._refuse(field, "grpo needs one value per trained token", "nothing", way_out)
        way_out = "give natural logarithms"
        values = self._array(field, kinds="if", rule="must be a list of numbers", way_out=way_out)
        num_trained = int(mask.sum())
        if len(values) != num_trained:
            way_out = "leave out the values of tokens that are not trained"
            self._refuse(field, f"must have {num_trained} values, one per trained token", len(values), way_out)
        wrong = np.flatnonzero(~((values <= _ROUNDING) & (values >= _LEAST_LOGPROB)))
        if len(wrong):
            found = f"{values[wrong[0]]} at {wrong[0]}"
            self._refuse(field, "must be finite and <= 0", found, "give natural logarithms of probabilities")
        spread = np.zeros(len(mask), np.float32)
        spread[mask] = values
        return spread

    def _signal(self) -> tuple[float | None, float | None, str | int | None]:
        given = [name for name in ("advantage", "reward") if name in self._fields]
        if len(given) != 1:
            self._refuse(
                "advantage",
                "a row has either advantage, or reward and group",
                " and ".join(given) or "neither",
                "give one of them",
            )
        if given == ["reward"] and "group" not in self._fields:
            way_out = "give rollouts of one prompt the same group"
            self._refuse("group", "a reward is compared within a group", "nothing", way_out)
        group = self._fields.get("group")
        if "group" in self._fields and (isinstance(group, bool) or not isinstance(group, str | int)):
            self._refuse("group", "must be a string or an integer", _shown(group), "name the prompt's group")
        value = self._number(given[0])
        return (value, None, group) if given == ["advantage"] else (None, value, group)

    def _array(self, field: str, *, kinds: str, rule: str, way_out: str) -> np.ndarray:
        if field not in self._fields:
            self._refuse(field, rule, "nothing", way_out)
        value = self._fields[field]
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # lists of several lengths
            array = np.asarray(None)
        is_fitting = isinstance(value, list) and array.ndim == 1
        if not is_fitting or (value and array.dtype.kind not in kinds):
            self._refuse(field, rule, _shown(value), way_out)
        # numpy takes a lone true among numbers for 1; in a list of ids that is a mistake.
        if "b" not in kinds and bool in set(map(type, value)):
            self._refuse(field, rule, _shown(value), way_out)
        return array

    def _integer(self, field: str, *, least: int) -> int:
        value = self._fields[field]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            self._refuse(field, f"must be an integer >= {least}", _shown(value), "correct it")
        return value

    def _number(self, field: str) -> float:
        value = self._fields[field]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
        if not is_number or not math.isfinite(value):
            self._refuse(field, "must be a finite number", _shown(value), "leave the row out, or correct it")
        return float(value)

    def _refuse(self, field: str, rule: str, found: object, way_out: str) -> NoReturn:
        raise DataError(f"{self._where}: {field}: {rule}, got {found}; {way_out}")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
