"""Sequences that are decoded together, and the arithmetic of one step.

Shape legend: B = sequences, L = tokens so far (left-padded), V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dockyard_core.generator import Completion, FinishReason, GenerateRequest, VersionSpan

if TYPE_CHECKING:
    import torch


@dataclass
class LiveSequence:
    """One request while it is being completed."""

    request: GenerateRequest
    max_new_tokens: int
    rng: Any = None
    """``torch.Generator`` of a request with a seed of its own."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_cancelled: bool = False
    """Nobody waits for it any more; it leaves its cohort before the next step, never during one."""

    def append(self, token_id: int, logprob: float, policy_version: int) -> None:
        """Take one sampled token and decide whether it was the last."""
        at = len(self.token_ids)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].policy_version == policy_version:
            self.spans[-1] = self.spans[-1]._replace(end=at + 1)
        else:
            self.spans.append(VersionSpan(policy_version, at, at + 1))
        if token_id in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"

    def to_completion(self) -> Completion:
        """The result; a sequence that was not finished was aborted."""
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=tuple(self.spans),
            finish_reason=self.finish_reason or "abort",
        )


class Cohort:
    """Sequences that were admitted together and share one key-value cache."""

    def __init__(self, model: Any, sequences: list[LiveSequence]) -> None:
        self._model = model
        self.sequences = sequences
        self._rows = list(sequences)
        self._cache: Any = None
        self._mask_BL: Any = None

    def drop_cancelled(self) -> None:
        """Finish what nobody waits for. Between two steps only: a row must have got a token."""
        for sequence in self.sequences:
            if sequence.is_cancelled:
                sequence.finish_reason = "abort"
        self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def drop_cache(self) -> None:
        """Forget keys and values: the next step computes them again from the tokens."""
        self._cache = None

    def step(self, policy_version: int, shared_rng: torch.Generator) -> list[LiveSequence]:
        """Sample one token for every live sequence; returns the sequences that are finished."""
        import torch

        with torch.no_grad():
            logits_BV = self._prefill() if self._cache is None else self._extend()
            tokens, logprobs = _sample(logits_BV.float(), self._rows, shared_rng)
        for sequence, token_id, logprob in zip(self._rows, tokens, logprobs, strict=True):
            if sequence.finish_reason is None:
                sequence.append(token_id, logprob, policy_version)
        finished = [sequence for sequence in self.sequences if sequence.finish_reason is not None]
        self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]
        self._compact()
        return finished

    def _prefill(self) -> torch.Tensor:
        import torch
        from transformers import DynamicCache

        self._rows = list(self.sequences)
        texts = [[*s.request.prompt_token_ids, *s.token_ids] for s in self._rows]
        longest = max(map(len, texts))
        device = self._model.device
        ids_BL = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
        mask_BL = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=device)
        self._mask_BL, self._cache = mask_BL, DynamicCache(config=self._model.config)
        return self._forward(ids_BL, (mask_BL.cumsum(-1) - 1).clamp(min=0))

    def _extend(self) -> torch.Tensor:
        import torch

        last = [[s.token_ids[-1]] for s in self._rows]
        one_B1 = self._mask_BL.new_ones((len(last), 1))
        self._mask_BL = torch.cat([self._mask_BL, one_B1], dim=1)
        positions_B1 = self._mask_BL.sum(-1, keepdim=True) - 1
        return self._forward(torch.tensor(last, device=self._model.device), positions_B1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask_BL,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _compact(self) -> None:
        """Take finished rows out once they are a quarter: each time copies the whole cache."""
        import torch

        live = [row for row, sequence in enumerate(self._rows) if sequence.finish_reason is None]
        if self._cache is None or not live or 4 * len(live) > 3 * len(self._rows):
            return
        keep = torch.tensor(live, device=self._mask_BL.device)
        self._cache.batch_select_indices(keep)
        self._mask_BL = self._mask_BL[keep]
        self._rows = [self._rows[row] for row in live]


def _sample(
    logits_BV: torch.Tensor, rows: list[LiveSequence], shared_rng: torch.Generator
) -> tuple[list[int], list[float]]:
    """Draw from softmax(logits / T) by the exponential race; T = 0 takes the most likely token."""
    import torch

    temperatures = [sequence.request.sampling.temperature for sequence in rows]
    scale_B1 = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits_BV.device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV / scale_B1, dim=-1)
    race_BV = torch.empty_like(logprobs_BV).exponential_(generator=shared_rng)
    for row, sequence in enumerate(rows):
        if sequence.rng is not None:
            race_BV[row].exponential_(generator=sequence.rng)
        if temperatures[row] == 0:
            race_BV[row] = 1.0
    tokens_B = (logprobs_BV - race_BV.log()).argmax(-1)
    chosen_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B.tolist(), chosen_B.tolist()
