"""Composition: groups, experiments, users' folders, plugins, and what is said about misspelt overrides."""

import multiprocessing
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import rlinf.config
from rlinf.algorithms.config import GRPOConfig, PPOConfig, ReinforcePPConfig, RLOOConfig
from rlinf.config.compose import compose_config, compose_on_saved
from rlinf.config.presets import PRESETS
from rlinf.config.schema import REGISTRIES, RunConfig, build_config, section_class
from rlinf.config.search import find_experiment, packaged_experiments
from rlinf.config.training import ClusterConfig
from rlinf.envs import ENVS
from rlinf.errors import ConfigError
from rlinf.models import MODELS, register_model
from rlinf.models.config import ModelConfig
from rlinf.options import from_mapping, public_fields, to_mapping
from rlinf.preflight.validation import validate
from rlinf.recipes.load import read_recipe
from rlinf.rollout.config import RolloutConfig

SEED_KEYS = {
    "model_type": "your_model_type", "action_token_len": 7, "action_chunks_len": 1, "unnorm_key": "your_action_key",
    "micro_batch_size": 1, "val_micro_batch_size": 8, "precision": "bf16", "vocab_size": 32000, "hidden_size": 4096,
    "image_size": [224, 224], "is_lora": False, "attn_implementation": "flash_attention_2", "low_cpu_mem_usage": True,
    "trust_remote_code": True,
}  # fmt: skip


def build(*overrides, config_dir=None) -> RunConfig:
    return build_config(compose_config(overrides, config_dir))


def test_precedence_is_defaults_then_experiment_then_command_line():
    assert build("algorithm=ppo").trainer.value_learning_rate == RunConfig().trainer.value_learning_rate
    quickstart = yaml.safe_load((packaged_experiments() / "quickstart.yaml").read_text())
    assert build("experiment=quickstart").sft.max_steps == quickstart["sft"]["max_steps"]
    assert build("+experiment=quickstart", "sft.max_steps=3").sft.max_steps == 3
    assert build("experiment=quickstart", "model=mlp").model.model_type == "mlp"


def test_experiment_name_is_that_of_the_file_and_names_the_output_folder():
    config = build("experiment=quickstart")
    assert config.experiment_name == "quickstart"
    assert re.fullmatch(r"outputs/quickstart/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", config.output_dir)
    assert build("experiment=quickstart", "experiment_name=mine").output_dir.startswith("outputs/mine/")


def test_choosing_an_algorithm_brings_its_dataclass_and_its_rollout():
    ppo, grpo = build("algorithm=ppo"), build("algorithm=grpo")
    assert type(ppo.algorithm) is PPOConfig and ppo.rollout.group_size == 1 and ppo.rollout.auto_reset
    assert type(grpo.algorithm) is GRPOConfig and grpo.rollout.group_size >= 2 and not grpo.rollout.auto_reset
    assert build("algorithm=grpo", "rollout=default").rollout.group_size == 1
    rloo, reinforce_pp = build("algorithm=rloo"), build("algorithm=reinforce_pp")
    assert type(rloo.algorithm) is RLOOConfig and rloo.rollout == grpo.rollout
    assert type(reinforce_pp.algorithm) is ReinforcePPConfig
    assert reinforce_pp.rollout == replace(ppo.rollout, auto_reset=False)


def test_a_preset_sets_what_was_not_set_explicitly(tmp_path):
    bare = compose_config(["algorithm.preset=sb3", "algorithm.gamma=0.5", "trainer.adam_eps=1.0e-7"])
    assert (bare.algorithm.gamma, bare.trainer.adam_eps) == (0.5, 1e-7)
    given = {"algorithm.gamma", "trainer.adam_eps"}
    assert all(OmegaConf.select(bare, key) == value for key, value in PRESETS["sb3"]["ppo"].items() if key not in given)
    (tmp_path / "mine.yaml").write_text("algorithm: {preset: sb3, gae_lambda: 0.8}\ntrainer: {clip_together: false}\n")
    mine = compose_config(["experiment=mine", "algorithm.normalize_over=rollout"], str(tmp_path))
    found = (mine.algorithm.gae_lambda, mine.trainer.clip_together, mine.algorithm.normalize_over, mine.algorithm.gamma)
    assert found == (0.8, False, "rollout", 0.99)
    actor = compose_config(["algorithm=sac", "algorithm.preset=sb3", "algorithm.actor.hidden_size=7"]).algorithm.actor
    assert (actor.hidden_size, actor.layer_norm) == (7, False)
    saved = to_mapping(build_config(compose_config(["algorithm.gamma=0.5"])))
    assert compose_on_saved(saved, ["algorithm.preset=sb3", "algorithm.gae_lambda=0.9"]).algorithm.gamma == 0.99
    assert compose_config().trainer.adam_eps == 1e-8  # the control: no preset
    with pytest.raises(ConfigError, match=r"algorithm=grpo; expected one of ppo, sac, td3"):
        compose_config(["algorithm=grpo", "algorithm.preset=sb3"])
    for settings in PRESETS["sb3"].values():
        assert all("." in key for key in settings)


