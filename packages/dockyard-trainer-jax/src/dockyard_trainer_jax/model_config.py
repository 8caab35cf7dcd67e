"""What config.json says about a decoder, as a closed record; what the decoder cannot compute is refused here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dockyard_core.errors import ConfigError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of the families whose outputs and gradients are tested."""

_QWEN3_HEAD_DIM = 128  # what the family means when config.json does not say


class Llama3Rope(BaseModel):
    """Stretches the rotary embedding to longer contexts: low frequencies are divided, high ones left alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    factor: float = Field(gt=0.0)
    low_freq_factor: float = Field(gt=0.0)
    high_freq_factor: float = Field(gt=0.0)
    original_max_position_embeddings: int = Field(ge=1)

    @model_validator(mode="after")
    def _refuse_an_empty_band(self) -> Llama3Rope:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be > low_freq_factor, got {self.high_freq_factor} <= {self.low_freq_factor}; "
                "take both from the published config.json"
            )
        return self


class MoeConfig(BaseModel):
    """Mixture of experts in place of every block's MLP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: int = Field(ge=1)
    num_experts_per_tok: int = Field(ge=1)
    moe_intermediate_size: int = Field(ge=1)
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""

    @model_validator(mode="after")
    def _refuse_too_many_per_token(self) -> MoeConfig:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be <= num_experts, got {self.num_experts_per_tok} > {self.num_experts}; "
                "correct config.json"
            )
        return self


class ModelConfig(BaseModel):
    """Everything that decides a decoder's parameters and what it computes; names as in config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model_type: Family
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    rms_norm_eps: float = Field(gt=0.0)
    rope_theta: float = Field(gt=0.0)
    llama3_rope: Llama3Rope | None = None
    tie_word_embeddings: bool
    attention_bias: bool = False
    """A bias on all four projections. Qwen2 has one on three of them whatever this says."""
    mlp_bias: bool = False
    moe: MoeConfig | None = None

    @model_validator(mode="after")
    def _refuse_uneven_groups(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads = {self.num_attention_heads}, got "
                f"{self.num_key_value_heads}; correct config.json"
            )
        return self

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def has_head_norms(self) -> bool:
        """Whether each head of the queries and keys is normalised."""
        return self.model_type in ("qwen3", "qwen3_moe")


def read_config(model_dir: Path) -> ModelConfig:
    """The record of a directory's config.json.

    Raises ConfigError for a directory without one, another family, or anything else this package does not compute.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"policy.model has no config.json, got {str(model_dir)!r}; point it at a saved Hugging Face model"
        )
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"policy.model needs a readable config.json, got {str(path)!r} ({error}); "
            "save it again with save_pretrained"
        ) from error
    if not isinstance(raw, dict) or raw.get("model_type") not in FAMILIES:
        found = raw.get("model_type") if isinstance(raw, dict) else raw
        raise ConfigError(
            f"policy.model must be of a family {', '.join(FAMILIES)}, got {found!r}; choose a checkpoint of one of them"
        )
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The record of the object in a config.json; ``model_type`` is one of ``FAMILIES``.

    Raises ConfigError for a value that is missing, out of range, or asks for what this package does not compute.
    """
    _refuse_unsupported(raw)
    rope = _rope(raw)
    values = {name: raw[name] for name in _COPIED if raw.get(name) is not None}
    heads = raw.get("num_attention_heads") or 1
    values.setdefault("num_key_value_heads", heads)
    # Qwen2 has no such switch: what a config.json says there is ignored by every other reader too.
    if raw["model_type"] == "qwen2":
        values.pop("attention_bias", None)
    if raw["model_type"] != "llama":
        values.pop("mlp_bias", None)
    if "head_dim" not in values:
        is_fixed = raw["model_type"] == "qwen3"
        values["head_dim"] = _QWEN3_HEAD_DIM if is_fixed else raw.get("hidden_size", 0) // heads
    values.setdefault("rms_norm_eps", 1e-6)
    values.setdefault("tie_word_embeddings", False)
    try:
        moe = _moe(raw) if raw["model_type"] == "qwen3_moe" else None
        llama3 = Llama3Rope(**{name: rope.get(name) for name in Llama3Rope.model_fields}) if _is_llama3(rope) else None
        return ModelConfig(**values, rope_theta=rope["rope_theta"], llama3_rope=llama3, moe=moe)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"config.json of policy.model: {where or 'value'}: {first['msg']}, got {first['input']!r}; "
            "correct it, or save the model again with save_pretrained"
        ) from error


def check_divides(config: ModelConfig, *, fsdp: int, tp: int) -> None:
    """Raise ConfigError unless every dimension that the table of `sharding` deals can be dealt evenly."""
    dealt_over_tp = ["num_attention_heads", "num_key_value_heads", "vocab_size"]
    sizes = {name: getattr(config, name) for name in ("hidden_size", *dealt_over_tp)}
    if config.moe is None:
        sizes["intermediate_size"] = config.intermediate_size
        dealt_over_tp.append("intermediate_size")
    else:
        sizes["moe_intermediate_size"] = config.moe.moe_intermediate_size
        dealt_over_tp.append("moe_intermediate_size")
    for name in dealt_over_tp:
        _check(f"the model's {name}", sizes[name], "tensor_parallel_size", tp)
    _check("the model's hidden_size", sizes["hidden_size"], "fsdp_size", fsdp)


def _check(what: str, size: int, axis: str, num_devices: int) -> None:
    if size % num_devices:
        raise ConfigError(f"{axis} must divide {what} = {size}, got {num_devices}; lower it")


_COPIED = tuple(name for name in ModelConfig.model_fields if name not in ("rope_theta", "llama3_rope", "moe"))


def _moe(raw: Mapping[str, Any]) -> MoeConfig:
    num_experts = raw.get("num_experts", raw.get("num_local_experts"))
    rest = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return MoeConfig(num_experts=num_experts, **{name: raw[name] for name in rest if name in raw})


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's settings, from either of the two places where config.json has had them."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = {"rope_theta": raw.get("rope_theta", 10_000.0), **given}
    rope["rope_type"] = given.get("rope_type", given.get("type", "default"))
    if rope["rope_type"] not in ("default", "llama3"):
        _refuse("rope_type must be 'default' or 'llama3'", rope["rope_type"])
    if (share := rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        _refuse("partial_rotary_factor must be 1.0", share)
    return rope


def _is_llama3(rope: Mapping[str, Any]) -> bool:
    return bool(rope["rope_type"] == "llama3")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        _refuse("hidden_act must be 'silu'", activation)
    if raw.get("quantization_config"):
        _refuse("quantization_config must be absent", raw["quantization_config"])
    kinds = raw.get("layer_types")
    if kinds is None and raw.get("use_sliding_window"):
        _refuse("use_sliding_window must be false", True)
    if other := set(kinds or ()) - {"full_attention"}:
        _refuse("layer_types must all be 'full_attention'", sorted(other))
    if raw["model_type"] == "qwen3_moe":
        if raw.get("use_sliding_window"):
            _refuse("use_sliding_window must be false", True)
        if raw.get("mlp_only_layers"):
            _refuse("mlp_only_layers must be empty (every block has the same shape)", raw["mlp_only_layers"])
        if (step := raw.get("decoder_sparse_step", 1)) != 1:
            _refuse("decoder_sparse_step must be 1 (every block has the same shape)", step)


def _refuse(rule: str, value: object) -> NoReturn:
    raise ConfigError(
        f"config.json of policy.model: {rule}, got {value!r}; choose another checkpoint, or train it with "
        "policy.backend=torch"
    )
