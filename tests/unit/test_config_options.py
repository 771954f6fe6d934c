"""Typed options: what is accepted, what is refused, and whether the message says what to type."""

from dataclasses import dataclass, fields

import pytest
import yaml
from omegaconf import OmegaConf

from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.config.training import TrainerConfig
from rlinf.errors import ConfigError
from rlinf.options import from_mapping, option, override_text, to_mapping, type_name


@dataclass
class Inner:
    rate: float = option(0.5, "A rate.", minimum=0)
    mode: str = option("fast", "A mode.", choices=("fast", "slow"))
    beta: float = option(0.9, "A coefficient.", minimum=0, below=1)
    target: float | None = option(None, "A share.", minimum=0, maximum=1)


@dataclass
class Outer:
    count: int = option(1, "A count.", minimum=1)
    name: str | None = option(None, "A name.")
    sizes: list[int] | None = option(None, "Sizes.")
    scales: list[float] = option([1.0], "Scales.")
    extra: dict[str, int] = option({}, "Anything.")
    flag: bool = option(False, "A flag.")
    inner: Inner = option(Inner(), "Inner.")


def test_missing_keys_take_defaults_and_given_keys_are_kept():
    config = from_mapping(Outer, {"count": 3, "inner": {"mode": "slow"}, "sizes": [1, 2], "extra": {"a": 1}})
    assert config == Outer(count=3, inner=Inner(mode="slow"), sizes=[1, 2], extra={"a": 1})
    assert from_mapping(Outer, {}) == Outer()


def test_defaults_are_not_shared_between_instances():
    first = from_mapping(Outer, {})
    first.extra["a"] = 1
    first.inner.rate = 9.0
    first.scales.append(2.0)
    assert from_mapping(Outer, {}) == Outer() and Outer().inner.rate == 0.5


def test_integers_become_floats_and_nothing_else_is_converted():
    config = from_mapping(Outer, {"inner": {"rate": 2}, "scales": [1, 2.5]})
    assert isinstance(config.inner.rate, float) and config.scales == [1.0, 2.5]
    assert all(isinstance(scale, float) for scale in config.scales)


@pytest.mark.parametrize(
    ("mapping", "fragments"),
    [
        ({"cuont": 3}, ["cuont", "Did you mean 'count'", "Set count=3"]),
        ({"inner": {"rat": 0.1}}, ["inner.rat", "Set inner.rate=0.1"]),
        ({"count": "3"}, ["count is '3' (str)", "required: int", "count=1"]),
        ({"count": 3.0}, ["required: int"]),
        ({"count": True}, ["required: int"]),
        ({"flag": 1}, ["required: bool"]),
        ({"count": 0}, ["count is 0", "at least 1"]),
        ({"inner": {"rate": -0.1}}, ["inner.rate is -0.1", "at least 0"]),
        ({"inner": {"rate": float("nan")}}, ["inner.rate is nan"]),
        ({"scales": [1.0, float("nan")]}, ["scales is [1.0,nan]", "finite numbers"]),
        ({"size": 3}, ["Set 'sizes=[3]'"]),
        ({"inner": {"beta": 1.0}}, ["inner.beta is 1.0", "at least 0 and below 1", "Set e.g. inner.beta=0.9"]),
        ({"inner": {"target": 1.5}}, ["inner.target is 1.5", "at least 0 and at most 1", "inner.target=null"]),
        ({"inner": {"target": -1}}, ["inner.target is -1.0"]),
        ({"inner": {"target": float("nan")}}, ["inner.target is nan"]),
        ({"inner": {"mode": "fats"}}, ["one of fast, slow", "Set inner.mode=fast"]),
        ({"inner": {"mode": None}}, ["inner.mode is 'null'"]),
        ({"inner": 3}, ["inner is '3'", "section with the keys rate, mode, beta, target"]),
        ({"sizes": "12"}, ["sizes is '12'", "list of int or null"]),
        ({"sizes": [1, "a"]}, ["sizes is '[1,a]'"]),
        ({"scales": None}, ["required: list of float"]),
    ],
)
def test_wrong_values_are_refused_with_value_requirement_and_override(mapping, fragments):
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, mapping)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_bounds_are_accepted_where_they_include_the_number():
    for values in ({"target": None}, {"target": 0}, {"target": 1}, {"beta": 0}, {"beta": 0.999}):
        from_mapping(Outer, {"inner": values})


