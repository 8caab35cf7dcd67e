"""A real engine that takes its time over each token, so that refits find requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dockyard_inference import TransformersConfig, TransformersGenerator

_TOKEN_S = 0.08


class SlowGenerator(TransformersGenerator):
    """`generation.backend=slow_engine:SlowGenerator`, with this folder on PYTHONPATH."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(TransformersConfig.model_validate(dict(values)))

    async def _step(self, cohort: Any) -> None:
        await asyncio.sleep(_TOKEN_S / len(self._cohorts))
        await super()._step(cohort)
