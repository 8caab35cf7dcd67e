"""Inference engines behind one interface, with an attested in-flight weight refit.

Importing this package imports no engine and no torch.
"""

from dockyard_inference.registry import BACKENDS, load_generator
from dockyard_inference.sender import RefitSender, SendReport, null_sink
from dockyard_inference.sglang_engine.config import SglangConfig
from dockyard_inference.sglang_engine.generator import SglangGenerator
from dockyard_inference.transformers_engine.config import TransformersConfig
from dockyard_inference.transformers_engine.generator import TransformersGenerator
from dockyard_inference.vllm_engine.config import VllmConfig
from dockyard_inference.vllm_engine.generator import VllmGenerator

__all__ = [
    "BACKENDS",
    "RefitSender",
    "SendReport",
    "SglangConfig",
    "SglangGenerator",
    "TransformersConfig",
    "TransformersGenerator",
    "VllmConfig",
    "VllmGenerator",
    "load_generator",
    "null_sink",
]
