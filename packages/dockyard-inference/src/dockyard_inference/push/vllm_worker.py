"""Makes a plain vLLM server take attested pushes.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \
        --worker-extension-cls dockyard_inference.push.vllm_worker.PushExtension \
        --weight-transfer-config '{"backend": "dockyard-push"}'

vLLM imports this module by name in its workers; nothing else may. Every worker compares the names and
shapes with those of its model before a byte moves, hashes each bucket, and packs a tied output layer
again, which vLLM's own reload forgets on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from dockyard_inference.vllm_engine.worker import OWNER_KEY, DockyardWeightTransfer, RefitExtension


class PushWeightTransfer(DockyardWeightTransfer):
    """Belongs to the process that started it: the API server, or the engine above this worker."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.additional_config.setdefault(OWNER_KEY, os.getppid())
        super().__init__(config, vllm_config, *args, **kwargs)


class PushExtension(RefitExtension):
    """Mixed into vLLM's worker."""


WeightTransferEngineFactory.register_engine("dockyard-push", PushWeightTransfer)
