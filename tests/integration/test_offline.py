"""Demonstrations and the buffer of another run as what an actor learns from, besides its own episodes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from offpolicy_runs import all_tensors, collected, config_of
from run_results import metrics_of

from rlinf.commands.train import build, train
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction
from rlinf.offpolicy.replay import offline_bytes, replay_bytes
from rlinf.preflight.memory import estimate_memory, policy_on_meta_device


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    """Eight episodes of the scripted expert, some of them cut."""
    return collected(tmp_path_factory.mktemp("demonstrations") / "data")


@pytest.fixture(autouse=True)
def answers_of_frozen_policies_are_kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def offline(folder: Path, *more: str) -> list[str]:
    return [f"algorithm.offline_dataset={folder}", "algorithm.offline_ratio=0.5", "env.reward_mode=sparse", *more]


def test_demonstrations_are_proposed_once_and_counted_apart(tmp_path, demonstrations, monkeypatch, capsys):
    rows, real = [], MLPForRLActionPrediction._propose

    def counted(self, inputs, uniforms):
        rows.append(len(inputs["state"]))
        return real(self, inputs, uniforms)

    monkeypatch.setattr(MLPForRLActionPrediction, "_propose", counted)
    monkeypatch.setattr("rlinf.training.loop.Loop.evaluate_once", lambda self, tag: None)
    for number in range(2):
        rows.clear()
        train(config_of(tmp_path / str(number), "trainer.max_steps=2", *offline(demonstrations)))
        last = metrics_of(tmp_path / str(number))[-1]
        of_demonstrations = last["rollout/base_policy_queries_offline"]
        assert sum(rows) == last["rollout/base_policy_queries"] + of_demonstrations
        assert (of_demonstrations > 8) == (number == 0)
        assert 0 < last["rollout/success_rate_offline"] < 1 and "8 demonstrations, " in capsys.readouterr().err
        assert last["train/q_mean_offline"] != last["train/q_mean_online"]
        both = last["train/q_mean_offline"] + last["train/q_mean_online"]
        assert last["train/q_mean"] == pytest.approx(both / 2, abs=1e-6)
    one, two = (all_tensors(tmp_path / name / "checkpoints" / "rl_000002") for name in ("0", "1"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items() if name != "offline.num_queries")
    others = ["algorithm.offline_episodes=successes", f"resume={tmp_path / '0'}", "trainer.max_steps=3"]
    with pytest.raises(CheckpointError, match="not trained with the demonstrations of .*=successes. Set both as in"):
        train(config_of(tmp_path / "0", *offline(demonstrations), *others))
    resumed = ["env.reward_mode=sparse", *others[1:]]
    with pytest.raises(
        ConfigError, match="was trained with demonstrations; expected the demonstrations of the run"
    ) as error:
        config_of(tmp_path / "0", *resumed)
    fix = str(error.value).rpartition("Set ")[2].partition(", or")[0]
    config_of(tmp_path / "0", *resumed, *fix.split())


def test_a_run_begins_with_the_buffer_of_another_one_of_the_same_frozen_policy(tmp_path, demonstrations):
    train(config_of(tmp_path / "one", "trainer.max_steps=2"))
    source = f"algorithm.replay_from={tmp_path / 'one'}"
    trainer = build(config_of(tmp_path / "two", source, "algorithm.replay_capacity=200", "rollout.num_envs=2")).rl
    trainer.make_parts(trainer.parts.worker.model)
    saved = all_tensors(tmp_path / "one" / "checkpoints" / "rl_000002")
    assert trainer.replay.num_transitions == int(saved["replay.has_action"].sum()) == 80
    assert (
        trainer.transitions.num_base_queries == 0 and trainer.largest_return == float(saved["loop.largest_return"]) > 0
    )
    other = build(config_of(tmp_path / "three", source, "seed=1")).rl
    with pytest.raises(CheckpointError, match="a different frozen policy.*Set init_from="):
        other.make_parts(other.parts.worker.model)
    for overrides, fragment in (
        (["env.reward_mode=sparse"], "env.reward_mode=shaped, but this run has env.reward_mode=sparse"),
        (["env.tolerance_m=0.02"], "env.tolerance_m=0.045, but this run has env.tolerance_m=0.02"),
        (["model.features=pooled"], "model.features=hidden"),
        (["model.action_chunks_len=2"], "model.action_chunks_len=1"),
        (["algorithm.actor.name=expo"], "algorithm.actor.name=residual"),
        (["sft.max_steps=1", "sft.batch_size=4"], "Set sft.max_steps=0 init_from="),
    ):
        with pytest.raises(ConfigError, match=fragment):
            config_of(tmp_path / "four", source, *overrides)
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "one" / "checkpoints" / "rl_000002", changed)
    manifest = json.loads((changed / "manifest.json").read_text())
    manifest["normalization"]["unnorm_key"] = "another"
    (changed / "manifest.json").write_text(json.dumps(manifest))
    other = build(config_of(tmp_path / "five", f"algorithm.replay_from={changed}")).rl
    with pytest.raises(CheckpointError, match='from different conditions: normalization.unnorm_key: saved "another"'):
        other.make_parts(other.parts.worker.model)
    older = tmp_path / "older"  # than the key hold_steps, so it behaved as the default does
    shutil.copytree(tmp_path / "one" / "checkpoints" / "rl_000002", older)
    lines = (older / "config.yaml").read_text().splitlines(keepends=True)
    (older / "config.yaml").write_text("".join(line for line in lines if "hold_steps" not in line))
    config_of(tmp_path / "six", f"algorithm.replay_from={older}")
    with pytest.raises(ConfigError, match="but this run has env.hold_steps=3"):
        config_of(tmp_path / "six", f"algorithm.replay_from={older}", "env.hold_steps=3")
    without = tmp_path / "clone"
    shutil.copytree(tmp_path / "one" / "checkpoints" / "rl_000002", without)
    (without / "model" / "actor.json").unlink()
    with pytest.raises(ConfigError, match="has no replay buffer"):
        config_of(tmp_path / "four", f"algorithm.replay_from={without}")


def test_a_run_that_goes_on_after_cloning_takes_over_no_buffer_of_other_settings(tmp_path):
    cloning = ["sft.max_steps=1", "sft.num_demonstrations=4", "sft.batch_size=4", "trainer.max_steps=0"]
    train(config_of(tmp_path / "clone", *cloning))
    begun = [f"init_from={tmp_path / 'clone'}", "trainer.max_steps=1", "trainer.save_every=1"]
    train(config_of(tmp_path / "one", *begun))
    resumed = [*cloning[:3], f"resume={tmp_path / 'clone'}", f"algorithm.replay_from={tmp_path / 'one'}"]
    for overrides, fragment in (
        (["algorithm.actor.name=expo"], "algorithm.actor.name=residual"),
        (["env.reward_mode=sparse"], "env.reward_mode=shaped, but this run has"),
        (["sft.max_steps=2"], "Set sft.max_steps=0 init_from=.* resume=null"),
    ):
        with pytest.raises(ConfigError, match=fragment):
            config_of(tmp_path / "clone", *resumed, *overrides)
    trainer = build(config_of(tmp_path / "clone", *resumed)).rl  # the control: the same
    trainer.make_parts(trainer.parts.worker.model)
    assert trainer.replay.num_transitions == 40
    own = [f"resume={tmp_path / 'one'}", "trainer.max_steps=2", resumed[-1], "env.reward_mode=sparse"]
    with pytest.raises(ConfigError, match="the same rewards"):  # its own buffer, not the other one
        config_of(tmp_path / "one", *own)


def test_demonstrations_that_teach_nothing_are_refused(tmp_path, demonstrations):
    """With the override of the message the configuration is accepted."""
    data, share = f"algorithm.offline_dataset={demonstrations}", "algorithm.offline_ratio=0.5"
    shaped = "env.reward_mode=shaped"
    for overrides, fragment, number in (
        ([share], "without algorithm.offline_dataset", 1),
        ([data], "offline_ratio=0 of algorithm.batch_size=16; expected at least one transition", 0),
        ([data, "algorithm.offline_ratio=0.01"], "at least one transition per batch", 0),
        ([data, share, "env.success_bonus=2"], "was collected with env.reward_mode=shaped env.success_bonus=1", 0),
        ([data, share, "env.reward_mode=relative"], "rewards of this env", 1),
        ([data, share, shaped, "algorithm.offline_episodes=assume_success"], "a reward only for success", 0),
    ):
        with pytest.raises(ConfigError, match=fragment) as error:
            config_of(tmp_path, *overrides)
        fix = str(error.value).rpartition("Set ")[2].split(", or ")[number].partition(", for")[0]
        config_of(tmp_path, *overrides, *fix.split())
    for overrides, fragment in (
        (["env.tolerance_m=0.02"], "tolerance_m"),
        (["model.action_token_len=3"], "The actions of .* have 2 dimensions"),
        (["algorithm.offline_dataset=nowhere"], "algorithm.offline_dataset is 'nowhere', which is not a folder"),
    ):
        with pytest.raises(ConfigError, match=fragment):
            config_of(tmp_path, data, share, *overrides)
    mute = tmp_path / "mute"
    shutil.copytree(demonstrations, mute)
    info = json.loads((mute / "meta" / "info.json").read_text())
    info["features"] = {name: one for name, one in info["features"].items() if not name.startswith("next.")}
    (mute / "meta" / "info.json").write_text(json.dumps(info))
    untold = offline(mute)
    with pytest.raises(ConfigError, match="has neither rewards nor successes") as error:
        config_of(tmp_path, *untold)
    fix = str(error.value).rpartition("Set ")[2].partition(" if each")[0]
    assert fix == "algorithm.offline_episodes=assume_success env.reward_mode=sparse"
    run = build(config_of(tmp_path, *untold, *fix.split()))
    run.rl.make_parts(run.parts.worker.model)
    assert run.rl.offline.data.success_rate == 1
    assert run.rl.offline.data.replay.num_bytes <= offline_bytes(run.parts.config.algorithm, run.parts.worker.model)


def test_the_machine_must_hold_demonstrations_too(tmp_path, demonstrations, monkeypatch):
    config = config_of(tmp_path, *offline(demonstrations))
    model = policy_on_meta_device(config)
    buffer, data = replay_bytes(config.algorithm, model), offline_bytes(config.algorithm, model)
    assert estimate_memory(config).rollout_buffer == buffer + data and 0 < data < buffer
    without = buffer + sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr("rlinf.offpolicy.replay.main_memory_bytes", lambda: int((without + data / 2) / 0.8))
    with pytest.raises(ConfigError, match="demonstrations 0.0 GB, and the policy") as error:
        config_of(tmp_path, *offline(demonstrations))
    config_of(tmp_path, *offline(demonstrations), str(error.value).rpartition("Set ")[2])
    config_of(tmp_path)
