"""Typed options: what is accepted, what is rejected, and whether the message says what to type."""

import re
import shlex
from dataclasses import dataclass, fields
from functools import reduce
from typing import get_args

import pytest
import yaml
from omegaconf import OmegaConf

from rlinf.cli.play import PlayConfig
from rlinf.cli.run import ExportConfig
from rlinf.commands.convert import ConvertConfig
from rlinf.commands.serve import ServeConfig
from rlinf.config.compose import compose_config
from rlinf.config.overrides import values_of
from rlinf.config.schema import RunConfig, build_config, field_types, section_class
from rlinf.config.training import TrainerConfig
from rlinf.errors import ConfigError
from rlinf.models.embodiment.lerobot.check import PolicyCheckConfig
from rlinf.options import from_mapping, option, to_mapping
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.load import keys_of
from rlinf.recipes.questions import QuestionsConfig
from rlinf.robot.classifier import ClassifierConfig
from rlinf.robot.config import RobotConfig


@dataclass
class Inner:
    rate: float = option(0.5, "A rate.", minimum=0)
    mode: str = option("fast", "A mode.", choices=("fast", "slow"))
    beta: float = option(0.9, "A coefficient.", minimum=0, below=1)
    target: float | None = option(None, "A fraction.", minimum=0, maximum=1)


@dataclass
class Outer:
    count: int = option(1, "A count.", minimum=1)
    name: str | None = option(None, "A name.")
    sizes: list[int] | None = option(None, "Sizes.")
    scales: list[float] = option([1.0], "Scales.")
    extra: dict[str, int] = option({}, "Anything.")
    flag: bool = option(False, "A flag.")
    inner: Inner = option(Inner(), "Inner.")


def test_interpolations_of_a_mapping_are_resolved():
    assert from_mapping(Outer, OmegaConf.create({"count": 4, "name": "n${count}"})).name == "n4"
    with pytest.raises(ConfigError, match="nope"):
        from_mapping(Outer, OmegaConf.create({"name": "${nope}"}))


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
        ({"count": "3"}, ["count is '3' (str)", "expected int", "count=1"]),
        ({"count": True}, ["expected int"]),
        ({"count": 0}, ["count is 0", "at least 1"]),
        ({"inner": {"rate": float("nan")}}, ["inner.rate is nan"]),
        ({"scales": [1.0, float("nan")]}, ["scales is [1.0,nan]", "finite numbers"]),
        ({"size": 3}, ["Set 'sizes=[3]'"]),
        ({"inner": {"beta": 1.0}}, ["inner.beta is 1.0", "at least 0 and below 1", "Set e.g. inner.beta=0.9"]),
        ({"inner": {"target": 1.5}}, ["inner.target is 1.5", "at least 0 and at most 1", "inner.target=null"]),
        ({"inner": {"mode": "fats"}}, ["one of fast, slow", "Set inner.mode=fast"]),
        ({"inner": 3}, ["inner is '3'", "section with the keys rate, mode, beta, target"]),
        ({"sizes": "12"}, ["sizes is '12'", "list of int or null"]),
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


def test_whole_configuration_survives_mapping_and_yaml():
    config = build_config({"model": {"init_config": {"a": [1, {"b": None}]}}, "env": {"name": "tabletop"}, "seed": 7})
    text = yaml.safe_dump(to_mapping(config))
    assert build_config(yaml.safe_load(text)) == config
    assert build_config(to_mapping(config)) == config


def test_what_to_do_at_a_collapse_may_stand_in_a_yaml_file():
    """YAML reads words like ``off`` as booleans."""
    choices = next(one for one in fields(TrainerConfig) if one.name == "on_collapse").metadata["choices"]
    for choice in choices:
        read = OmegaConf.to_container(OmegaConf.create(f"on_collapse: {choice}"))
        assert from_mapping(TrainerConfig, read).on_collapse == choice
    with pytest.raises(ConfigError, match="on_collapse"):
        from_mapping(TrainerConfig, OmegaConf.to_container(OmegaConf.create("on_collapse: off")))


