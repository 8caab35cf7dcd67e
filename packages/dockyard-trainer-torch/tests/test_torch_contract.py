from collections.abc import Sequence
from pathlib import Path

import pytest

from dockyard_core.policy import Policy
from dockyard_core.refit import TensorSpec
from dockyard_core.testing.policy_contract import PolicyContract
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, weight_manifest


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"], scope="class")
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"], scope="class")
class TestTorchPolicyContract(PolicyContract):
    vocab_size = 64
    model_dir: Path

    @pytest.fixture(autouse=True)
    def _model(self, tiny_model, family, is_tied) -> None:
        self.model_dir = tiny_model(family, is_tied=is_tied)

    def make_policy(self) -> Policy:
        config = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0)
        return TorchPolicy.from_pretrained(self.model_dir, config)

    def manifest(self, policy: Policy) -> Sequence[TensorSpec]:
        assert isinstance(policy, TorchPolicy)
        return weight_manifest(policy)
