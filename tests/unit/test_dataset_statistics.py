"""Statistics that models normalise by: those of the rows, and usable where a column hardly varies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.data.statistics import MIN_SHARE, normalization_statistics, vector_statistics
from rlinf.models.embodiment.modules.action_tokenizer import ActionTokenizer
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer
from rlinf.models.embodiment.pi0_processing import StatisticsNormalizer

NUM_ROWS = 2000


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """A column that varies, a gripper that closes in 0.5 % of the rows, a constant, and a constant with noise of float32."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(NUM_ROWS, 4)).astype(np.float32)
    values[:, 1] = -1
    values[:10, 1] = 1
    values[:, 2] = 1
    values[:, 3] = 1 + 1e-6 * rng.normal(size=NUM_ROWS)
    return values


def test_columns_that_vary_keep_the_statistics_of_their_rows(rows):
    found, exact = normalization_statistics(rows[:, :1], None)["action"], vector_statistics(rows[:, :1])
    assert {name: found[name] for name in ("q01", "q99", "min", "max", "mean", "std")} == {
        name: exact[name].tolist() for name in ("q01", "q99", "min", "max", "mean", "std")
    }
    assert found["mask"] == [True]


def test_a_column_that_rarely_moves_takes_its_range_and_a_constant_the_range_1(rows):
    found, exact = normalization_statistics(rows, None)["action"], vector_statistics(rows)
    assert exact["q01"][1] == exact["q99"][1] == -1, "the quantiles of the rows themselves are of no use"
    assert (found["q01"][1], found["q99"][1], found["min"][1], found["max"][1]) == (-1, 1, -1, 1)
    assert found["std"][1] == exact["std"][1] > MIN_SHARE * 2
    for column in (2, 3):
        assert found["q01"][column] == pytest.approx(0.5, abs=1e-5) and found["q99"][column] == pytest.approx(
            1.5, abs=1e-5
        )
        assert found["std"][column] == 1 and found["min"][column] == exact["min"][column]
    once = np.zeros((10**5, 1), np.float32)
    once[0] = 1
    assert normalization_statistics(once, None)["action"]["std"] == [MIN_SHARE]


@pytest.mark.parametrize("use_quantiles", [True, False])
def test_no_input_and_no_label_of_pi0_is_far_from_1(rows, use_quantiles):
    """0.9 where demonstrations always had 1, and the label of the closing gripper."""
    seen = torch.tensor([[0.0, 1.0, 0.9, 0.9]])

    def normalized(statistics: dict) -> torch.Tensor:
        return StatisticsNormalizer(statistics, 4, use_quantiles, "proprio").normalize(seen)

    usable = normalized(normalization_statistics(rows, rows)["proprio"])
    assert usable.abs().max() < 20
    if use_quantiles:
        assert usable[0, 1] == pytest.approx(1, abs=1e-5)
    exact = {name: values.tolist() for name, values in vector_statistics(rows).items()}
    assert normalized(exact).abs().max() > 1e4, "the statistics of the rows themselves are told apart"


def test_openvla_tokens_decode_to_the_demonstrated_actions(rows):
    tokenizer, actions = ActionTokenizer(256, 1000), torch.from_numpy(rows[[0, -1]])

    def decoded(statistics: dict) -> torch.Tensor:
        normalizer = ActionNormalizer(statistics)
        return normalizer.unnormalize(tokenizer.decode(tokenizer.encode(normalizer.normalize(actions)))).float()

    found = decoded(normalization_statistics(rows, None)["action"])
    torch.testing.assert_close(found[:, 1:], actions[:, 1:], atol=0.01, rtol=0)
    exact = {name: values.tolist() for name, values in vector_statistics(rows).items()}
    assert abs(decoded(exact)[0, 1] - 1) > 1, "by the quantiles of the rows the gripper would never close"
