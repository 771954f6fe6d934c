"""Statistics that models normalise by: those of the rows, and usable where a column hardly varies."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.data.statistics import MIN_FRACTION, ImageStatistics, normalization_statistics, vector_statistics
from rlinf.data.stored import DatasetInfo, StoredDemonstrations
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer
from rlinf.models.embodiment.modules.tokenizer import ActionTokenizer
from rlinf.models.embodiment.pi0.processing import StatisticsNormalizer

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


def test_statistics_of_rows_by_hand():
    """0, 1 ... 100, and twice that in the other order; the population's variance of 0 ... n - 1 is (n^2 - 1) / 12."""
    counted = np.arange(101, dtype=np.float32)
    found = vector_statistics(np.stack([counted, 2 * counted[::-1]], axis=1))
    expected = {"min": 0, "max": 100, "mean": 50, "std": 850**0.5, "q01": 1, "q10": 10, "q50": 50, "q90": 90, "q99": 99}
    assert found.pop("count").tolist() == [101]
    assert {name: values.tolist() for name, values in found.items()} == {
        name: pytest.approx([number, 2 * number], rel=1e-6) for name, number in expected.items()
    }
    assert found["min"].dtype == found["max"].dtype == np.float32 and found["mean"].dtype == np.float64


def test_statistics_of_images_by_hand():
    """Per image 100 pixels of three channels: levels 0 ... 99, 200 everywhere, and half 10, half 255.

    A quantile is the smallest level whose cumulative share reaches it: of 100 levels the tenth, 9, reaches 0.1.
    """
    pixels = np.stack([np.arange(100), np.full(100, 200), np.repeat([10, 255], 50)], axis=-1).astype(np.uint8)
    statistics, other = ImageStatistics(), ImageStatistics()
    statistics.add(pixels.reshape(1, 20, 5, 3))
    expected = {
        "min": [0, 200, 10], "max": [99, 200, 255], "mean": [49.5, 200, 132.5], "std": [833.25**0.5, 0, 122.5],
        "q01": [0, 200, 10], "q10": [9, 200, 10], "q50": [49, 200, 10], "q90": [89, 200, 255], "q99": [98, 200, 255],
    }  # fmt: skip
    for count in (1, 3):
        found = statistics.result()
        assert found.pop("count").tolist() == [count]
        for name, levels in expected.items():
            assert found[name].shape == (3, 1, 1)
            # A variance of 0 is what is left of numbers near 0.6.
            assert found[name].ravel() * 255 == pytest.approx(levels, abs=1e-4), name
        assert found.keys() == expected.keys()
        other.add(np.concatenate([pixels.reshape(1, 10, 10, 3)] * 2))
        statistics.merge(other)


def test_merged_statistics_are_those_of_both():
    """One pixel of level 51, which is 0.2, and three white ones: variance 0.36 / 4 + 3 x 0.04 / 4."""
    grey, white = ImageStatistics(), ImageStatistics()
    grey.add(np.full((1, 1, 1, 3), 51, np.uint8))
    white.add(np.full((1, 3, 1, 3), 255, np.uint8))
    grey.merge(white)
    found = {name: values.ravel().tolist() for name, values in grey.result().items()}
    assert found.pop("count") == [2]
    quantiles = {"q01": 0.2, "q10": 0.2, "q50": 1, "q90": 1, "q99": 1}
    expected = {"min": 0.2, "max": 1, "mean": 0.8, "std": 0.12**0.5} | quantiles
    assert found == {name: pytest.approx([number] * 3) for name, number in expected.items()}


def test_bounds_of_what_counts_as_constant_and_as_rare_are_themselves_neither():
    """A range of exactly ``MIN_RANGE``; and 998 rows of 50 and 51 between 0 and 100, which are ``MIN_FRACTION`` of the range."""
    narrow = normalization_statistics(np.array([[0.0], [1e-4]]), None)["action"]
    assert narrow["q01"] == pytest.approx([1e-6]) and narrow["q99"] == pytest.approx([9.9e-5])
    assert narrow["std"] == pytest.approx([5e-5])
    gripper = np.array([0.0, 100.0] + [50.0] * 499 + [51.0] * 499)[:, None]
    found = normalization_statistics(gripper, None)["action"]
    assert (found["q01"], found["q99"], found["min"], found["max"]) == ([50.0], [51.0], [0.0], [100.0])
    gripper[gripper == 51.0] = 50.5  # half of that share
    found = normalization_statistics(gripper, None)["action"]
    assert (found["q01"], found["q99"]) == ([0.0], [100.0])


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
    assert found["std"][1] == exact["std"][1] > MIN_FRACTION * 2
    for column in (2, 3):
        assert (found["q01"][column], found["q99"][column]) == pytest.approx((0.5, 1.5), abs=1e-5)
        assert found["std"][column] == 1 and found["min"][column] == exact["min"][column]
    once = np.zeros((10**5, 1), np.float32)
    once[0] = 1
    assert normalization_statistics(once, None)["action"]["std"] == [MIN_FRACTION]


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
    exact["std"] = [max(number, 1e-12) for number in exact["std"]]  # 0 is rejected
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


