"""Rows keep their block when a shape has room for more: tokens stay where there are slots for them."""

import numpy as np
import pytest

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_trainer_jax.layout import PackedPlan
from dockyard_trainer_jax.shapes import Shapes


@pytest.mark.parametrize("more", [{}, {"num_rows": 40}, {"num_rows": 24, "row_length": 20}])
def test_every_token_has_a_slot_in_the_block_of_its_row(more) -> None:
    mask = np.arange(16) >= 1
    made = [
        TrainSequence(
            token_ids_T=np.arange(16) + 16 * number,
            loss_mask_T=mask,
            sampled_logprobs_T=np.zeros(16, np.float32),
            advantage=1.0,
        )
        for number in range(18)
    ]
    (micro_batch,) = pack_batch(made, micro_batch_tokens=18 * 16, keep_groups=False)[0].micro_batches
    assert micro_batch.shape == (18, 16)
    plan = PackedPlan(micro_batch, num_blocks=2)
    shape = Shapes().fit(plan.needed)
    assert shape.num_rows > plan.needed.num_rows, "nine rows of a block are padded to ten"
    laid_out = plan.laid_out(shape._replace(**more))
    token_ids_FN = laid_out.batch.inputs.token_ids_BL.reshape(2, -1)
    for token_ids_N, block in zip(token_ids_FN, range(2), strict=True):
        is_token_M = laid_out.batch.mask_FM[block]
        predictors_M = laid_out.batch.predictors_FU[block]
        assert len(set(predictors_M)) == len(predictors_M)
        np.testing.assert_array_equal(
            token_ids_N[predictors_M[is_token_M] + 1], laid_out.batch.target_ids_FU[block][is_token_M]
        )
    targets_FM = laid_out.batch.target_ids_FU.astype(np.float32)
    np.testing.assert_array_equal(
        laid_out.unpadded(targets_FM, micro_batch.shape),
        np.where(micro_batch.loss_mask_BL, micro_batch.token_ids_BL, 0),
    )