def test_seed_template_holds_the_fourteen_keys_as_they_stand():
    text = find_experiment("your_config").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"model": SEED_KEYS}
    assert OmegaConf.create(text) == {"model": SEED_KEYS}


def test_seed_template_composes_and_every_key_arrives():
    model = build("experiment=your_config").model
    assert {key: getattr(model, key) for key in SEED_KEYS} == SEED_KEYS
    defaults = {f.name for f in fields(ModelConfig)} - set(SEED_KEYS)
    assert all(getattr(model, name) == getattr(ModelConfig(), name) for name in defaults)


def test_typo_in_any_key_of_the_template_is_refused_with_the_key_that_was_meant():
    for key in SEED_KEYS:
        with pytest.raises(ConfigError, match=f"Did you mean '{key}'"):
            from_mapping(ModelConfig, {f"{key[:-1]}x": SEED_KEYS[key]}, "model")
    with pytest.raises(ConfigError, match="Set 'model.image_size="):
        build("model.image_sizx=1")


def test_seed_template_is_accepted_once_its_model_is_registered_and_given_weights(tmp_path, monkeypatch):
    others = {name: entry for name, entry in MODELS.entries().items() if name != "your_model_type"}
    monkeypatch.setattr(MODELS, "_entries", others)
    with pytest.raises(ConfigError, match="model.model_type is 'your_model_type'"):
        validate(build("experiment=your_config"))
    register_model("your_model_type", model=MODELS.get("mlp").model)
    (tmp_path / "config.json").write_text('{"state_dim": 31}')
    weights = ["model.attn_implementation=sdpa", f"model.model_path={tmp_path}"]
    config = build("experiment=your_config", *weights)
    validate(config)
    with pytest.raises(ConfigError, match="flash_attention_2, but torch sees no|flash-attn"):
        validate(build("experiment=your_config", weights[1]))


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("trainer.learning_rte=1", ["'trainer.learning_rte'", "Set trainer.learning_rate=1"]),
        ("experimnt=quickstart", ["Set experiment=quickstart"]),
        ("experiment=quickstrat", ["no experiment 'quickstrat'", "Set experiment=quickstart"]),
        ("model=openvla_tinny", ["no model 'openvla_tinny'", "Set model=openvla_tiny"]),
        ("quickstart", ["is not an override", "Set e.g. experiment=quickstart"]),
        ("rollout.num_envs=[1", ["cannot be read"]),
        ("seed=1,2", ["rlinf train -m seed=1,2", "'seed=[1,2]'"]),
        ("trainer.max_steps=ten", ["trainer.max_steps is 'ten'", "expected int"]),
        ("algorithm.name=dppo", ["algorithm.name is 'dppo'", "Did you mean 'ppo'"]),
        ("env.gamma=1", ["no key 'env.gamma'. Set algorithm.gamma=1"]),
        (
            "evalution.num_episodes=7",
            ["no key 'evalution'. Set evaluation.num_episodes=7"],
        ),
        ("optimizer.lr=1e-3", ["no key 'optimizer'. Set trainer.learning_rate=0.001 or sft.learning_rate=0.001"]),
        ("max_stps=3", ["no key 'max_stps'. Set trainer.max_steps=3 or sft.max_steps=3"]),
        ("model.depth=2", ["model.init_config.depth=2 or model.override_config.depth=2"]),
        ("env=touch_two", ["Set env=tabletop 'env.tasks=[touch_two]'"]),
        ("sft.expert.spee=3", ["no key 'sft.expert.spee'. Known: aim_offset_m"]),  # not seed=3
        ("lr=1e-3", ["no key 'lr'. Set trainer.learning_rate=0.001 or sft.learning_rate=0.001"]),
        ("task=push", ["no key 'task'. Set 'env.tasks=[push]'"]),
        ("algorithm=PPO", ["Did you mean 'ppo'? Set algorithm=ppo"]),
        ("env.name=[1,2]", ["env.name is", "Set"]),
        ("algorithm.name=[1,2]", ["algorithm.name is", "Set"]),
        ("env.name={a: 1}", ["env.name is", "Set"]),
        ("algorithm.name=3", ["algorithm.name is", "Set"]),
        ("env=zzz", ["no env 'zzz'. Known: external, gymnasium", "Set plugins=["]),
        ("algorithm.name=grpo", ["algorithm.name is 'grpo', with the settings of ppo", "Set algorithm=grpo"]),
        ("env.tasks=push", ["env.tasks is 'push'", "Set e.g. 'env.tasks=[push]'"]),
    ],
)
def test_misspelt_overrides_are_answered_in_one_line_with_what_to_type(override, fragments):
    with pytest.raises(ConfigError) as caught:
        build(override)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_keys_of_an_env_or_algorithm_are_those_of_the_chosen_one():
    with pytest.raises(ConfigError, match=r"no key 'env\.upriht'\. Did you mean 'upright'"):
        build("env=metaworld", "env.upriht=false")
    with pytest.raises(
        ConfigError, match=r"^env=metaworld has no key 'distractors', which belongs to tabletop. Remove env.distr"
    ):
        build("env=metaworld", "env.distractors=true")  # of the default env
    with pytest.raises(ConfigError, match=r"no key 'algorithm\.max_resample'\. Did you mean 'max_resamples'"):
        build("algorithm=grpo", "algorithm.max_resample=1")
    assert build("env=gymnasium", "env.kwargs.g=9.8").env.kwargs == {"g": 9.8}
    assert build("env=gymnasium", "env.kwargs={g: 1.6}").env.kwargs == {"g": 1.6}