@pytest.mark.parametrize(("words", "message"), [
    (["algorithm.gamma=1.01"], "algorithm.gamma is 1.01; expected at least 0 and at most 1"),
    (["trainer.learning_rate=0"], "at least 1e-12 and at most 1"),
    (["seed=[1,2]"], "Set e.g. seed=1, or -m seed=1,2 for one run of each"),
])  # fmt: skip
def test_numbers_out_of_bounds_are_refused_with_a_value_that_works(words, message):
    with pytest.raises(ConfigError) as error:
        build_config(compose_config(words))
    assert message in str(error.value)


def test_numbers_far_beyond_any_use_are_refused_before_they_overflow_somewhere():
    """Without a maximum of its own an option takes 2**32; each key of the whole configuration is tried with 1e21."""
    for mapping, key in (({"count": 10**21}, "count"), ({"inner": {"rate": 1e21}}, "inner.rate"), ({"sizes": [1, 10**21]}, "sizes"),
                         ({"scales": [-1e21]}, "scales")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^{key} is .*expected at most"):
            from_mapping(Outer, mapping)
    assert from_mapping(Outer, {"count": 2**32, "inner": {"rate": 1e9}}).count == 2**32
    for config in (RunConfig(), RecipeConfig()):
        for key, hint in field_types(config).items():
            number = next((kind(1e21) for kind in (int, float) if kind in (hint, *get_args(hint))), None)
            section, _, name = key.rpartition(".")
            owner = reduce(getattr, section.split(".") if section else [], config)
            if number is not None and owner is not None:
                with pytest.raises(ConfigError, match=f"^{key} is "):
                    from_mapping(type(owner), {name: number}, section)


def test_a_number_for_a_text_gets_the_quotes_to_type():
    with pytest.raises(ConfigError) as error:
        from_mapping(Outer, {"name": 5})
    (typed,) = shlex.split(str(error.value).rpartition("Set e.g. ")[2])
    assert from_mapping(Outer, values_of([typed])).name == "5"


def test_every_path_of_every_command_begins_at_home(monkeypatch, tmp_path):
    """An option whose help speaks of a file or folder to read or write is marked as a path; these speak of them and are names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {
        "experiment_name",
        "timestamp",
        "subset",
        "camera",
        "cameras",
        "state_key",
        "action_key",
        "allow_mismatch",
        "task",
        "wandb_name",
        "page_host",
        "revision",
    }
    classes = [
        RunConfig,
        RecipeConfig,
        QuestionsConfig,
        ConvertConfig,
        ClassifierConfig,
        ExportConfig,
        PlayConfig,
        PolicyCheckConfig,
        RobotConfig,
        ServeConfig,
        *(section_class("env", name) for name in ("gymnasium", "libero")),
        section_class("algorithm", "sac"),
    ]
    unmarked, marked = [], 0
    for cls in classes:
        for key, field in keys_of(cls):
            name, text = key.rpartition(".")[2], field.metadata["help"]
            is_text = (
                re.search("str|PathText", str(field.type))
                and "dict" not in str(field.type)
                and not field.metadata["choices"]
            )
            if is_text and name not in named and re.search(r"[Ff]older|[Ff]ile\b|MP4|[Cc]heckpoint|dataset", text):
                marked += 1
                # The type is a string where its module has the future import.
                unmarked += [] if re.search("PathText|'path'", str(field.type)) else [f"{cls.__name__}.{key}"]
    assert marked > 30 and not unmarked
    assert from_mapping(RunConfig, {"init_from": "~/x", "plugins": ["~/p.py", "m"]}).plugins == [
        f"{tmp_path}/p.py",
        "m",
    ]
    recipe = {"train": {"output_dir": "~/o", "train_policy": {"dataset": {"name": "~"}, "system_prompt": "~/x"}}}
    train = from_mapping(RecipeConfig, recipe).train
    assert (train.output_dir, train.train_policy.dataset.name, train.train_policy.system_prompt) == (
        f"{tmp_path}/o",
        str(tmp_path),
        "~/x",
    )
