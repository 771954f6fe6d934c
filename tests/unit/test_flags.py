"""Flags of other code: true, false, 0 and 1 in any form, and nothing else."""

import numpy as np
import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.flags import flag_of, flags_of, number_of

YES = [
    True,
    1,
    1.0,
    np.True_,
    np.int8(1),
    np.float32(1),
    np.array(True),
    np.array([1]),
    np.array([[1.0]]),
    [True],
    torch.tensor([1]),
]
NO = [False, 0, 0.0, -0.0, np.False_, np.uint8(0), np.array(0.0), np.array([False]), torch.tensor(False)]
NONE = [None, float("nan"), np.nan, np.inf, "true", "no", "", b"1", 2, -1, 0.5, np.float32(1e-9), [], [True, True], np.zeros(2), {}, object(),
        np.array(["1"]), np.array([None]), [[1], [1, 0]], 1j, torch.ones((), requires_grad=True)]  # fmt: skip


def test_flags_are_true_false_0_and_1():
    assert [flag_of(value, "x") for value in YES] == [True] * len(YES)
    assert [flag_of(value, "x") for value in NO] == [False] * len(NO)
    assert all(type(flag_of(value, "x")) is bool for value in YES)


@pytest.mark.parametrize("value", NONE, ids=map(str, range(len(NONE))))
def test_anything_else_is_refused_by_name_and_value(value):
    with pytest.raises(ConfigError, match="^`won` of env.id=Any"):
        flag_of(value, "`won` of env.id=Any")


@pytest.mark.parametrize("values", [[1, 0, np.nan], ["yes", "no", "no"], [True, None, False], [0.0, 0.25, 1.0]])
def test_a_column_with_one_value_that_is_none_is_refused_with_its_place(values):
    with pytest.raises(ConfigError, match="next.success"):
        flags_of(np.array(values), "Column 'next.success'")
    assert (
        flags_of(np.array([1, 0, 1]), "x").tolist()
        == flags_of(np.array([1.0, 0, 1]), "x").tolist()
        == [True, False, True]
    )


def test_a_reward_is_one_number():
    assert [number_of(value, "x") for value in (2, np.float32(0.5), np.array([3]), True)] == [2, 0.5, 3, 1]
    for value in (None, "1", np.zeros(2), [], {}, torch.ones((), requires_grad=True)):
        with pytest.raises(ConfigError, match="^reward"):
            number_of(value, "reward")
