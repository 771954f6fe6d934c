"""Where the action statistics of a policy come from when no checkpoint of ours brings them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.training.policy_loading import statistics_of_env

STATISTICS = {"action": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}}


class Env:
    """What is asked of an env here."""

    def action_statistics(self):
        return STATISTICS


def config_of(**model) -> RunConfig:
    config = build_config(compose_config(["model=mlp", "env=tabletop"]))
    return replace(config, model=replace(config.model, **model))


def test_random_weights_take_those_of_the_env():
    assert statistics_of_env(config_of(), Env()) == {"norm_stats": {"tabletop": STATISTICS}}


@pytest.mark.parametrize(
    ("unnorm_key", "in_folder", "taken"),
    [("tabletop", "other", True), ("tabletop", "tabletop", False), ("other", "other", False), (None, "other", False)],
)
def test_a_folder_keeps_its_own_unless_it_is_adapted_to_the_env(tmp_path, unnorm_key, in_folder, taken):
    settings = {"model_type": "mlp", "state_dim": 31, "norm_stats": {in_folder: STATISTICS}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found = statistics_of_env(config_of(model_path=str(tmp_path), init_config={}, unnorm_key=unnorm_key), Env())
    assert found == ({"norm_stats": {"tabletop": STATISTICS}} if taken else None)
