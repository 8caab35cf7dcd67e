"""The whole configuration, and the rules that span sections."""

from __future__ import annotations

from pydantic import Field, model_validator

from dockyard_core.loss_config import LossConfig
from dockyard_core.reward import RewardConfig
from dockyard_grpo.config.generation import GenerationSection
from dockyard_grpo.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvaluationSection,
    GrpoSection,
    LoggingSection,
    PolicySection,
    RecoverySection,
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
    recovery: RecoverySection = RecoverySection()
    logging: LoggingSection = LoggingSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        if self.policy.model is None:
            raise ValueError("policy.model is required, got null; give a directory or a hub id: policy.model=DIR")
        if self.data.train is None:
            raise ValueError("data.train is required, got null; give a JSONL of tasks: data.train=TASKS.jsonl")
        self._check_lengths()
        if self.loss.proximal == "given" and self.grpo.updates_per_batch == 1:
            raise ValueError(
                "loss.proximal='given' differs from 'current' only after a batch's first update, and "
                "grpo.updates_per_batch is 1; set loss.proximal=current"
            )
        if self.loss.proximal == "current" and self.grpo.updates_per_batch > 1:
            raise ValueError(
                f"grpo.updates_per_batch={self.grpo.updates_per_batch} needs logprobs from before the first update, "
                "got loss.proximal=current; set it to given"
            )
        self._check_ranks()
        if self.evaluation.every_steps is not None and self.data.validation is None:
            raise ValueError(
                f"evaluation.every_steps={self.evaluation.every_steps} needs held-out tasks, got data.validation=null; "
                "set data.validation=TASKS.jsonl"
            )
        if self.reward.overlong_buffer_tokens > self.generation.max_new_tokens:
            raise ValueError(
                "reward.overlong_buffer_tokens must be <= generation.max_new_tokens "
                f"({self.generation.max_new_tokens}), got {self.reward.overlong_buffer_tokens}; lower it"
            )
        if self.sandbox.token_file is not None and self.sandbox.url is None:
            raise ValueError(
                f"sandbox.token_file={self.sandbox.token_file} is for a server of yours, got sandbox.url=null; "
                "set sandbox.url, or leave the token out"
            )
        if self.grpo.max_replaced_per_step is not None and not self.grpo.dynamic_sampling:
            raise ValueError(
                f"grpo.max_replaced_per_step={self.grpo.max_replaced_per_step} bounds dynamic sampling, got "
                "grpo.dynamic_sampling=false; set it to true, or leave the bound out"
            )
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.generation.backend != "vllm" and getattr(self.generation, key) > 1:
                raise ValueError(
                    f"generation.{key}={getattr(self.generation, key)} needs generation.backend=vllm, "
                    f"got {self.generation.backend}; set it to 1, raise generation.num_engines"
                )
        if self.generation.backend == "sglang":
            self._check_sglang()
        return self

    def _check_ranks(self) -> None:
        policy = self.policy
        if self.num_trainer_devices % policy.tensor_parallel_size:
            per_rank = self.num_trainer_devices // policy.num_ranks
            devices = f"policy.num_ranks{' x cluster.trainer_gpus' * (per_rank > 1)} = {self.num_trainer_devices}"
            raise ValueError(
                f"policy.tensor_parallel_size must divide {devices}, got {policy.tensor_parallel_size}; raise "
                "policy.num_ranks to a multiple of it"
            )
        if policy.backend == "torch" and policy.lora_rank is not None and policy.tensor_parallel_size > 1:
            raise ValueError(
                f"policy.lora_rank needs policy.tensor_parallel_size=1, got {policy.tensor_parallel_size}; "
                "shard over data ranks instead, or set policy.backend=jax"
            )
        if policy.cpu_offload and policy.num_ranks == policy.tensor_parallel_size:
            raise ValueError(
                "policy.cpu_offload needs several data-parallel ranks, got 1; use policy.optimizer_offload"
            )

    def _check_sglang(self) -> None:
        generation, sglang = self.generation, self.generation.sglang
        if sglang.python is None and sglang.url is None:
            raise ValueError(
                "generation.backend=sglang needs an interpreter with SGLang, got generation.sglang.python=null; make "
                "one with `python tools/sglang_env.py VENV` and set generation.sglang.python=VENV/bin/python"
            )
        if sglang.url is not None and generation.num_engines > 1:
            raise ValueError(
                f"generation.sglang.url={sglang.url} is one engine, got generation.num_engines="
                f"{generation.num_engines}; set it to 1, or set generation.sglang.python"
            )
        if generation.per_request_seeds and not sglang.server_args.get("enable_deterministic_inference"):
            raise ValueError(
                "generation.per_request_seeds=true is what SGLang ignores on a CPU, got generation.backend=sglang; "
                "set it to false, or choose another backend"
            )

    def _check_lengths(self) -> None:
        generation, policy = self.generation, self.policy
        room = generation.max_model_len - generation.max_new_tokens
        if self.max_prompt_tokens > room:
            raise ValueError(
                f"data.max_prompt_tokens must be <= generation.max_model_len - max_new_tokens = {room}, "
                f"got {self.max_prompt_tokens}; raise generation.max_model_len"
            )
        row = max(policy.row_length or 0, generation.max_model_len)
        if policy.micro_batch_tokens < row:
            source = "policy.row_length" if row == policy.row_length else "generation.max_model_len"
            raise ValueError(
                f"policy.micro_batch_tokens must hold a row of {source} = {row} tokens, got "
                f"{policy.micro_batch_tokens}; raise it"
            )
        if self.refit.probe_tokens >= generation.max_model_len:
            raise ValueError(
                f"refit.probe_tokens must be < generation.max_model_len ({generation.max_model_len}), "
                f"got {self.refit.probe_tokens}; lower it"
            )

    @property
    def num_trainer_devices(self) -> int:
        """Of all trainer ranks: PyTorch takes one in each, JAX all GPUs that a rank has."""
        per_rank = self.cluster.trainer_gpus or 1 if self.policy.backend == "jax" else 1
        return self.policy.num_ranks * per_rank

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
