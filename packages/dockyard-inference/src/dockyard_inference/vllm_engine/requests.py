"""What vLLM is asked for, and its answer as a ``Completion``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dockyard_core.generator import Completion, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmParams


def rollout_params(sampling: SamplingParams) -> VllmParams:
    """Sample one completion with the logprob of every sampled token."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    return VllmParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        ignore_eos=True,  # only the request's own stop tokens stop it
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def score_params() -> VllmParams:
    """The logprobs of the prompt's tokens; one token is sampled, because vLLM takes no less."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    return VllmParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def to_completion(output: Any) -> Completion:
    """One ``CompletionOutput`` of vLLM."""
    flat = output.logprobs
    return Completion(
        token_ids=tuple(output.token_ids),
        logprobs=() if flat is None else tuple(flat.logprobs[start] for start in flat.start_indices),
        version_spans=tuple(
            VersionSpan(_version_of(span.version), span.start, span.end) for span in output.weight_versions or ()
        ),
        finish_reason=output.finish_reason,
    )


def _version_of(label: str) -> int:
    return int(label.rpartition(".")[2])
