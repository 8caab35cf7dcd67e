"""What a policy refuses to train on, whatever its backend."""

from __future__ import annotations

from dockyard_core.batch import BatchShard, MicroBatch

_WANTED = {
    "token_ids_BL": "iu",
    "position_ids_BL": "iu",
    "sequence_ids_BL": "iu",
    "loss_mask_BL": "b",
    "sampled_logprobs_BL": "f",
    "advantages_BL": "f",
    "proximal_logprobs_BL": "f",
}
"""Field -> the kinds of dtype it may have, as in ``numpy.dtype.kind``."""
_KINDS = {"iu": "integers", "b": "bool", "f": "floats"}


def check_shard(shard: BatchShard, *, vocab_size: int) -> None:
    """Raise ValueError unless the shard can be trained on by a policy with this vocabulary."""
    if not shard.micro_batches:
        raise ValueError("a shard needs at least 1 micro-batch, got 0; pack_batch([]) makes one of padding")
    if shard.temperature <= 0:
        raise ValueError(
            f"temperature must be > 0, got {shard.temperature}; greedy rollouts have no log-probabilities to train on"
        )
    if shard.num_valid_tokens < 0 or shard.num_sequences < 0:
        raise ValueError(
            f"counts of a step must be >= 0, got {shard.num_valid_tokens} tokens, {shard.num_sequences} sequences; "
            "take both from pack_batch"
        )
    for micro_batch in shard.micro_batches:
        _check_arrays(micro_batch)
        _check_tokens(micro_batch, vocab_size)


def _check_arrays(micro_batch: MicroBatch) -> None:
    shape = micro_batch.token_ids_BL.shape
    if len(shape) != 2:
        raise ValueError(f"token_ids_BL must have 2 dimensions [B, L], got {shape}; pack sequences into rows")
    for name, kinds in _WANTED.items():
        array = getattr(micro_batch, name)
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(f"{name} must have the shape {shape} of token_ids_BL, got {array.shape}; pad it")
        if array.dtype.kind not in kinds:
            raise ValueError(f"{name} must hold {_KINDS[kinds]}, got {array.dtype}; convert it with astype")


def _check_tokens(micro_batch: MicroBatch, vocab_size: int) -> None:
    ids_BL = micro_batch.token_ids_BL
    largest, smallest = int(ids_BL.max(initial=0)), int(ids_BL.min(initial=0))
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        raise ValueError(
            f"token ids must lie in [0, {vocab_size}), the policy's vocabulary, got {wrong}; "
            "encode with the tokenizer of the policy's own model"
        )
    if bool((micro_batch.loss_mask_BL[:, 0]).any()):
        raise ValueError("the first token of a row has no past and cannot be trained, got a mask of True; clear it")
