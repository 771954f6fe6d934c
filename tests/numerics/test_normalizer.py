"""Actions between the units of the environment and [-1, 1], by hand."""

import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.models.embodiment.modules.normalizer import (
    ActionNormalizer,
    select_action_stats,
    select_stats,
    unit_range_stats,
)

STATS = {"q01": [2.0, 2.0, -3.0], "q99": [6.0, 6.0, -3.0], "mask": [True, False, True]}


def test_both_directions_by_hand():
    """[2, 6] is [-1, 1]; the second dimension is left as it is; the third has no width."""
    normalizer = ActionNormalizer(STATS)
    units = torch.tensor([[2.0, 0.25, -3.0], [5.0, -0.5, -3.0], [6.0, 1.0, -3.0]])
    normalized = torch.tensor([[-1.0, 0.25, -1.0], [0.5, -0.5, -1.0], [1.0, 1.0, -1.0]])
    for _ in range(2):
        assert normalizer.normalize(units).tolist() == [pytest.approx(row) for row in normalized.tolist()]
        assert normalizer.unnormalize(normalized).tolist() == units.tolist()
    assert normalizer.normalize(units).dtype == normalizer.unnormalize(units).dtype == torch.float64
    # What lies beyond [-1, 1] is kept on the way to the env, and clipped on the way from it, in every dimension.
    assert normalizer.unnormalize(torch.tensor([2.0, 3.0, 0.0])).tolist() == [8.0, 3.0, -3.0]
    assert normalizer.normalize(torch.tensor([[9.0, 4.0, 5.0], [-9.0, -4.0, -5.0]])).tolist() == [[1.0] * 3, [-1.0] * 3]


def test_epsilons_by_hand():
    """Normalising always adds 1e-8 to the width, unnormalising what it is told to."""
    narrow = ActionNormalizer({"q01": [0.0], "q99": [1e-8]})
    assert narrow.normalize(torch.tensor([1e-8], dtype=torch.float64)).tolist() == pytest.approx([0.0], abs=1e-6)
    assert narrow.unnormalize(torch.tensor([1.0])).tolist() == pytest.approx([1e-8])
    wide = ActionNormalizer({"q01": [2.0], "q99": [6.0]}, unnormalize_epsilon=0.5)
    assert wide.unnormalize(torch.tensor([1.0])).tolist() == [6.5]


def test_without_a_mask_every_dimension_is_scaled_between_the_bounds_that_were_named():
    for mask in ({}, {"mask": None}):
        normalizer = ActionNormalizer({"low": [0.0, 10.0], "high": [8.0, 20.0], **mask}, bounds=("low", "high"))
        assert normalizer.unnormalize(torch.tensor([0.5, 0.5])).tolist() == [6.0, 17.5]


def test_what_is_missing_or_does_not_fit_is_refused():
    assert ActionNormalizer(STATS, action_dim=3) and ActionNormalizer(STATS, action_dim=None)
    for name in ("q01", "q99"):
        with pytest.raises(ConfigError, match="normalising by q01 and q99 needs both"):
            ActionNormalizer({key: value for key, value in STATS.items() if key != name})
        with pytest.raises(ConfigError, match="length"):
            ActionNormalizer(STATS | {name: [2.0]})
    with pytest.raises(ConfigError, match="length"):
        ActionNormalizer(STATS | {"mask": [True]})
    with pytest.raises(ConfigError, match="action_token_len is 2, but the action statistics have 3"):
        ActionNormalizer(STATS, action_dim=2)
    with pytest.raises(ConfigError, match="q99 < q01"):
        ActionNormalizer(STATS | {"q99": [1.0, 6.0, -3.0]})


def test_statistics_are_chosen_by_the_name_of_their_data_set():
    first, second, third = ({"q01": [-number], "q99": [number]} for number in (1.0, 2.0, 3.0))
    one = {"kitchen": {"action": first}}
    two = one | {"table": {"action": second, "proprio": third}}
    assert select_stats(one, None) == select_stats(two, "kitchen") == {"action": first}
    assert select_stats(two, "table") == {"action": second, "proprio": third}
    assert select_action_stats(two, "table") == second
    with pytest.raises(ConfigError, match="of 2 data sets, .*choose one, e.g. model.unnorm_key=kitchen"):
        select_stats(two, None)
    with pytest.raises(ConfigError, match="of 0 data sets"):
        select_stats({}, None)
    with pytest.raises(ConfigError, match="Unknown model.unnorm_key 'tabel'.*Set model.unnorm_key=table$"):
        select_stats(two, "tabel")
    with pytest.raises(ConfigError, match="Unknown model.unnorm_key 'zzz'.*Set model.unnorm_key=kitchen$"):
        select_stats(two, "zzz")
    for stats in (None, [], "x", {"action": "x"}, {"action": first | {"mask": 5}}):
        with pytest.raises(ConfigError, match="'arm'"):
            select_stats({"arm": stats}, None)


def test_actions_in_unit_range_stay_as_they_are():
    part = {"q01": [-1.0] * 2, "q99": [1.0] * 2, "min": [-1.0] * 2, "max": [1.0] * 2, "mask": [True] * 2}
    assert unit_range_stats(2) == {"unit_range": {"action": part}}
    states = {name: [values[0]] * 3 for name, values in part.items()}
    assert unit_range_stats(2, 3) == {"unit_range": {"action": part, "proprio": states}}
    actions = torch.tensor([0.25, -1.0], dtype=torch.float64)
    assert ActionNormalizer(part).unnormalize(actions).tolist() == [0.25, -1.0]
