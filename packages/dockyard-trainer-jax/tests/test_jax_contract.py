from collections.abc import Sequence
from pathlib import Path

import pytest

from dockyard_core.policy import Policy
from dockyard_core.refit import TensorSpec
from dockyard_core.testing.policy_contract import PolicyContract
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, weight_manifest
from dockyard_trainer_jax.shapes import Shape

# What the laws step on and score fits in these: a policy that has met them, as one after a restore has, compiles
# nothing else. One model starts without them.
KNOWN = {Shape(3, 24, 1, 40), Shape(8, 16, 1, 48, num_prefixes=2, prefix_length=8, num_distinct=48)}
FRESH = ("llama", False)


def models() -> list:
    every = [(family, is_tied) for family in ("qwen2", "qwen3", "llama") for is_tied in (True, False)]
    # Each model is compiled for; the others are left to CI.
    marks = {model: () if model == ("qwen2", True) else pytest.mark.ci for model in every}
    return [pytest.param(*model, marks=marks[model]) for model in every]


@pytest.mark.parametrize(("family", "is_tied"), models(), scope="class")
class TestJaxPolicyContract(PolicyContract):
    vocab_size = 64
    model_dir: Path
    known: set[Shape]

    @pytest.fixture(autouse=True)
    def _model(self, tiny_model, family, is_tied) -> None:
        self.model_dir = tiny_model(family, is_tied=is_tied)
        self.known = set() if (family, is_tied) == FRESH else KNOWN

    def make_policy(self) -> Policy:
        config = JaxPolicyConfig(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0)
        policy = JaxPolicy.from_pretrained(self.model_dir, config)
        for shapes in (policy._shapes, policy._scored_shapes):
            shapes.known |= self.known
        return policy

    def manifest(self, policy: Policy) -> Sequence[TensorSpec]:
        assert isinstance(policy, JaxPolicy)
        return weight_manifest(policy)
