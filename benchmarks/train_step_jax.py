"""The JAX trainer as a subject of `benchmarks.train_step`.

python -m benchmarks.train_step_jax OPTIONS     serve it; OPTIONS as JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train_step_shards import optimizer_of, shard_of
from benchmarks.train_step_worker import Step, Subject, claim_stdout, serve


def subject(options: Mapping[str, Any], batch: Mapping[str, np.ndarray]) -> Subject:
    """`JaxPolicy.train_step` and its forward pass, with or without what can be left out."""
    from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig

    shares = options["subject"] != "ours, JAX, nothing shared"
    config = JaxPolicyConfig(**optimizer_of(options), share_prefixes=shares, compilation_cache_dir=None)
    policy = JaxPolicy.from_pretrained(options["model"], config)
    shard = shard_of(options, batch, shares=shares)

    def step() -> Step:
        metrics = policy.train_step(shard)
        return Step(metrics.loss, metrics.grad_norm)

    return Subject(
        step=step,
        forward=lambda: policy.logprobs(shard),
        about=lambda: {"compile_s": policy.compile_s, "num_compiled": policy.num_compiled},
    )


def main() -> None:
    """Serve the subject that the options name."""
    channel, options = claim_stdout(), json.loads(sys.argv[1])
    # Read when JAX meets its devices; a program that an earlier run has kept would hide what compiling costs.
    os.environ |= {"NPROC": str(options["threads"]), "JAX_PLATFORMS": "cpu"}
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    with np.load(Path(options["batch"])) as arrays:
        batch = dict(arrays)
    serve(subject(options, batch), channel)


if __name__ == "__main__":
    main()
