import pytest
from pydantic import ValidationError

from dockyard_core.loss_config import LossConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "zero expected gradient"),
        ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_gradient": "score"}, "counts the gradient twice"),
        ({"clip_low": 1.0}, "clip_low must be < 1"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1"),
        ({"variant": "gspo"}, "needs its own clip range"),
        ({"variant": "gspo", "clip_low": 3e-4}, "needs its own clip range"),
        ({"variant": "cispo", "dual_clip": 3.0}, "dual_clip acts on"),
        ({"variant": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "dr_grpo"}, "use 'sequence'"),
        ({"aggregation": "dr_grpo"}, "divides by max_tokens"),
        ({"correction_low": 3.0}, "correction_low must be <="),
        ({"seq_low": 3.0}, "seq_low must be <="),
        ({"kl_coef": float("nan")}, "finite"),
        ({"clip_ratio": 0.2}, "Extra inputs"),
    ],
)
def test_misleading_settings_are_refused(options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(**options)


def test_bypass_forces_the_correction_off_and_gspo_the_mean_over_sequences() -> None:
    assert LossConfig(proximal="bypass", correction="tis").effective_correction == "none"
    assert LossConfig(variant="gspo", clip_low=3e-4, clip_high=4e-4).effective_aggregation == "sequence"


@pytest.mark.parametrize(
    ("options", "can_skip"), [({}, True), ({"kl_coef": 0.1}, False), ({"entropy_coef": 0.1}, False)]
)
def test_zero_advantage_rows_may_be_left_out_only_without_kl_and_entropy(options, can_skip) -> None:
    assert LossConfig(**options).can_skip_zero_advantage is can_skip


def test_a_dumped_config_reads_back_equal() -> None:
    config = LossConfig(variant="gspo", clip_low=3e-4, clip_high=4e-4, kl_coef=0.1)
    assert LossConfig.model_validate_json(config.model_dump_json()) == config