def test_users_folder_adds_experiments_and_groups(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - override /trainer: long\ntrainer:\n  minibatch_size: 64\n")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "long.yaml").write_text("max_steps: 12345\nlearning_rate: 1.0e-5\n")
    config = build("experiment=mine", config_dir=str(tmp_path))
    assert (config.trainer.max_steps, config.trainer.minibatch_size) == (12345, 64)
    assert config.experiment_name == "mine"
    assert build("experiment=quickstart", config_dir=str(tmp_path)).experiment_name == "quickstart"
    with pytest.raises(ConfigError, match="no experiment 'mine'"):
        build("experiment=mine")
    with pytest.raises(ConfigError, match="is not a folder"):
        build(config_dir=str(tmp_path / "nowhere"))


def test_a_users_group_lies_over_the_schema_of_its_section(tmp_path):
    for name, text in (
        ("model/mine", "model_type: mlp\n"), ("model/over", "defaults: [mlp, _self_]\nprecision: bf16\n"), ("model/typo", "precison: bf16\n"),
        ("env/table", "name: tabletop\ntasks: [reach]\n"), ("algorithm/mine", "name: grpo\n"),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    mine = build(
        "model=mine",
        "model.is_lora=true",
        "env=table",
        "algorithm=mine",
        "algorithm.scale_by_std=false",
        config_dir=str(tmp_path),
    )
    assert (mine.model.model_type, mine.model.is_lora) == ("mlp", True)
    assert mine.env.tasks == ["reach"] and not mine.algorithm.scale_by_std
    over = build("model=over", config_dir=str(tmp_path)).model
    assert over.precision == "bf16" and over.init_config == build("model=mlp").model.init_config, "of the one below"
    (tmp_path / "model" / "listed.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="model/listed.yaml contains a list"):
        build("model=listed", config_dir=str(tmp_path))
    for words, key in ((["model=typo"], "model.precison"), (["model=mine", "model.is_lorra=true"], "model.is_lorra")):
        with pytest.raises(ConfigError, match=f"no key '{key}'.*Did you mean"):
            build(*words, config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("word", "typed"),
    [("trainer=[1]", "max_steps=3"), ("trainer=3", "max_steps=3"), ("model=null", "precision=fp32"), ("env={a: 1}", "name=tabletop"),
     ("model.lora=[1]", "rank=8"), ("model.override_config=[1]", "x=1"), ("experiment=1", None)],
)  # fmt: skip
def test_a_section_that_is_no_section_is_named(word, typed):
    section = word.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{section} is ") as error:
        build(word)
    if typed is not None:
        assert f"{section}.<key>=<value>" in str(error.value) and build(f"{section}.{typed}")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [(b"trainer: {max_steps: 2}\nseed: 1\ntrainer: {}\n", 3, "duplicate"), (b"trainer:\n\tmax_steps: 2\n", 2, "spaces"),
     (b"experiment_name: a: b\n", 1, "mapping"), (b"# x\nexperiment_name: Jos\xe9\n", 2, "UTF-8")],
)  # fmt: skip
def test_a_file_that_is_no_yaml_is_named_with_line_and_reason(tmp_path, text, line, reason):
    (tmp_path / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"(mine.yaml, line {line}\b|Line {line} of .*mine.yaml).*{reason}"):
        build("experiment=mine", config_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"(mine.yaml, line {line}\b|Line {line} of .*mine.yaml).*{reason}"):
        read_recipe(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [("trainer/default.yaml", "max_steps: 1\n", "Rename it.*my_default.yaml"), ("experiment/mine.yaml", "- a\n", "mine"),
     ("mine.yaml", "trainer:\n  minibtach_size: 64\n", "Set trainer.minibatch_size=64"), ("mine.yaml", "trainer: [\n", "cannot be read")],
)  # fmt: skip
def test_a_users_file_that_cannot_be_composed_is_refused(tmp_path, file, text, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        build(*(["experiment=mine"] if "mine" in file else []), config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [("json.py", "", ConfigError, "Rename your file, e.g. my_json.py"), (None, "no_such_module", ConfigError, "no module 'no_such_module'"),
     ("broken.py", "import a_package_that_is_not_there\n", ModuleNotFoundError, "a_package_that_is_not_there")],
)  # fmt: skip
def test_a_plugin_that_cannot_be_imported_is_named(tmp_path, name, text, error, message):
    if name is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        build(f"plugins=[{text if name is None else tmp_path / name}]")


@pytest.mark.parametrize(
    ("overrides", "cameras"),
    [
        (["model=mlp", "env=tabletop"], []),
        (["model=openvla_tiny", "env=tabletop"], ["front"]),
        (["model=openvla_tiny", "env=libero_spatial"], ["agentview"]),
        (["model=cnn", "model.init_config.num_images_in_input=2", "env=libero_spatial"], ["agentview", "wrist"]),
        (["model=mlp", "env=libero_spatial", "dataset=new"], ["agentview", "wrist"]),
        (["model=openvla_tiny", "model.model_path=nowhere", "env=tabletop"], ["front"]),
    ],
)
def test_cameras_follow_from_what_the_model_reads_unless_they_are_given(overrides, cameras):
    assert build(*overrides).env.cameras == cameras


@cache
def earlier_run() -> RunConfig:
    return build("experiment=quickstart", "env.image_size=32", "trainer.max_steps=3", "seed=5")


def saved_run() -> dict:
    return to_mapping(earlier_run()) | {"resume": "outputs/earlier"}


def test_saved_configuration_stays_except_for_what_is_overridden():
    config = build_config(compose_on_saved(saved_run(), ["evaluation.num_episodes=7", "env.tasks=[push]"]))
    assert (config.evaluation.num_episodes, config.env.tasks) == (7, ["push"])
    assert (config.env.image_size, config.trainer.max_steps, config.seed) == (32, 3, 5)
    assert config.resume is None
    assert config.output_dir.startswith("outputs/quickstart/evaluate_")


def test_group_choice_replaces_the_whole_saved_section():
    config = build_config(compose_on_saved(saved_run(), ["env=tabletop", "env.success_bonus=2.0"]))
    assert config.env.image_size == section_class("env", "tabletop")().image_size and config.env.success_bonus == 2.0


@pytest.mark.parametrize(
    "override", ["evaluation.num_epsodes=3", "experiment=quickstart", "seed=1,2", "evaluation.num_episodes=x"]
)
def test_wrong_overrides_of_a_saved_configuration_are_refused(override):
    with pytest.raises(ConfigError):
        build_config(compose_on_saved(saved_run(), [override]))


PACKAGED_GROUPS = sorted(Path(rlinf.config.__path__[0]).glob("*/*.yaml"))


@pytest.mark.parametrize("path", PACKAGED_GROUPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_group_yaml_holds_what_differs_and_its_composition_holds_everything(path):
    section = path.parent.name
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    values.pop("defaults", None)
    cls = section_class(section, values["name"]) if section in REGISTRIES else type(getattr(RunConfig(), section))
    defaults = to_mapping(cls())
    repeated = [key for key, value in values.items() if value == defaults[key] and key not in ("name", "model_type")]
    assert not repeated, f"{path} repeats defaults of {cls.__name__}"
    composed = OmegaConf.to_container(compose_config([f"{section}={path.stem}"])[section])
    assert composed == defaults | values and list(composed) == list(public_fields(cls))


def test_composition_without_overrides_equals_the_dataclass_defaults():
    config = build()
    config.output_dir = None
    expected = RunConfig(
        experiment_name="openvla_tabletop_ppo",
        env=section_class("env", "tabletop")(),
        rollout=RolloutConfig(num_chunks=48),
        cluster=ClusterConfig(num_processes=1),
    )
    assert to_mapping(config) == to_mapping(expected)


def test_chunks_follow_from_the_longest_episode_unless_they_are_given():
    assert build("env.tasks=[reach]", "model=openvla_oft_tiny").rollout.num_chunks == 16 / 2
    assert build("env=gymnasium", "env.max_episode_steps=7", "model=openvla_oft_tiny").rollout.num_chunks == 4
    assert build("env.tasks=[reach]", "rollout.num_chunks=20").rollout.num_chunks == 20
    unknown_task = build("env.tasks=[raech]")
    assert unknown_task.rollout.num_chunks is None
    with pytest.raises(ConfigError, match="raech"):
        validate(unknown_task)
    with pytest.raises(ConfigError, match=r"Set rollout\.num_chunks=16"):
        validate(build("env.tasks=[reach]", "model=mlp", "rollout.num_chunks=8"))
    incomplete = build("env.tasks=[reach]", "model=mlp", "env.cameras=[]")
    incomplete.rollout.num_chunks = None
    with pytest.raises(ConfigError, match=r"num_chunks=null.* Set rollout\.num_chunks=16"):
        validate(incomplete)


def test_a_value_by_another_key_is_that_of_its_table(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer:\n  max_steps: ${by:${env.name},{tabletop:3,gymnasium:5}}\n")
    assert build("experiment=mine", config_dir=str(tmp_path)).trainer.max_steps == 3
    assert build("experiment=mine", "env=gymnasium", config_dir=str(tmp_path)).trainer.max_steps == 5
    with pytest.raises(
        ConfigError, match=r"trainer\.max_steps .* no value for metaworld, only for tabletop, gymnasium"
    ):
        build("experiment=mine", "env=metaworld", config_dir=str(tmp_path))


PLUGIN = """
from dataclasses import dataclass

from rlinf.envs import register_env
from rlinf.envs.tabletop.env import TabletopConfig, TabletopVectorEnv
from rlinf.models import MODELS, register_model
from rlinf.options import option


@dataclass
class {cls}Config(TabletopConfig):
    joints: int = option(7, "Joints.", minimum=1)


class {cls}(TabletopVectorEnv):
    config_class = {cls}Config


register_env("{name}", {cls})
register_model("{name}_policy", model=MODELS.get("mlp").model)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A file that registers an env and a model without a YAML; both are forgotten afterwards."""
    for registry in (MODELS, ENVS):
        monkeypatch.setattr(registry, "_entries", dict(registry.entries()))
    name = f"arm_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(PLUGIN.format(cls="Arm", name=name))
    return name, path


@pytest.mark.parametrize("place", ["an override", "an experiment", "over a saved configuration"])
def test_names_that_a_plugin_registers_need_no_yaml(plugin, tmp_path, place):
    name, path = plugin
    words = [f"env={name}", f"model={name}_policy", "env.joints=3"]
    if place == "an experiment":
        lines = [f"  - override /{group}: {value}" for group, value in (("env", name), ("model", f"{name}_policy"))]
        text = "\n".join(["defaults:", *lines, f"plugins: [{path}]", "env: {joints: 3}"])
        (tmp_path / "mine.yaml").write_text(text)
        composed = compose_config(["experiment=mine"], str(tmp_path))
    elif place == "an override":
        composed = compose_config([*words, f"plugins=[{path}]"])
    else:
        saved = to_mapping(build_config(compose_config(["output_dir=unused"])))
        composed = compose_on_saved(saved, [*words, f"plugins=[{path}]"])
    config = build_config(composed)
    assert (config.env.name, config.model.model_type, config.env.joints) == (name, f"{name}_policy", 3)
    assert config.env.image_size == 64, "the rest are the defaults of its class"


def test_a_yaml_of_the_users_goes_before_the_defaults_of_a_registered_name(plugin, tmp_path):
    name, path = plugin
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / f"{name}.yaml").write_text(f"name: {name}\njoints: 5\n")
    words = [f"env={name}", f"plugins=[{path}]"]
    config = build(*words, config_dir=str(tmp_path))
    assert config.env.joints == 5 and config.env.image_size == 64
    with pytest.raises(ConfigError, match="Set env.joints="):
        build(*words, "+env.joint=3", config_dir=str(tmp_path))
    # A spawned process, which knows nothing but what is pickled, gets the same configuration.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(to_mapping, (config,))["env"]["joints"] == 5


def test_another_algorithm_goes_with_an_experiment_and_its_other_keys_are_left_out_on_one_line(capsys):
    chosen = ["experiment=tabletop_ppo_mlp", "algorithm=grpo"]
    config = build(*chosen)
    said = capsys.readouterr().err
    assert config.algorithm.name == "grpo" and config.algorithm.update_epochs == 2, "a key that it has is taken"
    assert said.count("\n") == 1 and "algorithm=grpo has no such keys: critic_warmup_steps, gamma" in said
    for typed, said in (
        ("algorithm.gamma=0.9", r"algorithm=grpo has no key 'gamma'.* Remove algorithm.gamma, or set algorithm="),
        ("algorithm.critic_warmup=3", r"no key 'algorithm.critic_warmup'"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            build(*chosen, typed)
        assert "algorithm.critic_warmup_steps=" not in str(error.value), "which would be rejected"
    assert build("experiment=tabletop_ppo_mlp").algorithm.gamma == 0.9, "a control"


def test_an_experiment_that_extends_another_may_choose_another_algorithm(tmp_path, capsys):
    """Inherited keys of the other algorithm are left out; keys that no algorithm has, or that the file itself sets, are not."""
    base = "defaults: [override /algorithm: ppo]\nalgorithm: {gamma: 0.5, old_logprobs: rollout}\n"
    (tmp_path / "base.yaml").write_text(base)
    middle = "defaults: [base, override /algorithm: sac, _self_]\n"
    (tmp_path / "middle.yaml").write_text(middle)
    (tmp_path / "last.yaml").write_text("defaults: [middle, _self_]\nalgorithm: {tau: 0.5}\n")
    algorithm = build("experiment=last", config_dir=str(tmp_path)).algorithm
    assert (algorithm.name, algorithm.gamma, algorithm.tau) == ("sac", 0.5, 0.5) and not capsys.readouterr().err
    (tmp_path / "middle.yaml").write_text(f"{middle}algorithm: {{clip_range_low: 0.1}}\n")
    with pytest.raises(ConfigError, match="no key 'clip_range_low'"):
        build("experiment=middle", config_dir=str(tmp_path))
    (tmp_path / "base.yaml").write_text(base.replace("old_logprobs", "old_logprbs"))
    with pytest.raises(ConfigError, match="algorithm.old_logprbs"):
        build("experiment=last", config_dir=str(tmp_path))
