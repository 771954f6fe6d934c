"""Cross-checks: each contradiction is rejected, and the override that the message suggests mends it."""

import copy
import importlib.util
import itertools
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

import rlinf
from rlinf.algorithms import ALGORITHMS
from rlinf.config.compose import compose_config, normalize_overrides
from rlinf.config.overrides import parse_overrides
from rlinf.config.schema import RunConfig, build_config
from rlinf.envs import ENVS
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError
from rlinf.evaluation.sequential import decided_at
from rlinf.preflight import validation
from rlinf.preflight.derived import format_derived
from rlinf.preflight.validation import validate

GROUPS = ("model", "env", "algorithm", "rollout")


@cache
def composed(*groups: str) -> DictConfig:
    return compose_config(["model=openvla_tiny", "env=tabletop", "env.tasks=[reach]", *groups])


def build(*overrides) -> RunConfig:
    """Compose groups once for all tests, and lay single keys over a copy of them, as Hydra does."""
    parsed = parse_overrides(normalize_overrides(overrides))
    if any(item.is_delete() for item in parsed):
        return build_config(compose_config(["model=openvla_tiny", "env=tabletop", "env.tasks=[reach]", *overrides]))
    config = copy.deepcopy(composed(*(item.input_line for item in parsed if item.key_or_group in GROUPS)))
    for item in parsed:
        if item.key_or_group not in GROUPS:
            OmegaConf.update(config, item.key_or_group, item.value(), force_add=True)
    return build_config(config)


def test_keys_laid_over_groups_are_what_hydra_composes():
    words = [
        "algorithm=grpo",
        "rollout.num_envs=60",
        "+model.init_config.num_images_in_input=2",
        "env.cameras=[front,side]",
    ]
    hydra = compose_config(["model=openvla_tiny", "env=tabletop", "env.tasks=[reach]", *words])
    assert replace(build(*words), output_dir=None) == replace(build_config(hydra), output_dir=None)


def suggestions(message: str) -> list[list[str]]:
    """The overrides after ``Set`` or ``Run`` (or ``e.g.``), each alternative as a list of words."""
    text = re.split(r"(?:(?:Set|Run)(?: e\.g\.)?|, e\.g\.) ", message)[-1].rstrip(".")
    return [[word.strip(",").strip("'") for word in part.split()] for part in re.split(r",? or ", text)]


