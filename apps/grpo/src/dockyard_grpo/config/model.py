"""The whole configuration, and the rules that span sections."""

from __future__ import annotations

from pydantic import Field, model_validator

from dockyard_core.loss_config import LossConfig
from dockyard_core.reward import RewardConfig
from dockyard_grpo.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvaluationSection,
    GenerationSection,
    GrpoSection,
    LoggingSection,
    PolicySection,
    RefitSection,
    RunSection,
    SandboxSection,
    Section,
)


class Config(Section):
    """Every value of a run; loading its dump reproduces the run."""

    policy: PolicySection = PolicySection()
    generation: GenerationSection = GenerationSection()
    sandbox: SandboxSection = SandboxSection()
    grpo: GrpoSection = GrpoSection()
    loss: LossConfig = Field(default_factory=LossConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    data: DataSection = DataSection()
    evaluation: EvaluationSection = EvaluationSection()
    cluster: ClusterSection = ClusterSection()
    checkpoint: CheckpointSection = CheckpointSection()
    refit: RefitSection = RefitSection()
    logging: LoggingSection = LoggingSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        if self.policy.model is None:
            raise ValueError("policy.model is required, got null; give a directory or a hub id: policy.model=DIR")
        if self.data.train is None:
            raise ValueError("data.train is required, got null; give a JSONL of tasks: data.train=TASKS.jsonl")
        if self.max_prompt_tokens < 1:
            raise ValueError(
                f"no token is left for the prompt: generation.max_model_len {self.generation.max_model_len} - "
                f"max_new_tokens {self.generation.max_new_tokens}; raise generation.max_model_len"
            )
        room = self.generation.max_model_len - self.generation.max_new_tokens
        if self.max_prompt_tokens > room:
            raise ValueError(
                f"data.max_prompt_tokens must be <= generation.max_model_len - max_new_tokens = {room}, "
                f"got {self.max_prompt_tokens}; raise generation.max_model_len"
            )
        return self

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt, tokens."""
        room = self.generation.max_model_len - self.generation.max_new_tokens
        return self.data.max_prompt_tokens if self.data.max_prompt_tokens is not None else room

    @property
    def max_probe_abs_diff(self) -> float:
        """Mean |engine − trainer| logprob at one version beyond which a refit has failed, nats."""
        if self.refit.max_probe_abs_diff is not None:
            return self.refit.max_probe_abs_diff
        return 1e-3 if self.policy.dtype == "float32" else 0.3