def test_discount_belongs_to_ppo():
    assert build_config({"algorithm": {"name": "ppo", "gamma": 1}}).algorithm.gamma == 1.0
    with pytest.raises(ConfigError, match="algorithm.gamma"):
        build_config({"algorithm": {"name": "grpo", "gamma": 1.0}})


def test_omegaconf_mappings_are_resolved():
    config = from_mapping(Outer, OmegaConf.create({"count": 4, "name": "n${count}"}))
    assert config.name == "n4"
    with pytest.raises(ConfigError, match="nope"):
        from_mapping(Outer, OmegaConf.create({"name": "${nope}"}))


def test_whole_configuration_survives_mapping_and_yaml():
    config = build_config({"model": {"init_config": {"a": [1, {"b": None}]}}, "env": {"name": "tabletop"}, "seed": 7})
    text = yaml.safe_dump(to_mapping(config))
    assert build_config(yaml.safe_load(text)) == config
    assert build_config(to_mapping(config)) == config


def test_override_text_is_what_the_command_line_reads():
    assert [override_text(value) for value in (None, True, [1, 2], 0.5, "a")] == ["null", "true", "[1,2]", "0.5", "a"]


def test_type_names_are_words():
    assert type_name(list[int] | None) == "list of int or null"
    assert type_name(dict[str, int]) == "section of any keys"


def test_every_field_of_the_configuration_is_documented():
    def undocumented(cls, path):
        import dataclasses
        import typing

        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if not field.metadata.get("help", "").strip().endswith("."):
                yield f"{path}.{field.name}"
            if dataclasses.is_dataclass(hints[field.name]):
                yield from undocumented(hints[field.name], f"{path}.{field.name}")

    assert list(undocumented(RunConfig, "")) == []


def test_what_to_do_at_a_collapse_may_stand_in_a_yaml_file():
    """YAML reads words like ``off`` as booleans."""
    choices = next(one for one in fields(TrainerConfig) if one.name == "on_collapse").metadata["choices"]
    for choice in choices:
        read = OmegaConf.to_container(OmegaConf.create(f"on_collapse: {choice}"))
        assert from_mapping(TrainerConfig, read).on_collapse == choice
    with pytest.raises(ConfigError, match="on_collapse"):
        from_mapping(TrainerConfig, OmegaConf.to_container(OmegaConf.create("on_collapse: off")))


@pytest.mark.parametrize(("words", "message"), [
    (["algorithm.gamma=1.01"], "algorithm.gamma is 1.01; required: at least 0 and at most 1"),
    (["algorithm.gae_lambda=1.5"], "algorithm.gae_lambda is 1.5"),
    (["algorithm.dual_clip=0.5"], "algorithm.dual_clip is 0.5"),
    (["algorithm.value_clip_range=-0.1"], "algorithm.value_clip_range is -0.1"),
    (["trainer.adam_beta1=1.0"], "trainer.adam_beta1 is 1.0"),
    (["trainer.adam_beta2=1"], "trainer.adam_beta2 is 1"),
    (["trainer.target_success_rate=80"], "trainer.target_success_rate is 80"),
    (["sft.time_limit_s=-1"], "sft.time_limit_s is -1"),
    (["env.success_bonus=nan"], "env.success_bonus is nan"),
    (["trainer.learning_rate=0"], "at least 1e-12 and at most 1"),
    (["sft.learning_rate=0"], "at least 1e-12 and at most 1"),
    (["algorithm=td3", "algorithm.target_noise_std=1e21"], "at least 0 and at most 10"),
    (["cluster.env_nodes=1000000000000000000000"], "at least 0 and at most 4096"),
    (["seed=[1,2]"], "Set e.g. seed=1, or -m seed=1,2 for one run of each"),
])  # fmt: skip
def test_numbers_out_of_bounds_are_refused_with_a_value_that_works(words, message):
    with pytest.raises(ConfigError) as error:
        build_config(compose_config(words))
    assert message in str(error.value)
