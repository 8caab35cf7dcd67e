"""Stand-in for the CPU build of `sgl_kernel`, which no package index carries.

SGLang 0.5.23 imports the names below as soon as SGLANG_USE_CPU_ENGINE=1. Its layers use the compiled CPU kernels only
on processors with AMX and only when `torch.ops.sgl_kernel.convert_weight_packed` exists. This module leaves that
operator out, so every layer takes SGLang's own path in plain torch, and one function is still called: the bookkeeping
of cache slots. The other names belong to speculative decoding, which is not supported here and says so when called.
`torch.ops.sgl_kernel.murmur_hash32_cpu`, the hash of seeded sampling, is left out as well: SGLang draws from seeds only
with --enable-deterministic-inference, which it refuses for the attention that runs on CPU. Without that option it
ignores `sampling_seed` silently.
"""

from __future__ import annotations

from typing import Any

_SPECULATIVE_DECODING = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _unsupported(name: str) -> Any:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"sgl_kernel stand-in: {name} (speculative decoding) has no CPU version here")

    refuse.__name__ = name
    return refuse


for _name in _SPECULATIVE_DECODING:
    globals()[_name] = _unsupported(_name)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write each request's new cache slots into its row of the request-to-token table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start
