"""An actor that learns off-policy on a frozen policy: the run as a whole, from the command's configuration to the export."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from offpolicy_runs import SMALL, all_tensors, collected, config_of
from run_results import differing_weights, metrics_of, run_config, untimed_metrics
from safetensors.torch import load_file, save_file

import rlinf
from rlinf.algorithms.offpolicy_config import ActorConfig, SACConfig
from rlinf.checkpoints.trainer_state import read_tensors
from rlinf.cluster.factory import env_maker
from rlinf.commands.export import export, random_observation
from rlinf.commands.train import build, train
from rlinf.errors import CheckpointError, ConfigError, NonFiniteError
from rlinf.models.actors.base import Critics
from rlinf.models.embodiment.actor_policy import uniforms_from_inputs
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction
from rlinf.models.embodiment.modules.readout_token import holds_readout_token
from rlinf.offpolicy.algorithms import SAC
from rlinf.offpolicy.checks import rounded_down, update_seconds
from rlinf.offpolicy.episodes import EpisodeStats, largest_value
from rlinf.offpolicy.replay import replay_bytes
from rlinf.offpolicy.transitions import CallOutcome
from rlinf.preflight.memory import estimate_memory, policy_on_meta_device
from rlinf.preflight.validation import validate
from rlinf.tracking.tracker import read_metrics
from rlinf.types import BaseActions, EpisodeResult


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    """Eight episodes of the scripted expert, some of them cut."""
    return collected(tmp_path_factory.mktemp("demonstrations") / "data")


@pytest.fixture(autouse=True)
def answers_of_frozen_policies_are_kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_two_and_two_iterations_with_demonstrations_equal_four_bit_for_bit(tmp_path, demonstrations):
    more = [f"algorithm.offline_dataset={demonstrations}", "algorithm.offline_ratio=0.5", "trainer.save_every=2"]
    train(config_of(tmp_path / "whole", *more))
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # of what the frozen policy says of demonstrations
    train(config_of(tmp_path / "halves", *more, "trainer.max_steps=2"))
    train(config_of(tmp_path / "halves", *more, f"resume={tmp_path / 'halves'}"))
    whole, halves = (all_tensors(tmp_path / name / "checkpoints" / "rl_000004") for name in ("whole", "halves"))
    assert not differing_weights(whole, halves) and "offline.generator" in whole
    assert untimed_metrics(tmp_path / "whole")[-2] == untimed_metrics(tmp_path / "halves")[-2]


def test_the_learning_rates_of_a_head_decay_over_the_iterations(tmp_path):
    run = build(config_of(tmp_path, "trainer.lr_decay=linear", "algorithm.learning_rate=1e-3"))
    run.execute()
    rates = [each.optimizer.param_groups[0]["lr"] for each in run.rl.learner.steps.values()]
    assert rates == pytest.approx([0.25e-3] * 2) and run.rl.learner.num_updates > 0


def test_the_frozen_policy_is_asked_once_about_each_observation_and_never_changes(tmp_path, monkeypatch):
    """Env steps, the true last observations of episodes that the time limit cut, and those at the end of an iteration."""
    rows, real = [], MLPForRLActionPrediction._propose

    def counted(self, inputs, samples):
        rows.append(len(inputs["state"]))
        return real(self, inputs, samples)

    run = build(config_of(tmp_path, "trainer.max_steps=2"))
    before = {name: tensor.clone() for name, tensor in run.parts.worker.model.state_dict().items()}
    monkeypatch.setattr(run.loop, "evaluate_once", lambda tag: None)
    monkeypatch.setattr(MLPForRLActionPrediction, "_propose", counted)
    run.execute()
    trainer, last = run.rl, metrics_of(tmp_path)[-1]
    assert sum(rows) == last["rollout/base_policy_queries"] == trainer.transitions.num_base_queries
    replay = trainer.replay
    assert sum(rows) == int(replay.counts.sum())  # each is one slot of the buffer
    steps, ends = last["rollout/env_steps_total"], int(replay.counts.sum() - replay.has_action.sum())
    assert steps == 80 and sum(rows) == steps + ends and 8 <= ends <= 2 * (4 + 4)  # those that terminated need no value
    assert len(rows) <= 2 * (10 + 1 + 10)
    for name, tensor in trainer.policy.base.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert any(bool(parameter.abs().sum() > 0) for parameter in trainer.policy.actor.network[-1].parameters())


def test_updates_per_env_step_above_and_below_one(tmp_path):
    for rate, wanted in ((0.3, 15), (2.0, 100)):
        folder = tmp_path / str(rate)
        train(config_of(folder, "trainer.max_steps=2", f"algorithm.utd_ratio={rate}"))
        # 80 env steps; the first 8 steps of 4 envs are the warm-up, in which 30 is reached.
        found = next(line for line in reversed(metrics_of(folder)) if "train/updates_total" in line)
        assert found["train/updates_total"] == int(rate * (80 - 32)) == {15: 14, 100: 96}[wanted]


def test_the_first_evaluation_equals_that_of_the_frozen_policy(tmp_path):
    cloning = [
        "sft.max_steps=60", "sft.num_demonstrations=40", "sft.batch_size=64", "sft.learning_rate=0.003",
        "env.state=full",
    ]  # fmt: skip
    train(config_of(tmp_path / "clone", *cloning, "trainer.max_steps=0"))
    train(config_of(tmp_path / "run", "env.state=full", "trainer.max_steps=1", f"init_from={tmp_path / 'clone'}"))

    def episodes(folder: str) -> list[dict]:
        return json.loads((tmp_path / folder / "result.json").read_text())["results"]

    assert episodes("clone/eval/after_sft") == episodes("run/eval/before_rl")
    assert episodes("run/eval/before_rl") != episodes(
        "run/eval/after_rl"
    )  # the control: an actor that has learnt acts otherwise


@pytest.mark.parametrize("actor", ["residual", "direct", "expo", "rlt", "dsrl"])
def test_the_exported_policy_acts_as_the_trained_one(tmp_path, actor):
    run = build(config_of(tmp_path / "run", "trainer.max_steps=2", f"algorithm.actor.name={actor}"))
    run.execute()
    written = any("train/action_saturation" in line for line in read_metrics(tmp_path / "run"))
    assert written == (actor != "direct"), "numbers at the bounds of the env are not those that a scale cuts"
    trained = run.rl.policy.eval()
    export(tmp_path / "run", tmp_path / "export")
    observation = random_observation(run.parts.config, trained.base, num_rows=1000)
    actions = trained.predict_action_batch(do_sample=False, **trained.preprocess(observation)).actions.numpy()
    assert np.array_equal(rlinf.load_policy(tmp_path / "export").act(observation), actions)
    assert np.array_equal(rlinf.load_policy(tmp_path / "run").act(observation), actions)
    base = trained.base.predict_action_batch(do_sample=False, **trained.preprocess(observation)).actions.numpy()
    assert not np.allclose(base, actions, atol=1e-3)  # the control
    assert (settings := json.loads((tmp_path / "export" / "actor.json").read_text()))["actor"]["name"] == actor
    (tmp_path / "export" / "actor.json").write_text(json.dumps(settings | {"feature_dim": 7}))
    with pytest.raises(CheckpointError, match="reads 7 features"):
        type(trained).load(trained.base, tmp_path / "export")
    (tmp_path / "export" / "actor.safetensors").unlink()
    with pytest.raises(CheckpointError):
        rlinf.load_policy(tmp_path / "export")


def test_each_observation_of_an_evaluation_has_candidates_of_its_own_and_always_the_same():
    generator = torch.Generator().manual_seed(1)
    inputs = {"images": torch.rand(400, 3, 2, 2, generator=generator), "tokens": torch.arange(400)[:, None]}
    drawn = uniforms_from_inputs(inputs, 400, 6)
    some = {"images": inputs["images"][[7, 3]], "tokens": torch.zeros(2, 5, dtype=torch.int64)}  # padded otherwise
    assert torch.equal(uniforms_from_inputs(some, 2, 6), drawn[[7, 3]])
    assert len(drawn.unique(dim=0)) == 400 and 0 < drawn.min() < 0.01 and 0.99 < drawn.max() < 1
    torch.testing.assert_close(drawn.mean(0), torch.full((6,), 0.5), atol=0.06, rtol=0)  # 4 deviations of a mean
    other = inputs | {"images": inputs["images"].bfloat16()}
    assert not torch.equal(uniforms_from_inputs(other, 400, 6), drawn), "the control: other images"
    images = {"images": torch.arange(400, dtype=torch.int32)[:, None].view(torch.uint8), "token_ids": inputs["tokens"]}
    assert len(uniforms_from_inputs(images, 400, 6).unique(dim=0)) == 400, "a policy that takes images as bytes"
    assert uniforms_from_inputs(inputs, 400, 0).shape == (400, 0)


@pytest.mark.parametrize(
    ("actor", "wanted"),
    [("residual", [0.5, 0.2]), ("expo", [0.5, 0.2]), ("rlt", [0.5, 0.2]), ("direct", [-0.5, 0.2])],
)
def test_the_env_executes_what_the_buffer_stores_also_for_chunks_out_of_bounds(tmp_path, actor, wanted):
    """Bounds -1 and 1, base (1.5, 0), r (-0.5, 0.2): the base counts as (1, 0)."""
    trainer = build(config_of(tmp_path, f"algorithm.actor.name={actor}")).rl
    trainer.make_parts(trainer.parts.worker.model)
    policy = trainer.policy
    num_candidates = policy.actor.num_candidates
    chunks = torch.tensor([1.5, 0.0]).expand(1, num_candidates, 1, 2)
    assert policy.action_low.tolist() == [-1, -1] and policy.action_high.tolist() == [1, 1]
    stored = policy.actor.compose(policy.normalize(chunks), torch.tensor([[-0.5, 0.2]]))
    torch.testing.assert_close(stored, torch.tensor([wanted]))
    torch.testing.assert_close(policy.env_actions(BaseActions(chunks, torch.zeros(1, 1)), stored).flatten(1), stored)


def test_a_head_of_noise_decides_what_the_frozen_policy_samples(tmp_path):
    trainer = build(config_of(tmp_path, "algorithm.actor.name=dsrl", "algorithm.actor.scale=1.5")).rl
    trainer.make_parts(trainer.parts.worker.model)
    policy, base = trainer.policy, trainer.policy.base
    observation = random_observation(trainer.parts.config, base, num_rows=5)
    inputs = policy.preprocess(observation)
    greedy = base.predict_action_batch(do_sample=False, **inputs).actions
    started = policy.predict_action_batch(do_sample=False, **inputs).actions  # the median of a Gaussian is its mode
    torch.testing.assert_close(started, greedy.clamp(policy.action_low, policy.action_high))
    r = torch.rand(5, policy.actor.output_dim) * 2 - 1
    executed = policy.env_actions(policy.query_base(inputs, torch.empty(5, 0)), r)
    wanted = base.predict_action_batch(uniforms=torch.special.ndtr(1.5 * r), **inputs).actions
    torch.testing.assert_close(executed, wanted.clamp(policy.action_low, policy.action_high), atol=1e-5, rtol=1e-5)
    assert (executed - started).abs().max() > 0.1
    assert policy.query_base(inputs, torch.empty(5, 0)).sample is not None
    other = build(config_of(tmp_path / "residual")).rl
    other.make_parts(other.parts.worker.model)
    assert other.policy.query_base(inputs, torch.empty(5, 0)).sample is None, "memory of images is given back"


def test_a_policy_without_random_numbers_has_no_noise_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr(MLPForRLActionPrediction, "num_candidate_uniforms", 0)
    with pytest.raises(
        ConfigError, match="uses none; expected a policy that samples.*Set algorithm.actor.name=residual"
    ):
        config_of(tmp_path, "algorithm.actor.name=dsrl")


def test_features_of_a_token_need_one_that_cloning_has_trained(tmp_path):
    with pytest.raises(ConfigError, match="MLPFor.* no hidden states of images and prompt.*Set model.features=hidden"):
        config_of(tmp_path, "model.features=token")
    token = ["model=openvla_tiny", "model.features=token", "env.cameras=null"]
    with pytest.raises(ConfigError, match="random weights has not been trained for it"):
        config_of(tmp_path, *token)
    config_of(tmp_path, *token, "sft.max_steps=1", "sft.num_demonstrations=4", "sft.batch_size=8")
    save_file({"value_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert not holds_readout_token(tmp_path)
    save_file({"readout_token.token": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    assert holds_readout_token(tmp_path)


def test_another_buffer_is_refused_when_a_run_is_resumed(tmp_path):
    train(config_of(tmp_path, "trainer.max_steps=1"))
    more = [f"resume={tmp_path}", "trainer.max_steps=2"]
    with pytest.raises(
        CheckpointError,
        match="25 observations for each of 4 envs, but this run has 50.*Set algorithm.replay_capacity=100",
    ):
        train(config_of(tmp_path, *more, "algorithm.replay_capacity=200"))
    train(config_of(tmp_path, *more))


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["algorithm.actor.name=residul"], "Set algorithm.actor.name=residual"),
        (["algorithm.num_target_critics=3"], "algorithm.num_target_critics=3 of 2 critics.*Set algorithm.num_target_critics=2"),
        (["algorithm.n_step=9"], "n_step=9 policy calls of 1 env steps; expected at most the 8 calls"),
        (["algorithm.utd_ratio=1e6"], "about .* s; expected at most 60 s.*Set algorithm.utd_ratio="),
        (["algorithm.replay_capacity=4"], "at least 2 observations per env"),
        (["algorithm.replay_capacity=4000000000"], "GB; expected at most .* GB, 80% of the memory of this machine"),
        (["rollout.num_chunks=7"], "7 env steps per iteration.*Set rollout.num_chunks=8"),
        (["rollout.auto_reset=false"], "Set rollout.auto_reset=true"),
        (["algorithm.utd_ratio=0"], "Set algorithm.utd_ratio=0.5"),
        (["algorithm.learning_rate=0"], "Set algorithm.learning_rate=0.0005"),
        (["algorithm.tau=0"], "Set algorithm.tau=0.01"),
        (["algorithm.learning_starts=160"], "run of at most 160 env steps.*Set algorithm.learning_starts=40"),
        (["cluster.num_processes=3"], "rollout.num_envs=4; expected a multiple of cluster.num_processes=3"),
        (["cluster.max_staleness=1"], "algorithm.overlap=true updates while the envs step. Set cluster.max_staleness=0"),
        (["rollout.worker_processes=2"], "Set rollout.worker_processes=0"),
        (["trainer.sharding=fsdp2"], "Set trainer.sharding=replicate"),
        (["model.is_lora=true"], "freezes the policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(tmp_path, overrides, fragment):
    with pytest.raises(ConfigError, match=fragment):
        config_of(tmp_path, *overrides)


@pytest.mark.parametrize(
    "more", [["algorithm.batch_size=128"], ["algorithm.num_critics=10"], ["algorithm.actor.hidden_size=512"]]
)
def test_the_number_of_updates_that_is_named_is_accepted(tmp_path, more):
    """Also where two digits would round it up. The estimate grows with the critics and their width."""
    with pytest.raises(ConfigError, match="after each policy call") as error:
        config_of(tmp_path, *more, "algorithm.utd_ratio=1e6")
    override = str(error.value).rpartition("Set ")[2]
    config_of(tmp_path, *more, override)
    rate = 1.2 * float(override.partition("=")[2])  # the control: little more is rejected
    with pytest.raises(ConfigError, match="after each policy call"):
        config_of(tmp_path, *more, f"algorithm.utd_ratio={rate}")


@pytest.mark.parametrize(
    ("number", "text"), [(2867.0, "2800"), (0.0199, "0.019"), (1.0, "1"), (9.99e-7, "9.9e-07"), (100.0, "100")]
)
def test_limits_are_rounded_down(number, text):
    assert rounded_down(number) == text and float(text) <= number


def test_an_update_takes_longer_with_more_and_wider_critics():
    model = SimpleNamespace(feature_dim=256, action_dim=2, action_chunks_len=1)
    of = [update_seconds(SACConfig(num_critics=n, actor=ActorConfig(name="residual", hidden_size=w), batch_size=b), model) for n, w, b in
          ((2, 128, 128), (10, 128, 128), (10, 512, 128), (10, 512, 256))]  # fmt: skip
    assert of == sorted(of) and of[-1] > 10 * of[0]


def test_an_update_takes_longer_where_the_critics_choose_among_more(monkeypatch):
    """118 ms were measured with 64 candidates, 5.4 ms without any."""
    model = SimpleNamespace(feature_dim=256, action_dim=2, action_chunks_len=1)
    actors = [
        ActorConfig(name=name, num_candidates=count) for name, count in (("residual", 64), ("expo", 4), ("expo", 64))
    ]
    without, few, many = (update_seconds(SACConfig(actor=actor), model) for actor in actors)
    assert without < few < many and many == pytest.approx(0.118, rel=0.25)


def test_updates_on_a_gpu_are_not_timed_as_those_of_one_core(tmp_path, monkeypatch):
    wide = [
        "algorithm.actor.hidden_size=1024",
        "algorithm.num_critics=10",
        "algorithm.batch_size=256",
        "algorithm.utd_ratio=100",
    ]
    with pytest.raises(ConfigError, match="after each policy call"):
        config_of(tmp_path, *wide)
    monkeypatch.setattr("rlinf.offpolicy.checks.resolve_device", lambda *_: "cuda")
    config_of(tmp_path, *wide)
    with pytest.raises(ConfigError, match="after each policy call"):  # the control: too many for a GPU, too
        config_of(tmp_path, *wide, "algorithm.utd_ratio=1e5")


def test_the_machine_must_hold_policy_and_buffer_and_more(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    model = policy_on_meta_device(config)
    needed = replay_bytes(config.algorithm, model) + sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr("rlinf.offpolicy.replay.main_memory_bytes", lambda: int(needed / 0.79))
    config_of(tmp_path)
    monkeypatch.setattr("rlinf.offpolicy.replay.main_memory_bytes", lambda: int(needed / 0.81))
    with pytest.raises(ConfigError, match="and the policy .* GB; expected at most") as error:
        config_of(tmp_path)
    config_of(tmp_path, str(error.value).rpartition("Set ")[2])


def test_copies_are_no_candidates(tmp_path, monkeypatch):
    monkeypatch.setattr(MLPForRLActionPrediction, "num_candidate_uniforms", 0)
    with pytest.raises(ConfigError, match="all candidates are equal.*Set algorithm.actor.num_candidates=1"):
        config_of(tmp_path, "algorithm.actor.name=expo")
    config_of(tmp_path, "algorithm.actor.name=expo", "algorithm.actor.num_candidates=1")
    config_of(tmp_path)


def test_an_env_without_bounds_is_refused_before_anything_is_cloned(tmp_path, monkeypatch):
    config = config_of(tmp_path, "sft.max_steps=1", "sft.batch_size=4")
    real = env_maker(config, 1)

    def endless(num_envs, auto_reset):
        env = real(num_envs, auto_reset=auto_reset)
        env.action_high = np.array([1.0, np.inf], dtype=np.float32)
        return env

    monkeypatch.setattr("rlinf.offpolicy.trainer.env_maker", lambda *_: endless)
    with pytest.raises(ConfigError, match="expected finite bounds"):
        build(config)


def test_a_policy_that_does_not_propose_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(MLPForRLActionPrediction, "_propose")
    with pytest.raises(ConfigError, match="does not implement propose.*Set algorithm=ppo"):
        config_of(tmp_path)


def test_policy_gradients_do_not_take_a_policy_with_a_head(tmp_path):
    train(config_of(tmp_path / "run", "trainer.max_steps=1"))
    on_policy = [item for item in SMALL if not item.startswith("algorithm")]
    with pytest.raises(ConfigError, match="contains an actor.*Set algorithm=sac"):
        validate(run_config(tmp_path / "ppo", *on_policy, f"init_from={tmp_path / 'run'}", "trainer.minibatch_size=40"))


def test_critics_that_diverge_and_a_scale_that_is_too_small_are_named_once(tmp_path, caplog):
    trainer = build(config_of(tmp_path)).rl
    trainer.make_parts(trainer.parts.worker.model)
    trainer.replay.rewards[0, 0] = -1.0  # with gamma 0.95, no return is beyond 20
    for expected, share in ((-39.0, 0.4), (-41.0, 0.6), (-41.0, 0.6)):
        trainer._warn({"train/q_mean": expected, "train/action_saturation": share})
        if share == 0.4:
            assert not caplog.records
    lines = [record.getMessage() for record in caplog.records if record.name == "rlinf"]
    assert len(lines) == 2 and trainer.largest_return == 0
    assert "predict -41 on average" in lines[0] and "allow at most 20" in lines[0]
    assert "60% of the actor's outputs" in lines[1] and lines[1].endswith("Set algorithm.actor.scale=2")


def test_critics_that_expect_more_than_episodes_with_one_reward_are_named(tmp_path, caplog):
    """A reward of 1 that is paid once allows 1, and not the 20 of one in each step."""
    trainer = build(config_of(tmp_path, "env.reward_mode=sparse", "trainer.max_steps=1")).rl
    trainer.make_parts(trainer.parts.worker.model)
    trainer.replay.rewards[0, 0] = 1.0
    trainer._warn({"train/q_mean": 3.0})  # the control: no episode has ended
    episodes = EpisodeStats(2, gamma=0.95)
    one, nothing, ran = np.array([[0.0, 1.0]] * 2), np.zeros((2, 2)), np.ones((2, 2), dtype=bool)
    episode = EpisodeResult(None, "reach", True, 1.0, 4)
    episodes.values = np.zeros(2)
    none = np.array([], int)
    episodes.add(CallOutcome(nothing, ran, None, none, none, [], none, None, None))
    assert episodes.largest_return == 0
    episodes.add(CallOutcome(one, ran, None, np.array([1]), np.array([False]), [episode], none, None, None))
    trainer.largest_return = max(trainer.largest_return, episodes.largest_return)
    trainer._warn({"train/q_mean": 1.9})
    assert trainer.largest_return == 1 and not caplog.records
    trainer._warn({"train/q_mean": 2.1})
    assert "predict 2.1 on average" in caplog.text and "allow at most 1" in caplog.text


def test_the_calibration_counts_first_episodes_that_ended_one_that_was_cut_with_what_it_had():
    """Four envs, gamma 0.5: an end, a cut, a simulator that is lost, and an episode that continues. The second call ends a second episode."""
    episodes = EpisodeStats(4, gamma=0.5)
    episodes.values = np.array([0.5, 0.25, 9.0, 9.0])
    rewards, ran = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), np.ones((4, 2), dtype=bool)
    ended = [EpisodeResult(None, "reach", good, 1.0, 2) for good in (True, False)]
    episodes.add(
        CallOutcome(rewards, ran, None, np.array([0, 1]), np.array([False, True]), ended, np.array([2]), None, None)
    )
    none = np.array([], int)
    episodes.add(CallOutcome(rewards, ran, None, np.array([0]), np.array([False]), ended[:1], none, None, None))
    assert episodes.calibration == [(0.5, 1.5), (0.25, 0.5)], (
        "1 + 0.5, and 0.5 * 1 with nothing for what follows the cut"
    )
    metrics = episodes.metrics()
    assert (metrics["train/q_initial"], metrics["train/return_initial"]) == (0.375, 1.0)


def test_features_that_are_not_finite_stop_the_run_already_in_the_warm_up(tmp_path, monkeypatch):
    propose = MLPForRLActionPrediction._propose

    def damaged(self, inputs, samples):
        proposal = propose(self, inputs, samples)
        return proposal._replace(features=proposal.features + torch.inf)

    trainer = build(config_of(tmp_path)).rl
    trainer.make_parts(trainer.parts.worker.model)
    trainer.iteration(0)  # the control: 40 env steps, of which 30 are the warm-up
    monkeypatch.setattr(MLPForRLActionPrediction, "_propose", damaged)
    with pytest.raises(NonFiniteError, match="not finite for 4 of 4 observations.*Set model.precision=fp32"):
        trainer.iteration(1)


def test_weights_that_an_update_has_spoilt_are_not_saved(tmp_path, monkeypatch):
    """A finite loss with an infinite gradient, in the last update of an iteration."""
    actor_loss = SAC.actor_loss

    def root_of_zero(self, batch):
        loss, metrics = actor_loss(self, batch)
        return loss + (0 * next(self.actor.parameters()).sum()).sqrt(), metrics

    one_update = ["algorithm.learning_starts=35", "algorithm.utd_ratio=0.25"]
    trainer = build(config_of(tmp_path, *one_update)).rl
    trainer.make_parts(trainer.parts.worker.model)
    trainer.iteration(0)
    assert trainer.learner.num_updates == 1  # the control
    monkeypatch.setattr(SAC, "actor_loss", root_of_zero)
    trainer.config.utd_ratio = 0.026  # 1.04 updates, pending after the last policy call
    with pytest.raises(NonFiniteError, match="of the actor is not finite after 2 updates"):
        trainer.iteration(1)


def test_the_largest_value_of_an_episode_is_that_of_any_step_and_of_what_would_follow_a_cut():
    assert largest_value([0, 0, 1], 0.9, is_truncated=False) == 1
    assert largest_value([-1, -1], 0.5, is_truncated=False) == 1.5
    assert largest_value([1, 1, 1], 0.9, is_truncated=True) == pytest.approx(10)  # 1 in each step, for ever
    assert largest_value([0, 0], 0.9, is_truncated=True) == 0 and largest_value([1], 1.0, is_truncated=True) == np.inf
    assert largest_value([], 0.9, is_truncated=True) == 0


def test_settings_of_a_head_that_is_there_are_not_ignored(tmp_path):
    """With the override of the message the run continues, as a resumed one and as a new one."""
    sac = ["algorithm.actor.scale=0.5", "trainer.max_steps=1"]
    train(config_of(tmp_path / "sac", *sac))
    td3 = ["algorithm=td3", "algorithm.noise_std=0.3", *sac]
    train(config_of(tmp_path / "td3", *td3))

    def rejected(*overrides: str, match: str) -> str:
        with pytest.raises(ConfigError, match=match) as error:
            config_of(tmp_path / "new", "trainer.max_steps=2", *overrides)
        return str(error.value).rpartition("Set ")[2].partition(", or for a new run")[0]

    for key in ("resume", "init_from"):
        source = f"{key}={tmp_path / 'sac'}"
        override = rejected(source, match="actor.scale=0.5, here 1.0; expected the saved actor")
        assert override == "algorithm.actor.scale=0.5"
        config_of(tmp_path / "new", "trainer.max_steps=2", source, override)
        for more in ("algorithm.actor.name=direct", "algorithm.actor.hidden_size=32", "model.features=pooled"):
            assert "=" in rejected(source, override, more, match="trained with " + more.partition("=")[0])
        source = f"{key}={tmp_path / 'td3'}"
        override = rejected(source, "algorithm.actor.scale=0.5", match="algorithm.name=td3|noise of 0.3")
        assert override.startswith("algorithm=td3")
        config_of(
            tmp_path / "new",
            "trainer.max_steps=2",
            source,
            "algorithm.actor.scale=0.5",
            *override.split(),
            "algorithm.noise_std=0.3",
        )
        rejected(
            source,
            "algorithm=td3",
            "algorithm.actor.scale=0.5",
            match="noise of 0.3, here noise of 0.2.*Set algorithm.noise_std=0.3$",
        )
    rejected(
        f"init_from={tmp_path / 'sac'}",
        "algorithm=td3",
        "algorithm.actor.scale=0.5",
        match="learned noise.*Set algorithm=sac$",
    )
    override = rejected(f"resume={tmp_path / 'sac'}", *sac, "algorithm.num_critics=4", match="num_critics=2, here 4")
    assert override == "algorithm.num_critics=2"
    resumed = (f"resume={tmp_path / 'sac'}", *sac)
    changed, match = (
        ("env.reward_mode=sparse", "env.success_bonus=2"),
        "rewards of env.reward_mode=shaped env.success_bonus=1",
    )
    override = rejected(*resumed, *changed, match=match)
    config_of(tmp_path / "new", "trainer.max_steps=2", *resumed, *changed, *override.rstrip(",").split())
    config_of(
        tmp_path / "new", "trainer.max_steps=2", f"init_from={tmp_path / 'sac'}", *sac, *changed
    )  # an empty buffer


def test_a_run_of_another_algorithm_is_not_resumed(tmp_path):
    on_policy = [item for item in SMALL if not item.startswith("algorithm")]
    ppo = run_config(tmp_path / "ppo", *on_policy, "trainer.max_steps=1", "trainer.minibatch_size=40")
    validate(ppo)
    train(ppo)
    with pytest.raises(
        ConfigError, match="trained with algorithm.name=ppo.*Set algorithm=ppo, or for a new run init_from="
    ) as error:
        config_of(tmp_path / "ppo", f"resume={tmp_path / 'ppo'}")
    words = str(error.value).rpartition("for a new run ")[2].replace("<a new folder>", str(tmp_path / "new")).split()
    config_of(tmp_path / "new", *words)


def test_a_new_run_goes_on_with_the_critics_of_a_head_that_chooses(tmp_path):
    edit = ["algorithm.actor.name=expo", "trainer.max_steps=2"]
    train(config_of(tmp_path / "one", *edit))
    source = f"init_from={tmp_path / 'one'}"
    trainer = build(config_of(tmp_path / "two", *edit, source)).rl
    trainer.make_parts(trainer.parts.worker.model)
    saved = load_file(tmp_path / "one" / "checkpoints" / "rl_000002" / "model" / "actor.safetensors")
    for critics in (trainer.learner.critics, trainer.learner.targets, trainer.policy.critics):
        for name, tensor in critics.state_dict().items():
            assert torch.equal(tensor, saved[f"critics.{name}"]), name
    assert trainer.policy.critics is trainer.learner.critics
    with pytest.raises(ConfigError, match="num_critics=2, here 3; .*Set algorithm.num_critics=2"):
        config_of(tmp_path / "two", *edit, source, "algorithm.num_critics=3")
    fewer = ActorConfig(hidden_size=16)
    with pytest.raises(CheckpointError, match="Set algorithm.num_critics=5"):
        trainer.learner.load_critics(Critics(fewer, trainer.policy.actor.critic_input_dim, 5))


def test_the_buffer_of_a_checkpoint_is_read_into_place(tmp_path, monkeypatch):
    train(config_of(tmp_path, "trainer.max_steps=1"))
    trainer = build(config_of(tmp_path, "trainer.max_steps=2", f"resume={tmp_path}")).rl
    read = {}

    def reading(folder, held):
        read.update(held)
        return read_tensors(folder, held)

    monkeypatch.setattr("rlinf.offpolicy.trainer.read_tensors", reading)
    trainer.make_parts(trainer.parts.worker.model)
    for name, tensor in trainer.replay.tensors.items():
        assert read[f"replay.{name}"].data_ptr() == tensor.data_ptr()
        assert torch.equal(
            tensor[: len(read[f"replay.{name}"])], all_tensors(tmp_path / "checkpoints" / "rl_000001")[f"replay.{name}"]
        )
    assert trainer.replay.num_transitions > 0


def test_a_frozen_policy_has_no_optimiser_and_the_one_of_cloning_goes(tmp_path, capsys):
    """It would hold moments, and float32 masters of 16-bit weights; the estimate counts none."""
    run = build(config_of(tmp_path / "frozen", "trainer.max_steps=1"))
    assert run.parts.worker.optimizer is None
    run.execute()
    assert "rollout workers per rank: the thread that updates\n" in capsys.readouterr().out
    estimate = estimate_memory(run.parts.config)
    assert (estimate.masters, estimate.gradients, estimate.optimizer) == (0, 0, 0)
    assert estimate.rollout_buffer == run.rl.replay.num_bytes
    train(config_of(tmp_path / "frozen", "trainer.max_steps=2", f"resume={tmp_path / 'frozen'}"))
    more = ["sft.max_steps=2", "sft.num_demonstrations=4", "sft.batch_size=8", "env.state=full", "trainer.max_steps=1"]
    run = build(config_of(tmp_path / "cloned", *more))
    optimizer = weakref.ref(run.parts.worker.optimizer)
    assert optimizer() is not None  # the control
    estimate = estimate_memory(run.parts.config)
    assert estimate.optimizer > 0 and estimate.rollout_buffer == replay_bytes(
        run.parts.config.algorithm, run.parts.worker.model
    )
    run.execute()
    gc.collect()
    assert run.parts.worker.optimizer is None and optimizer() is None
    assert all(parameter.grad is None for parameter in run.rl.policy.base.parameters())
