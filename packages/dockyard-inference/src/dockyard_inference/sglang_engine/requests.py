"""What SGLang is asked, and its answers as ``Completion``s. Plain dictionaries; names are those of SGLang 0.5.23.

The client adds the ``rid`` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import GeneratorError
from dockyard_core.generator import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan
from dockyard_core.refit import TensorSpec

if TYPE_CHECKING:
    from dockyard_inference.push.sglang_group import BroadcastGroup

_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request: the checkpoint's own sampling defaults would bias the ratio."""
_ROLLOUT, _SCORE = 0, 1
"""Priorities; the higher goes first. A probe of a few tokens that a refit's caller waits for must not
queue behind hundreds of rollouts."""
NOTHING_SAMPLED = Completion(token_ids=(), logprobs=(), version_spans=(), finish_reason="abort")
_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def rollout_payload(token_ids: Sequence[int], sampling: SamplingParams, num_tokens: int, label: str) -> dict[str, Any]:
    """Sample up to ``num_tokens`` after ``token_ids``.

    SGLang's ``ignore_eos`` also ignores ``stop_token_ids``, so with stop tokens the model's own end token
    stops as well; ``extended`` tells the two apart.
    """
    params: dict[str, Any] = {
        **_NEUTRAL,
        "max_new_tokens": num_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return _payload(token_ids, params, -1, _ROLLOUT, label)


def score_payload(token_ids: Sequence[int], label: str) -> dict[str, Any]:
    """The logprobs of given tokens; nothing is sampled."""
    params = {**_NEUTRAL, "max_new_tokens": 0, "temperature": 1.0, "ignore_eos": True, "skip_special_tokens": False}
    return _payload(token_ids, params, 0, _SCORE, label)


def _payload(
    token_ids: Sequence[int], params: dict[str, Any], logprob_start: int, priority: int, label: str
) -> dict[str, Any]:
    return {
        "input_ids": list(token_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": logprob_start,
        "priority": priority,
        "extra_key": label,
        "stream": False,
    }


def pause_payload() -> dict[str, Any]:
    """``retract``: requests keep their tokens and lose their keys and values, which a new version must not read."""
    return {"mode": "retract"}


def resume_payload() -> dict[str, Any]:
    """Of ``/continue_generation``."""
    return {"torch_empty_cache": False}


def abort_payload(rid: str | None) -> dict[str, Any]:
    """Of ``/abort_request``; None = every request of the server."""
    return {"rid": rid or "", "abort_all": rid is None}


def label_payload(label: str) -> dict[str, Any]:
    """Of ``/update_weight_version``: names the weights that are held."""
    return {"new_version": label, "abort_all_requests": False}


def disk_payload(directory: str, label: str) -> dict[str, Any]:
    """Of ``/update_weights_from_disk``."""
    return {
        "model_path": directory,
        "load_format": "safetensors",
        "weight_version": label,
        "flush_cache": True,
        "abort_all_requests": False,
    }


def group_payload(group: BroadcastGroup) -> dict[str, Any]:
    """Of ``/init_weights_update_group``."""
    return {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": 1,
        "world_size": group.world_size,
        "group_name": group.name,
        "backend": group.backend,
    }


def bucket_payload(group_name: str, specs: Sequence[TensorSpec], label: str | None) -> dict[str, Any]:
    """Of ``/update_weights_from_distributed``; the last bucket brings the label, and drops cached keys and values."""
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": label is not None,
        "weight_version": label,
    }


def make_label(incarnation: int, version: int) -> str:
    """SGLang's versions are strings."""
    return f"{incarnation}:{version}"


def to_completion(reply: Mapping[str, Any]) -> Completion:
    """One answer of ``/generate``. Raises GeneratorError if it is none that can be trained on."""
    try:
        meta, token_ids = reply["meta_info"], tuple(int(token) for token in reply["output_ids"])
        entries = meta.get("output_token_logprobs") or ()
        logprobs = tuple(float(entry[0]) for entry in entries)
        logprob_ids = tuple(int(entry[1]) for entry in entries)
        spans = tuple(
            VersionSpan(_version_of(span["version"]), int(span["start"]), int(span["end"]))
            for span in meta.get("weight_versions") or ()
            if span["start"] != span["end"]
        )
        finish = _FINISH[meta["finish_reason"]["type"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise GeneratorError(f"SGLang's answer is not that of version 0.5.23: {error!r}") from error
    if logprob_ids != token_ids:
        raise GeneratorError(f"SGLang gave {len(logprobs)} logprobs for {len(token_ids)} other tokens")
    bounds = (0, *(bound for span in spans for bound in (span.start, span.end)), len(token_ids))
    if any(a != b for a, b in list(pairwise(bounds))[::2]) or any(span.start > span.end for span in spans):
        raise GeneratorError(f"SGLang's version spans {spans} do not cover {len(token_ids)} tokens")
    return Completion(token_ids=token_ids, logprobs=logprobs, version_spans=spans, finish_reason=finish)


def to_scores(reply: Mapping[str, Any], num_tokens: int) -> tuple[float, ...]:
    """Logprobs of tokens 1..T-1. Raises GeneratorError if the request was aborted or the answer is not whole."""
    try:
        if meta_reason(reply) == "abort":
            raise GeneratorError("the score was aborted")
        scores = tuple(float(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise GeneratorError(f"SGLang's answer is not that of version 0.5.23: {error!r}") from error
    if len(scores) != num_tokens - 1:
        raise GeneratorError(f"SGLang scored {len(scores)} tokens of {num_tokens - 1}")
    return scores


def meta_reason(reply: Mapping[str, Any]) -> str:
    """The type of the finish reason."""
    return str((reply["meta_info"].get("finish_reason") or {}).get("type"))


def extended(head: Completion | None, tail: Completion) -> Completion:
    """A completion that was sampled in two requests, as one."""
    if head is None:
        return tail
    start = len(head.token_ids)
    spans = [*head.version_spans]
    for version, begin, end in tail.version_spans:
        if spans and spans[-1].policy_version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end + start)
        else:
            spans.append(VersionSpan(version, begin + start, end + start))
    return Completion(
        token_ids=head.token_ids + tail.token_ids,
        logprobs=head.logprobs + tail.logprobs,
        version_spans=tuple(spans),
        finish_reason=tail.finish_reason,
    )


def _version_of(label: str) -> int:
    incarnation, separator, version = label.partition(":")
    if not (separator and incarnation.isdigit() and version.isdigit()):
        raise ValueError(f"weight version {label!r} is not incarnation:version")
    return int(version)


def is_stopped_by_model(whole: Completion, request: GenerateRequest) -> bool:
    """Whether the model's own end token stopped it, which is none of the request's."""
    return whole.finish_reason == "stop" and whole.token_ids[-1] not in request.sampling.stop_token_ids
