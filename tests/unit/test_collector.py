"""Rollouts: which episodes are played, what is recorded, and what stands behind the last step of an episode."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlinf.algorithms.advantages import gae
from rlinf.algorithms.config import GRPOConfig, PPOConfig, ReinforcePPConfig, RLOOConfig
from rlinf.algorithms.groups import GRPO, RLOO
from rlinf.algorithms.ppo import PPO
from rlinf.algorithms.reinforce_pp import ReinforcePP
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.config.training import TrainerConfig
from rlinf.envs import make_env
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.tabletop.env import TabletopVectorEnv
from rlinf.errors import SimulatorError
from rlinf.models import build_policy
from rlinf.rollout.collector import RolloutCollector
from rlinf.training.rl_trainer import replace_envs, rollout_metrics
from rlinf.training.train_worker import TrainWorker
from rlinf.types import ActionPrediction

FIXTURES = str(Path(__file__).parents[1] / "fixtures")
if FIXTURES not in sys.path:
    sys.path.append(FIXTURES)  # workers import from the same path

from walk_env import WalkConfig, WalkVectorEnv  # noqa: E402
from wanderer import Wanderer  # noqa: E402

NUM_ENVS, NUM_CHUNKS, HORIZON = 6, 11, 5
OVERRIDES = ["model=mlp", "env.tasks=[reach,reach_zone]", "env.cameras=[]", f"env.max_episode_steps={HORIZON}"]


@pytest.fixture(scope="module")
def parts():
    config = build_config(compose_config(OVERRIDES))
    env = make_env(config.env, 1, auto_reset=False)
    torch.manual_seed(0)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}}).eval()
    yield config, env, model
    env.close()


def collect(parts, *, auto_reset=True, group_size=1, num_worker_threads=2, attempt=0, env_groups=None, **kwargs):
    config, env, model = parts
    sampler = EpisodeSampler(
        env.episode_specs("train"), 2, num_groups=NUM_ENVS // group_size, group_size=group_size, seed=3
    )
    collector = RolloutCollector(
        lambda count: make_env(config.env, count, auto_reset=auto_reset), sampler, num_envs=NUM_ENVS,
        num_chunks=NUM_CHUNKS, temperature=1.0, num_worker_threads=num_worker_threads, **kwargs,
    )  # fmt: skip
    try:
        return collector.collect(model, 7, 42, needs_values=True, attempt=attempt, env_groups=env_groups)
    finally:
        collector.close()


def value_after(parts, batch, t, b) -> float:
    """Value of what follows step ``t`` of env ``b``, by replaying its episode alone from its spec."""
    config, env, model = parts
    episode = batch.episode_ids[t, b]
    steps = [s for s in range(t + 1) if batch.episode_ids[s, b] == episode]
    observation, _ = env.reset(options={"episodes": [batch.specs[int(episode)]]})
    for s in steps:
        action = model.decode_actions(batch.action_tokens[s, b][None])
        result = env.chunk_step(action.numpy())
        observation = result.observation
    return float(model.predict_action_batch(do_sample=False, **model.preprocess(observation)).values)


def test_bootstrap_values_are_those_of_the_true_final_observation(parts):
    batch = collect(parts)
    assert batch.truncated.sum() >= NUM_ENVS
    checked, differences = 0, []
    for t in range(NUM_CHUNKS):
        for b in range(NUM_ENVS):
            runs_on = t == NUM_CHUNKS - 1 and not batch.terminated[t, b]
            if batch.truncated[t, b] or runs_on:
                assert batch.bootstrap_values[t, b].item() == pytest.approx(value_after(parts, batch, t, b), abs=1e-5)
                checked += 1
                if batch.truncated[t, b] and t + 1 < NUM_CHUNKS:  # control: the next row shows the next episode
                    _, _, model = parts
                    row = batch.observation.select([(t + 1) * NUM_ENVS + b])
                    other = float(model.predict_action_batch(do_sample=False, **model.preprocess(row)).values)
                    differences.append(abs(other - batch.bootstrap_values[t, b].item()))
            else:
                assert batch.bootstrap_values[t, b] == 0
    assert checked >= 2 * NUM_ENVS and max(differences) > 1e-3


def test_what_is_recorded_is_what_was_seen(parts):
    """Scoring the recorded observations gives the recorded log-probabilities; shifted by one step it does not."""
    _, _, model = parts
    batch = collect(parts)
    tokens = batch.action_tokens.flatten(0, 1)
    with torch.no_grad():
        scored = model.evaluate_actions(model.preprocess(batch.observation), tokens).logprobs
    recorded = batch.rollout_logprobs.flatten(0, 1)
    torch.testing.assert_close(scored, recorded, atol=1e-5, rtol=1e-5)
    assert (scored.roll(NUM_ENVS, 0) - recorded).abs().max() > 0.01
    assert (batch.policy_version == 42).all()


def test_groups_share_their_episode_and_groups_differ(parts):
    batch = collect(parts, auto_reset=False, group_size=3)
    for group in batch.group_ids[0].unique():
        columns = torch.nonzero(batch.group_ids[0] == group).flatten()
        specs = {batch.specs[int(i)] for i in batch.episode_ids[0, columns]}
        assert len(columns) == 3 and len(specs) == 1
    assert len({batch.specs[int(i)] for i in batch.episode_ids[0]}) == 2
    assert (batch.group_ids == batch.group_ids[0]).all()


def test_frozen_rows_are_not_valid(parts):
    batch = collect(parts, auto_reset=False)
    assert batch.loss_mask.sum(0).tolist() == [HORIZON] * NUM_ENVS
    assert not batch.action_mask[HORIZON:].any() and (batch.rewards[HORIZON:] == 0).all()
    assert len(batch.episodes) == NUM_ENVS


@pytest.mark.parametrize("change", [{"num_worker_threads": 1}, {"num_worker_threads": 3}, {"offload_envs": True}])
def test_rollouts_do_not_depend_on_threads_or_offloading(parts, change):
    batch, other = collect(parts), collect(parts, **change)
    np.testing.assert_allclose(other.observation.state, batch.observation.state, atol=1e-5)
    assert other.observation.instruction == batch.observation.instruction
    for name, tensor in batch.tensors().items():
        torch.testing.assert_close(other.tensors()[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def test_a_second_attempt_plays_the_given_envs_only_and_replaces_whole_groups(parts):
    first = collect(parts, auto_reset=False, group_size=2)
    whole = collect(parts, auto_reset=False, group_size=2, attempt=1)
    assert not set(first.group_ids[0].tolist()) & set(whole.group_ids[0].tolist())
    envs = torch.tensor([0, 1, 4, 5])
    with CountedRows(parts[2]) as rows:
        more = collect(parts, auto_reset=False, group_size=2, attempt=1, env_groups=[0, 2])
    assert rows.acted == len(envs) * HORIZON and len(more.episodes) == len(envs)
    assert more.specs == {key: spec for key, spec in whole.specs.items() if key in more.episode_ids}
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(more.tensors()[name], tensor[:, envs], atol=1e-5, rtol=1e-5, msg=name)
    valid = more.loss_mask.flatten().numpy()
    np.testing.assert_allclose(
        more.observation.state[valid], whole.select_envs(envs).observation.state[valid], atol=1e-5
    )
    mixed = copy.deepcopy(first)
    replace_envs(mixed, envs, more, torch.tensor([False, False, True, True]))
    assert mixed.group_ids[0].tolist() == first.group_ids[0, :4].tolist() + more.group_ids[0, 2:].tolist()
    columns = torch.tensor([0, 1, 2, 3])
    for name, tensor in mixed.tensors().items():
        assert torch.equal(tensor[:, columns], first.tensors()[name][:, columns]), name
        assert torch.equal(tensor[:, 4:], more.tensors()[name][:, 2:]), name
    states, before, played = (
        each.observation.state.reshape(NUM_CHUNKS, -1, first.observation.state.shape[-1])
        for each in (mixed, first, more)
    )
    np.testing.assert_array_equal(states[:, :4], before[:, :4])
    np.testing.assert_array_equal(states[:, 4:], played[:, 2:])
    words = np.array(mixed.observation.instruction).reshape(NUM_CHUNKS, -1)
    np.testing.assert_array_equal(words[:, 4:], np.array(more.observation.instruction).reshape(NUM_CHUNKS, -1)[:, 2:])
    np.testing.assert_array_equal(words[:, :4], np.array(first.observation.instruction).reshape(NUM_CHUNKS, -1)[:, :4])
    assert set(mixed.episode_ids.flatten().tolist()) <= mixed.specs.keys()
    assert len(mixed.episodes) == len(first.episodes) + len(more.episodes), "what was played counts, wanted or not"


class CountedRows:
    """Counts the rows for which a policy acts and those that it scores, while it is open."""

    def __init__(self, model):
        self.model, self.acted, self.scored = model, 0, 0

    def __enter__(self):
        act, score = self.model.predict_action_batch, self.model.evaluate_actions

        def counted_act(**inputs):
            self.acted += len(inputs["state"]) * inputs["do_sample"]
            return act(**inputs)

        def counted_score(inputs, *arguments):
            self.scored += len(inputs["state"])
            return score(inputs, *arguments)

        self.model.predict_action_batch, self.model.evaluate_actions = counted_act, counted_score
        return self

    def __exit__(self, *_):
        del self.model.predict_action_batch, self.model.evaluate_actions


def worker_of(model, rows_of_a_call=4):
    return TrainWorker(
        model, TrainerConfig(), temperature=1.0, micro_batch_size=4, val_micro_batch_size=rows_of_a_call,
        precision="fp32",
    )  # fmt: skip


def test_episodes_that_have_ended_cost_no_row_of_the_policy(parts):
    """All end at 5 of 11 calls. With auto-reset, all rows act to the last call: the control."""
    model = parts[2]
    for auto_reset, num_calls in ((False, HORIZON), (True, NUM_CHUNKS)):
        with CountedRows(model) as rows:
            batch = collect(parts, auto_reset=auto_reset, group_size=3)
            logprobs, values = worker_of(model).evaluate(batch)
        assert (rows.acted, rows.scored) == (num_calls * NUM_ENVS, num_calls * NUM_ENVS)
        assert logprobs.shape == batch.rollout_logprobs.shape and values.shape == batch.loss_mask.shape
        assert (logprobs[num_calls:] == 0).all() and (values[num_calls:] == 0).all()
        difference = (logprobs - batch.rollout_logprobs)[:num_calls].abs().max()
        assert difference < 1e-5 and logprobs[:num_calls].abs().min() > 0


def test_what_is_valid_does_not_depend_on_the_rows_that_have_ended():
    """Episodes that end one after the other, against a rollout in which every row acts to the end (auto-reset)."""
    config, batches, num_rows = WalkConfig(num_processes=0, max_episode_steps=12, tasks=["far"]), [], []

    class CountingWanderer(Wanderer):
        def predict_action_batch(self, *, state, **options):
            num_rows[-1] += len(state)
            return super().predict_action_batch(state=state, **options)

    for auto_reset in (False, True):
        num_rows.append(0)
        sampler = EpisodeSampler(WalkVectorEnv(config, 1, False).episode_specs("train"), 1, num_groups=32, seed=1)
        collector = RolloutCollector(
            lambda count, auto_reset=auto_reset: WalkVectorEnv(config, count, auto_reset), sampler, num_envs=32, num_chunks=9,
            temperature=1.0, num_worker_threads=1,
        )  # fmt: skip
        batches.append(collector.collect(CountingWanderer(), 0, 0, needs_values=False))
        collector.close()
    batch, whole = batches
    first = whole.episode_ids == whole.episode_ids[0]
    assert (batch.loss_mask == first).all() and len(set(first.sum(0).tolist())) >= 3
    assert num_rows == [int(first.sum()), 9 * 32]
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(batch.tensors()[name][first], tensor[first], msg=name)
    rows = first.flatten().numpy()
    for camera in config.cameras:
        np.testing.assert_array_equal(batch.observation.images[camera][rows], whole.observation.images[camera][rows])
    assert batch.episodes == whole.episodes


class CountingWalk(WalkVectorEnv):
    """Its chunk number ``limit`` fails with ``failure()``."""

    num_chunks, limit, failure = 0, None, None

    def _step_chunk(self, ids, actions, steps_left):
        self.num_chunks += 1
        if self.num_chunks == self.limit:
            self.failure()
        return super()._step_chunk(ids, actions, steps_left)


def raise_error():
    raise SimulatorError("the fifth chunk")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("failing_thread", "failure"), [(0, raise_error), (1, raise_error), (1, press_ctrl_c)])
def test_a_failure_or_an_interrupt_ends_all_threads_with_their_chunk(failing_thread, failure):
    """A rollout of 100 chunks of 0.1 s; one thread fails in its fifth, or Ctrl-C comes then."""
    config = WalkConfig(num_processes=0, step_sleep_s=0.1)
    envs, num_chunks = [], 100

    def make(count):
        envs.append(CountingWalk(config, count, True))
        return envs[-1]

    split = WalkVectorEnv(config, 1, True).episode_specs("train")
    sampler = EpisodeSampler(split, 2, num_groups=2)
    collector = RolloutCollector(make, sampler, num_envs=2, num_chunks=num_chunks, temperature=1.0)  # two threads
    envs[failing_thread].limit, envs[failing_thread].failure = 5, failure
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(SimulatorError if failure is raise_error else KeyboardInterrupt):
            collector.collect(SlowPolicy(), 0, 0, needs_values=False)
        with ThreadPoolExecutor(1) as fresh:  # torch's own threads start like this one
            assert fresh.submit(torch.get_num_threads).result() == 4  # each thread had two
    finally:
        torch.set_num_threads(num_threads)
    collector.num_chunks = 2
    assert collector.collect(SlowPolicy(), 1, 0, needs_values=False).loss_mask.shape == (2, 2)
    collector.close()
    assert all(2 < env.num_chunks < 20 for env in envs) and all(env.closed for env in envs)


class SlowPolicy(Wanderer):
    """Stands still; a call takes 0.1 s, and one call runs at a time."""

    num_logprobs = 2

    def __init__(self):
        super().__init__()
        self.lock, self.calls = threading.Lock(), []

    def predict_action_batch(self, *, do_sample, temperature, uniforms, state):
        with self.lock:
            begin = time.monotonic()
            time.sleep(0.1)
            self.calls.append((begin, time.monotonic()))
        actions = torch.zeros(len(state), 1, 2)
        return ActionPrediction(actions, actions.flatten(1), torch.zeros(len(state), 2, 2), torch.zeros(len(state)))


def test_one_half_of_the_envs_steps_while_the_other_half_asks_the_policy():
    """Two halves of two envs, one process each: a call of the policy takes 0.1 s, and so do the two steps of a half."""
    config = WalkConfig(num_processes=1, step_sleep_s=0.05)
    split = WalkVectorEnv(config, 1, True).episode_specs("train")
    num_chunks, shares = 5, {}

    class WatchedWalk(WalkVectorEnv):
        def _step_chunk(self, *arguments):
            begin = time.monotonic()
            chunk = super()._step_chunk(*arguments)
            steps.append((begin, time.monotonic()))
            return chunk

    for num_worker_threads in (2, 1):
        policy, steps = SlowPolicy(), []
        collector = RolloutCollector(
            lambda count: WatchedWalk(config, count, True), EpisodeSampler(split, 2, num_groups=4), num_envs=4,
            num_chunks=num_chunks, temperature=1.0, num_worker_threads=num_worker_threads,
        )  # fmt: skip
        collector.collect(SlowPolicy(), 0, 0, needs_values=False)  # starts the processes
        steps.clear()
        collector.collect(policy, 1, 0, needs_values=False)
        collector.close()
        overlaps = [any(first < end and begin < last for first, last in policy.calls) for begin, end in steps]
        assert len(steps) == num_worker_threads * num_chunks
        shares[num_worker_threads] = sum(overlaps) / len(steps)
    assert shares[2] > 0.7
    assert shares[1] == 0  # control: one thread waits for the policy, then for all steps


class LosingEnv(TabletopVectorEnv):
    """Loses the simulators of the rows ``losses[k]`` during the ``k``-th chunk."""

    losses: ClassVar[dict[int, list[int]]] = {}

    def reset(self, **kwargs):
        self.num_chunks = 0
        return super().reset(**kwargs)

    def _step_chunk(self, ids, actions, steps_left):
        chunk = super()._step_chunk(ids, actions, steps_left)
        for row in self.losses.get(self.num_chunks, ()):
            self._reset_env(row, self._specs[row])
            self._lost[row] = True
            for array in chunk:
                array[ids == row] = 0
        self.num_chunks += 1
        return chunk


def collect_with_losses(parts, losses, **kwargs):
    config, env, model = parts
    make = type("Losing", (LosingEnv,), {"losses": losses})
    group_size, auto_reset = kwargs.get("group_size", 1), kwargs.get("auto_reset", True)
    sampler = EpisodeSampler(
        env.episode_specs("train"), 2, num_groups=NUM_ENVS // group_size, group_size=group_size, seed=3
    )
    collector = RolloutCollector(
        lambda count: make(config.env, count, auto_reset), sampler, num_envs=NUM_ENVS, num_chunks=NUM_CHUNKS,
        temperature=1.0, num_worker_threads=1,
    )  # fmt: skip
    try:
        return collector.collect(model, 7, 42, needs_values=True)
    finally:
        collector.close()


def test_a_lost_episode_is_masked_and_begins_again_under_another_id(parts):
    """Env 1 loses its first episode with its third call, and env 4 its second one with the first call of it."""
    batch = collect_with_losses(parts, {2: [1], HORIZON: [4]})
    plain = collect(parts, num_worker_threads=1)
    expected = torch.ones(NUM_CHUNKS, NUM_ENVS, dtype=torch.bool)
    expected[:3, 1] = expected[HORIZON, 4] = False
    assert (batch.loss_mask == expected).all() and plain.loss_mask.all()
    numbers = [
        torch.unique_consecutive(batch.episode_ids[:, env], return_counts=True)[1].tolist() for env in range(NUM_ENVS)
    ]
    whole = [HORIZON, HORIZON, NUM_CHUNKS - 2 * HORIZON]
    retried_1 = [3, HORIZON, NUM_CHUNKS - HORIZON - 3]
    retried_4 = [HORIZON, 1, HORIZON]
    assert numbers == [whole, retried_1, whole, whole, retried_4, whole]
    specs = [[batch.specs[int(i)] for i in batch.episode_ids[:, env]] for env in (1, 4)]
    assert specs[0][2] == specs[0][3] != specs[0][HORIZON + 3] and specs[1][HORIZON] == specs[1][HORIZON + 1]
    assert (
        len(set(batch.episode_ids[batch.loss_mask].tolist()) & set(batch.episode_ids[~batch.loss_mask].tolist())) == 0
    )
    assert (batch.group_ids == plain.group_ids).all()
    others = [0, 2, 3, 5]
    for name, tensor in batch.tensors().items():
        torch.testing.assert_close(tensor[:, others], plain.tensors()[name][:, others], msg=name)
    states = batch.observation.state.reshape(NUM_CHUNKS, NUM_ENVS, -1)
    np.testing.assert_array_equal(states[3, 1], states[0, 1])
    np.testing.assert_array_equal(states[HORIZON + 1, 4], states[HORIZON, 4])
    for env, t in ((1, HORIZON + 2), (4, NUM_CHUNKS - 1), (1, NUM_CHUNKS - 1)):
        assert batch.bootstrap_values[t, env].item() == pytest.approx(value_after(parts, batch, t, env), abs=1e-5)
    assert rollout_metrics(batch)["rollout/lost_episodes"] == 2 and rollout_metrics(plain)["rollout/lost_episodes"] == 0
    assert rollout_metrics(plain)["rollout/num_episodes"] == NUM_ENVS
    later = collect_with_losses(parts, {HORIZON: [4]})  # every env has ended its first episode
    assert later.episodes == plain.episodes


def test_an_episode_that_is_lost_with_the_last_call_has_no_value_behind_it(parts):
    batch = collect_with_losses(parts, {NUM_CHUNKS - 1: [2]})
    begin = 2 * HORIZON
    assert not batch.loss_mask[begin:, 2].any() and batch.loss_mask[:begin].all()
    assert batch.bootstrap_values[-1, 2] == 0 and batch.bootstrap_values[-1, 3] != 0


def test_advantages_after_a_loss_are_those_of_the_new_episode_alone(parts):
    batch = collect_with_losses(parts, {2: [1]})
    batch.values = torch.randn(NUM_CHUNKS, NUM_ENVS, generator=torch.Generator().manual_seed(0))
    PPO(PPOConfig(normalize_advantages=False)).compute_advantages(batch)
    names = ("rewards", "values", "terminated", "truncated", "bootstrap_values")
    config = PPOConfig()
    alone, _ = gae(*(getattr(batch, name)[3:, 1:2] for name in names), config.gamma, config.gae_lambda)
    torch.testing.assert_close(batch.advantages[3:, 1].sum(-1), alone[:, 0] * batch.advantages.shape[-1])


@pytest.mark.parametrize("lost_at", [0, 1, 3])
def test_a_loss_does_not_make_the_success_rate_better(lost_at):
    """The first half loses all its running episodes. Of what ends there, before and after, all are successes."""
    config = WalkConfig(num_processes=0, max_episode_steps=12, tasks=["far"])
    num_envs, ended = 64, []

    class LosingWalk(WalkVectorEnv):
        def reset(self, **kwargs):
            self.num_chunks = 0
            return super().reset(**kwargs)

        def _step_chunk(self, ids, actions, steps_left):
            chunk = super()._step_chunk(ids, actions, steps_left)
            if self.num_chunks == self.lost_at:
                self._reset_envs(ids, [self._specs[row] for row in ids])
                self._lost[ids] = True
                for array in chunk:
                    array[:] = 0
            self.num_chunks += 1
            return chunk

        def chunk_step(self, actions):
            step = super().chunk_step(actions)
            ended.extend(episode.success for episode in step.episodes if self.lost_at is not None)
            return step

    split = LosingWalk(config, 1, False).episode_specs("train")
    batches = []
    for moments in ((None, None), (lost_at, None)):
        moments = list(moments)

        def make(count, moments=moments):
            env = LosingWalk(config, count, False)
            env.lost_at = moments.pop(0)
            return env

        collector = RolloutCollector(
            make, EpisodeSampler(split, 1, num_groups=num_envs // 2, group_size=2, seed=1), num_envs=num_envs, num_chunks=6,
            temperature=1.0, num_worker_threads=2,
        )  # fmt: skip
        batches.append(collector.collect(Wanderer(), 0, 0, needs_values=False))
        collector.close()
    plain, batch = batches
    half = num_envs // 2
    assert len(plain.episodes) == num_envs and 0.1 < np.mean([e.success for _, e in plain.episodes[half:]]) < 0.9
    assert len(ended) >= 4 and all(ended)  # control: what counting them would say
    assert batch.episodes == plain.episodes[half:]


def test_after_a_loss_the_envs_of_other_processes_count():
    """24 envs in two processes, one of which is killed before the fourth chunk."""
    config, killed, ended = WalkConfig(num_processes=2, max_episode_steps=12, tasks=["far"]), [], []

    class KilledWalk(WalkVectorEnv):
        num_chunks = 0

        def chunk_step(self, actions):
            if killed and self.num_chunks == 3:
                worker = self.worker_processes()[0]
                worker.kill()
                worker.wait()
            step = super().chunk_step(actions)
            self.num_chunks += 1
            ended.extend(step.final_env_ids[step.final_env_ids < 12].tolist())
            return step

    sampler = EpisodeSampler(KilledWalk(config, 1, False).episode_specs("train"), 1, num_groups=24, seed=1)
    batches = []
    for kill in (False, True):
        killed[:], ended[:] = [True] * kill, []
        collector = RolloutCollector(
            lambda count: KilledWalk(config, count, False),
            sampler,
            num_envs=24,
            num_chunks=6,
            temperature=1.0,
            num_worker_threads=1,
        )
        batches.append(collector.collect(Wanderer(), 0, 0, needs_values=False))
        collector.close()
    plain, batch = batches
    others = [sampler.spec(0, env, 0) for env in range(12, 24)]
    assert len(plain.episodes) == 24 and ended  # control: of the killed process, some do end
    assert batch.episodes == [(env, episode) for env, episode in plain.episodes if episode.spec in others]
    assert len(batch.episodes) == 12


def test_grpo_compares_returns_of_episodes_that_were_not_lost(parts):
    """Group 0 (envs 0 to 2): env 2 is lost, and its second try ends in time. Group 1 is not touched."""
    batch = collect_with_losses(parts, {2: [2]}, auto_reset=False, group_size=3)
    assert ((batch.terminated | batch.truncated) & batch.loss_mask)[:, 2].any()
    batch.action_rewards = torch.zeros_like(batch.action_rewards)
    batch.action_rewards[:, 2] = 50.0
    batch.action_rewards[4, 0], batch.action_rewards[3, 1] = 1.0, 3.0
    batch.action_rewards[5:, 1] = 100.0  # after its end
    batch.action_rewards[1, 3:] = torch.tensor([0.0, 0.0, 3.0])[:, None]
    batch.action_rewards /= batch.action_rewards.shape[-1]
    metrics = GRPO(GRPOConfig(scale_by_std=False, normalize_advantages=False)).compute_advantages(batch)
    assert metrics["train/return_mean"] == pytest.approx((1 + 3 + 0 + 0 + 3) / 5)  # of env 0, 1, 3, 4, 5
    assert metrics["rollout/zero_variance_group_fraction"] == 0
    expected = torch.tensor([-1.0, 1.0, 0.0, -1.0, -1.0, 2.0])  # return less the mean of the group's known returns
    torch.testing.assert_close(batch.advantages[4, :, 0], expected)
    assert not batch.loss_mask[:, 2].any() and batch.loss_mask[:HORIZON, 1].all()


def test_a_group_of_equal_known_returns_is_resampled_as_a_whole(parts):
    batch = collect_with_losses(parts, {2: [0]}, auto_reset=False, group_size=3)
    batch.action_rewards = torch.zeros_like(batch.action_rewards)
    batch.action_rewards[5, 0] = 5.0  # not known: it is of a second try
    batch.action_rewards[0, 3] = 1.0
    algorithm = GRPO(GRPOConfig())
    assert algorithm.uninformative_envs(batch).tolist() == [True] * 3 + [False] * 3
    batch.action_rewards[0, 1] = 1.0
    assert not algorithm.uninformative_envs(batch).any()  # the env that is not known goes with its group


@pytest.mark.parametrize("algorithm", [GRPO(GRPOConfig()), RLOO(RLOOConfig()), ReinforcePP(ReinforcePPConfig())])
def test_columns_of_several_episodes_are_refused_where_returns_are_those_of_whole_ones(parts, algorithm):
    with pytest.raises(ValueError, match="rollout.auto_reset=false"):
        algorithm.compute_advantages(collect(parts, group_size=3))


def test_a_lost_simulator_leaves_nothing_to_compare_in_a_group_of_two_and_no_return_to_go(parts):
    batch = collect_with_losses(parts, {2: [0]}, auto_reset=False, group_size=2)
    batch.action_rewards[0, 1] = 7.0
    for algorithm, dropped in ((ReinforcePP(ReinforcePPConfig()), [0]), (RLOO(RLOOConfig()), [0, 1])):
        algorithm.compute_advantages(batch)
        assert not batch.loss_mask[:, dropped].any() and not batch.advantages[:, dropped].any()
        assert batch.loss_mask[0, 1] == (1 not in dropped)