CASES = {
    "envs over ranks": (["rollout.num_envs=63", "cluster.num_processes=2"], "63"),
    "recomputing a policy without blocks": (["model=mlp", "model.gradient_checkpointing=true"], "has no layers"),
    "a profiled step too many": (["trainer.max_steps=3", "trainer.profile_steps=[1,3]"], "profile_steps=[1,3] with trainer.max_steps=3"),
    "a profile that ends before it starts": (["trainer.profile_steps=[5,3]"], "profile_steps=[5,3]"),
    "envs into groups": (["algorithm=grpo", "rollout.num_envs=60"], "rollout.group_size=8"),
    "samples into minibatches": (["rollout.num_envs=6", "rollout.num_chunks=16", "trainer.minibatch_size=64"], "96 samples"),
    "minibatch over ranks": (["trainer.minibatch_size=1", "cluster.num_processes=2"], "trainer.minibatch_size=1"),
    "rows into micro-batches": (["model.micro_batch_size=48"], "128 rows per rank"),
    "one env and two halves": (["rollout.num_envs=1", "rollout.pipeline_stages=2", "trainer.minibatch_size=16"], "1 env per rank"),
    "processes and threads": (["rollout.worker_processes=2", "rollout.pipeline_stages=2"], "rollout.pipeline_stages=2"),
    "processes for an engine": (
        ["rollout.worker_processes=2", "rollout.backend=vllm", "model.init_config.action_decoding=autoregressive"], "rollout.backend=vllm"),
    "episodes that continue without their simulators": (
        ["rollout.continue_episodes=true", "rollout.offload_envs=true"], "rollout.offload_envs=true"),
    "groups over processes": (["algorithm=grpo", "rollout.worker_processes=5"], "8 groups per rank"),
    "threads that play ahead": (["cluster.max_staleness=1", "algorithm.tis_cap=2.0"], "rollouts in the training ranks"),
    "older weights without a correction": (["cluster.max_staleness=1", "rollout.worker_processes=1"], "algorithm.tis_cap=null"),
    "grpo without groups": (["algorithm=grpo", "rollout=default"], "rollout.group_size=1"),
    "grpo with auto-reset": (["algorithm=grpo", "rollout.auto_reset=true"], "rollout.auto_reset=true"),
    "parts of episodes": (["algorithm=reinforce_pp", "rollout=default"], "rollout.auto_reset=true"),
    "ppo without values": (["model.value_head=false"], "model.value_head=false"),
    "action advantages, chunk ratio": (["algorithm.advantage_level=action", "algorithm.logprob_level=chunk"], "logprob_level=chunk"),
    "action advantages without values": (["algorithm=grpo", "algorithm.advantage_level=action"], "one advantage per episode"),
    "rollout ends inside an episode": (
        ["algorithm=grpo", "env.max_episode_steps=16", "rollout.num_chunks=8"], "8 env steps per iteration"),
    "rollout ends inside the longest task": (
        ["algorithm=grpo", "env.tasks=[reach,push]", "rollout.num_chunks=16"], "16 env steps per iteration"),
    "unknown task": (["env.tasks=[reach,psuh]"], "'psuh'"),
    "unknown model": (["model.model_type=opnvla"], "'opnvla'"),
    "unknown precision": (["model.precision=fp8"], "'fp8'"),
    "precision without autocast": (["model.precision=fp16-mixed"], "'fp16-mixed'"),
    "float16 in training": (["model.precision=fp16"], "model.precision=fp16"),
    "a camera too many": (["env.cameras=[front,side]"], "env.cameras lists 2"),
    "no camera": (["env.cameras=[]"], "env.cameras lists 0"),
    "a camera too few": (["+model.init_config.num_images_in_input=2"], "expects 2 cameras"),
    "state policy without a state": (["model=mlp", "env.state=none"], "reads a state"),
    "unknown attention": (["model.attn_implementation=spda"], "'spda'"),
    "flash attention without a GPU": (["model.attn_implementation=flash_attention_2"], "flash_attention_2"),
    "three image sizes": (["model.image_size=[64,64,3]"], "[64,64,3]"),
    "adapter without lora": (["model.lora_path=LORA"], "model.is_lora=false"),
    "dropout in RL": (["model.is_lora=true", "model.lora.dropout=0.1"], "model.lora.dropout=0.1"),
    "the former word for replicas": (["trainer.sharding=none", "cluster.num_processes=2"], "trainer.sharding is 'none'"),
    "shards over a part of the ranks": (["trainer.shard_size=2", "cluster.num_processes=3", "rollout.num_envs=48",
        "trainer.minibatch_size=96"], "trainer.shard_size=2 with cluster.num_processes=3"),
    "shards of a policy without layers": (["model=mlp", "trainer.sharding=fsdp2"],
        "MLPForRLActionPrediction cannot be sharded: its fsdp_wrap_modules are empty"),
    "nothing to offload": (["trainer.sharding=replicate", "trainer.cpu_offload=true"], "trainer.cpu_offload=true"),
    "too few GPUs": (["cluster.device=cuda"], "torch sees 0"),
    "no weights at all": (["model=openvla"], "model.init_config is empty"),
    "more episodes than there are": (["env.tasks=[reach]", "env.num_eval_init_states=50"], "1 tasks x 50"),
    "nothing to train": (["trainer.max_steps=0"], "nothing to train"),
    "offset with three numbers": (["sft.max_steps=5", "sft.expert.aim_offset_m=[0.1,0.1,0.1]"], "aim_offset_m"),
    "rule for an error that is not there": (["sft.max_steps=5", "sft.expert.aim_offset_rule=by_instruction"],
        "aim_offset_rule=by_instruction needs an aiming error"),
    "sft batch over ranks": (["sft.max_steps=5", "sft.batch_size=63", "cluster.num_processes=2"], "sft.batch_size=63"),
    "env of another class": (["~env.distractors", "~env.state"], None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contradiction_is_refused_and_the_suggested_override_mends_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    real = importlib.util.find_spec  # an engine need not be installed to be rejected
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: object() if name == "vllm" else real(name, *more)
    )
    overrides, fragment = CASES[name]
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    overrides = [override.replace("LORA", str(tmp_path)) for override in overrides]
    if fragment is None:  # the control: leaving keys out is not a contradiction
        validate(build(*overrides))
        return
    with pytest.raises(ConfigError) as caught:
        validate(build(*overrides))
    message = str(caught.value)
    assert fragment in message and "\n" not in message
    mending = [words for words in suggestions(message) if words and "=" in words[0]]
    assert mending, message
    for words in mending:
        words = [re.sub(r"<folder.*", str(tmp_path), word) for word in words if "=" in word]
        validate(build(*overrides, *words))


def test_a_model_of_images_that_sees_none_is_refused():
    with pytest.raises(
        ConfigError, match="num_images_in_input=0; expected 1 or more.*model.init_config.num_images_in_input=1"
    ):
        validate(build("env.state=proprio", "model.init_config.num_images_in_input=0"))
    for model, number in (("openvla_tiny", "two"), ("openvla_oft_tiny", "-1"), ("cnn", "0"), ("cnn", "two")):
        with pytest.raises(ConfigError, match=f"num_images_in_input.*{number}.*expected"):
            validate(build(f"model={model}", "env.state=proprio", f"model.init_config.num_images_in_input={number}"))


@pytest.mark.parametrize(("model", "family"), [("hf_vla", "hf_vla_tiny"), ("pi05", "pi0_tiny")])
def test_random_weights_are_advised_of_the_family_that_was_asked_for(model, family):
    with pytest.raises(ConfigError, match=f"or model={family}$"):
        validate(build(f"model={model}"))


def test_a_state_width_that_is_typed_must_be_the_envs():
    words = ["model=mlp", "env.state=proprio"]
    with pytest.raises(ConfigError, match=r"width 3 .*width 4\. Set model\.init_config\.state_dim=4"):
        validate(build(*words, "model.init_config.state_dim=3"))
    for mending in ([], ["model.init_config.state_dim=4"]):  # without a width, it is the env's
        validate(build(*words, *mending))


def test_observations_that_do_not_fit_into_the_memory_are_refused(monkeypatch):
    """64 envs x 16 calls of an image of 64 pixels (and its state), however many ranks share them."""
    envs = ["rollout.num_envs=64", "rollout.num_chunks=16", "trainer.minibatch_size=64"]
    row = 3 * 64**2 + 4 * ENVS.get("tabletop").state_width(build(*envs).env)
    needed = 64 * 16 * row
    for ranks in (1, 2):
        config = build(*envs, f"cluster.num_processes={ranks}")
        monkeypatch.setattr("rlinf.preflight.validation.main_memory_bytes", lambda: needed)
        validate(config)
        monkeypatch.setattr("rlinf.preflight.validation.main_memory_bytes", lambda: needed - 1)
        with pytest.raises(ConfigError, match=rf"64 envs on this machine x 16 .*Set rollout.num_envs={64 - ranks}\b"):
            validate(config)
    validate(build(*envs, "cluster.num_processes=2", "rollout.num_envs=60"))
    processes = build(*envs, "rollout.worker_processes=2")
    with pytest.raises(ConfigError, match=r"x 3 copies \(rollout.worker_processes=2\)"):
        validate(processes)
    monkeypatch.setattr("rlinf.preflight.validation.main_memory_bytes", lambda: 3 * needed)
    validate(processes)
    ahead = ["rollout.worker_processes=2", "algorithm.tis_cap=2.0"]
    validate(build(*envs, *ahead, "cluster.max_staleness=1"))
    with pytest.raises(ConfigError, match="x 5 copies"):
        validate(build(*envs, *ahead, "cluster.max_staleness=3"))
    monkeypatch.setattr("rlinf.preflight.validation.main_memory_bytes", lambda: needed - 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of two machines, each holds a half
    validate(build(*envs, "cluster.num_processes=2"))


def test_a_good_configuration_passes_for_every_command():
    for command, algorithm in itertools.product(("train", "sft", "evaluate"), ("ppo", "grpo")):
        validate(build(f"algorithm={algorithm}", "sft.max_steps=10"), command)


def test_the_env_judges_the_statistics_that_the_policy_takes(monkeypatch):
    judged = []
    monkeypatch.setattr(ENVS.get("tabletop"), "check_statistics", lambda config, statistics: judged.append(statistics))
    arm, leg = ({"action": {"q01": [low, low], "q99": [1, 1]}} for low in (-1, 0))
    text = "+model.init_config.norm_stats.{}={{action:{{q01:[{low},{low}],q99:[1,1]}}}}"
    one, other = text.format("arm", low=-1), text.format("leg", low=0)
    for overrides in ([one], [one, "model.unnorm_key=arm"], [one, other, "model.unnorm_key=leg"], [one, other]):
        validate(build(*overrides))
    assert judged == [arm, arm, leg], "null stands for the only ones; of two it names none"


def test_what_a_command_does_not_use_is_not_checked():
    odd = ["rollout.num_envs=7", "trainer.minibatch_size=5"]
    validate(build(*odd), "evaluate")
    validate(build(*odd, "sft.max_steps=5"), "sft")
    with pytest.raises(ConfigError):
        validate(build(*odd), "train")


def test_nothing_is_built_before_the_checks_are_done(monkeypatch):
    def reject(*_args, **_kwargs):
        raise AssertionError("started something")

    monkeypatch.setattr(ENVS.get("tabletop"), "__init__", reject)
    monkeypatch.setattr(ALGORITHMS.get("ppo"), "__init__", reject)
    monkeypatch.setattr("rlinf.models.building.get_model", reject)
    monkeypatch.setattr("multiprocessing.Process.start", reject)
    validate(build("sft.max_steps=5"))


@pytest.mark.parametrize("key", ["resume", "init_from", "checkpoint"])
def test_folder_that_is_no_checkpoint_is_refused(key, tmp_path):
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        validate(build(f"{key}={tmp_path}"))
    with pytest.raises(CheckpointError, match="There is no folder"):
        validate(build(f"{key}={tmp_path / 'nowhere'}"))


def test_model_path_must_be_a_checkpoint_folder_or_look_like_a_hub_id(tmp_path):
    def path(value):
        return build("~model.init_config", f"model.model_path={value}")

    with pytest.raises(ConfigError, match="without config.json"):
        validate(path(tmp_path))
    with pytest.raises(ConfigError, match="is neither a folder nor a hub id"):
        validate(path(tmp_path / "nowhere"))
    validate(path("organisation/name"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "openvla"}')
    with pytest.raises(ConfigError, match=re.escape(f"Set model.model_path={tmp_path / 'model'}")):
        validate(path(tmp_path))
    validate(path(tmp_path / "model"))


def test_output_folder_must_be_writable_and_nothing_is_left_in_it(tmp_path):
    validate(build(f"output_dir={tmp_path}/a/b"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        validate(build(f"output_dir={tmp_path}/file/run"))
    with pytest.raises(ConfigError, match="nothing can be written"):
        validate(build("output_dir=/proc/run"))


@pytest.fixture
def finished(tmp_path):
    """A folder that a run has written to."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_folder_of_another_run_is_refused_for_training(finished, monkeypatch):
    checkpoint = finished / "checkpoints" / "rl_000002"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="already contains a run") as caught:
        validate(build(f"output_dir={finished}"))
    assert f"Set resume={finished} " in str(caught.value) and "output_dir=<a new folder>" in str(caught.value)
    validate(build(f"output_dir={finished}"), "evaluate")
    validate(build(f"output_dir={finished}_2"))
    monkeypatch.setattr(validation, "check_start", lambda *_: None)
    monkeypatch.setattr("rlinf.preflight.folders.resolve_checkpoint", lambda folder: checkpoint)
    monkeypatch.setattr("rlinf.preflight.saved.resolve_checkpoint", lambda source: checkpoint)
    validate(build(f"output_dir={finished}", f"resume={finished}"))
    (finished.parent / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already contains a run"):
        validate(build(f"output_dir={finished.parent / 'other'}", f"resume={finished}"))


REFUSED = {
    "resume and init_from": ("train", ["resume=a", "init_from=b"], "exclude each other"),
    "a comparison of a run": ("train", ["evaluation.compare=a"], "evaluation.compare=a .*`rlinf train`.* Set evaluation.compare=null"),
    "a run that ends its evaluations": (
        "train", ["evaluation.stop_when=0.1"], "evaluation.stop_when=0.1 .*`rlinf train`.* Set evaluation.stop_when=null"),
    "a rule without a baseline": ("evaluate", ["evaluation.stop_when=decided"], "=decided.* Set evaluation.compare="),
    "an unknown rule": ("evaluate", ["evaluation.stop_when=decide"], "=decide; .* Set evaluation.stop_when="),
    "a width above 1": ("evaluate", ["evaluation.stop_when=1.5"], "=1.5; .* Set evaluation.stop_when=0.1"),
    "nothing to clone": ("sft", [], "sft.max_steps=0 .* Set sft.max_steps=700"),
}  # fmt: skip
"""Rejections whose fix names another command or folder, or ends the run."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_with_the_command_is_refused(name):
    command, overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        validate(build(*overrides), command)


def test_what_an_evaluation_may_do_is_accepted():
    for words in (["evaluation.compare=a"], ["evaluation.stop_when=0.2"], ["model.precision=fp16"]):
        validate(build(*words), "evaluate")
    assert (decided_at([1] * 5, 5), decided_at([1] * 6, 6)) == (None, 6)


def test_inputs_of_a_checkpoint_folder_are_read_from_its_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "openvla", "num_images_in_input": 2}')
    overrides = ["~model.init_config", f"model.model_path={tmp_path}"]
    with pytest.raises(ConfigError, match="expects 2 cameras"):
        validate(build(*overrides))
    validate(build(*overrides, "env.cameras=[front,side]"))


def test_an_expert_that_takes_no_aim_offset_refuses_one(monkeypatch):
    offset = ["sft.max_steps=5", "sft.expert.aim_offset_m=[0.07,0.0]"]
    validate(build(*offset))
    monkeypatch.setattr(ENVS.get("tabletop"), "expert_actions", lambda self: None)
    with pytest.raises(ConfigError, match=r"sft.expert.aim_offset_m=\[0.07,0.0\], but .*tabletop does not support"):
        validate(build(*offset))
    validate(build("sft.max_steps=5"))


def test_cloning_needs_a_scripted_expert(monkeypatch):
    monkeypatch.setattr(ENVS.get("tabletop"), "expert_actions", VectorEnv.expert_actions)
    with pytest.raises(
        ConfigError, match="env.name=tabletop has no .*expert.*Set sft.dataset=<folder>, or sft.max_steps=0"
    ):
        validate(build("sft.max_steps=5"))
    validate(build("sft.max_steps=0"))


def test_missing_optional_package_is_reported_with_its_install_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(MissingDependencyError, match="pip install wandb.*tracking.wandb=false"):
        validate(build("tracking.wandb=true"))
    validate(build("tracking.wandb=false"))
    validate(build("tracking.wandb=true"), "evaluate")  # of a run that was tracked elsewhere


def test_a_command_of_one_process_needs_one_gpu_whatever_the_training_had(monkeypatch):
    config = build("cluster.device=cuda", "cluster.num_processes=4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    validate(config, "diagnose")
    for command in ("train", "evaluate"):
        with pytest.raises(ConfigError, match="4 processes .* torch sees 1; .*Set cluster.num_processes=1"):
            validate(config, command)


def test_derived_numbers_by_hand():
    config = build(
        "algorithm=grpo", "rollout.num_envs=96", "rollout.num_chunks=20", "rollout.group_size=8", "cluster.num_processes=2",
        "trainer.minibatch_size=240", "trainer.max_steps=5", "algorithm.update_epochs=3", "model.micro_batch_size=40",
        "model.action_chunks_len=2", "sft.batch_size=160",
    )  # fmt: skip
    validate(config)
    plan = format_derived(config)
    assert "96 envs = 12 groups of 8 x 20 chunks = 1920 samples" in plan
    assert "8 of 240 x 3 epochs" in plan and "48 envs, 120 rows a minibatch in 3 micro-batches" in plan
    assert "5 iterations, 120 optimiser steps, up to 19,200 env steps" in plan
    config.sft.max_steps = 7
    assert "7 steps of 160 in 2 micro-batches per rank" in format_derived(config)


@pytest.mark.parametrize(
    ("number", "wanted", "of", "best"), [(96, 64, 1, 48), (1024, 100, 1, 128), (96, 5, 2, 4), (7, 3, 2, 7)]
)
def test_suggested_size_is_the_nearest_divisor_and_is_listed(number, wanted, of, best):
    assert validation.nearest_divisor(number, wanted, of) == best
    assert str(best) in validation.divisors_text(number, wanted, of).split(", ")


def test_an_env_without_cameras_suggests_no_model_of_zero_images():
    words = ["model=openvla_tiny", "env=gymnasium", "env.id=Pendulum-v1", "env.tasks=null"]
    with pytest.raises(ConfigError, match=r"env\.cameras lists 0: \[\]. Set model=mlp") as caught:
        validate(build(*words))
    assert "num_images_in_input=0" not in str(caught.value)


def test_a_state_policy_that_reads_nothing_is_refused_and_a_picture_policy_is_not():
    with pytest.raises(ConfigError, match="state_dim=0; expected at least 1"):
        validate(build_config(compose_config(["experiment=tabletop_ppo_mlp", "model.init_config.state_dim=0"])))
    validate(build_config(compose_config(["experiment=tabletop_ppo_cnn", "env.state=proprio"])))


def test_a_good_configuration_is_checked_in_few_modules():
    """Each module that ``validate`` calls is one that a reader of a rejection may have to open."""
    package = Path(rlinf.__file__).parent
    config, called = build_config(compose_config(["experiment=quickstart"])), set()

    def note(frame, event, _argument):
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(package):
            called.add(Path(frame.f_code.co_filename).relative_to(package).as_posix())

    validate(config)  # imports what is imported at first use, whose module bodies are no calls of functions
    sys.setprofile(note)
    try:
        validate(config)
    finally:
        sys.setprofile(None)
    assert {"preflight/validation.py", "envs/base.py", "algorithms/base.py"} <= called
    assert len(called) <= 20, sorted(called)