def moving(count: int = 1000, columns: int = 3) -> np.ndarray:
    """Displacements of at most 0.05, and in the last column a gripper that is closed in a half of the rows."""
    values = np.random.default_rng(1).uniform(-0.05, 0.05, (count, columns)).astype(np.float32)
    values[:, -1] = np.arange(count) % 2
    return values


@pytest.mark.parametrize(
    "count, planted",
    [
        (1000, {(500, 0): 250.0}),
        (1000, {(0, 0): -250.0, (999, 0): 300.0}),
        (1000, {(7, 0): 8.0}),
        (1000, {(7, 2): 250.0}),
        (1000, {(7, 0): 250.0, (8, 0): 250.0, (9, 1): -4e4}),
        (60, {(30, 0): 250.0}),
        (100, {(30, 0): 250.0, (70, 0): 250.0}),
        (20_000, {(row, 0): 100.0 + row for row in range(0, 20_000, 600)}),
    ],
)
def test_a_glitch_costs_a_column_nothing_and_is_named(count, planted, caplog):
    """Statistics equal those of the other rows, so labels keep their bins; other columns keep the bits that they had."""
    clean = moving(count)
    values = clean.copy()
    for place, value in planted.items():
        values[place] = value
    columns = {column for _, column in planted}
    found = normalization_statistics(values, values[:, :1])
    before = normalization_statistics(clean, None)["action"]
    for column in range(values.shape[1]):
        rows = np.delete(clean[:, column : column + 1], [row for row, c in planted if c == column], axis=0)
        wanted = normalization_statistics(rows, None)["action"]
        for name, numbers in found["action"].items():
            assert numbers[column] == pytest.approx(wanted[name][0], rel=1e-12)
            assert column in columns or numbers[column] == before[name][column]
    assert found["proprio"]["q99"][0] == pytest.approx(found["action"]["q99"][0], rel=1e-12)
    tokens = ActionTokenizer(256, 1000).encode(ActionNormalizer(found["action"]).normalize(torch.from_numpy(values)))
    for column in columns - {2}:
        assert len(tokens[:, column].unique()) > min(200, count // 2)
    told = [record.getMessage() for record in caplog.records]
    for column in columns:
        (line,) = [text for text in told if text.startswith(f"column {column} of the action")]
        row = min(row for row, c in planted if c == column)
        assert f"row {row}" in line and f"{planted[row, column]:g}" in line
    assert len(told) == len(columns) + (0 in columns)  # the state has this column, too


def test_a_gripper_is_no_glitch(rows, caplog):
    """It moves in 0.5 % of the rows, in 1 %, whose quantiles are 0.01 and 0.51, in one row or three of 10,000, or with noise.

    The bounds stay the whole range, with a line.
    """
    once, noisy = np.zeros((10_000, 1), np.float32), np.random.default_rng(2).uniform(0, 0.001, (1000, 1))
    once[77], noisy[100:106] = 1, 0.8
    percent = [(np.arange(count) < num_closed)[:, None].astype(float) for count, num_closed in ((1000, 10), (1050, 11))]
    swing = np.random.default_rng(2).uniform(0, 0.001, (10_000, 1))
    swing[100:103, 0] = 0.6, 0.8, 0.6
    cases = [(rows, 1, (-1, 1)), *((values, 0, (0, 1)) for values in (once, *percent))]
    for values, column, bounds in (*cases, *((values, 0, (values.min(), 0.8)) for values in (noisy, swing))):
        caplog.clear()
        found = normalization_statistics(values, None)["action"]
        assert (found["q01"][column], found["q99"][column]) == pytest.approx(bounds)
        (line,) = [record.getMessage() for record in caplog.records]
        row = int(np.argmax(values[:, column] > values[:, column].max() / 2))
        assert line.startswith(f"column {column} of the action: row {row}") and f"{values[row, column]:g}" in line


def test_a_glitch_is_told_once_however_often_statistics_are_asked_for(caplog):
    values, zeros = moving(20), np.zeros(20, np.int64)
    values[7, 0] = 1e6
    info = DatasetInfo(Path("data"), "LeRobotDataset v3.0", 1, {}, {}, "observation.state", 3)
    dataset = StoredDemonstrations(info, {}, None, values, zeros, ["reach"], zeros)
    assert dataset.statistics()["action"] == dataset.statistics()["action"]
    assert ["row 7" in record.getMessage() for record in caplog.records] == [True]
