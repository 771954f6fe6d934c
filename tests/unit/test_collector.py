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

import numpy as np
import pytest
import torch
from rollout_batches import select_envs

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.config.training import TrainerConfig
from rlinf.envs import make_env
from rlinf.envs.episodes import EpisodeSampler
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


def test_groups_share_their_episode_and_groups_differ(parts):
    batch = collect(parts, auto_reset=False, group_size=3)
    for group in batch.group_ids[0].unique():
        columns = torch.nonzero(batch.group_ids[0] == group).flatten()
        specs = {batch.specs[int(i)] for i in batch.episode_ids[0, columns]}
        assert len(columns) == 3 and len(specs) == 1
    assert len({batch.specs[int(i)] for i in batch.episode_ids[0]}) == 2
    assert (batch.group_ids == batch.group_ids[0]).all()


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
        more.observation.state[valid], select_envs(whole, envs).observation.state[valid], atol=1e-5
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
    assert rollout_metrics(plain)["rollout/lost_episodes"] == 0 < rollout_metrics(batch)["rollout/lost_episodes"]


def two_rollouts(parts, continue_episodes, num_worker_threads=1):
    config, env, model = parts
    sampler = EpisodeSampler(env.episode_specs("train"), 2, num_groups=NUM_ENVS, seed=3)
    collector = RolloutCollector(
        lambda count: make_env(config.env, count, auto_reset=True), sampler, num_envs=NUM_ENVS, num_chunks=NUM_CHUNKS,
        temperature=1.0, num_worker_threads=num_worker_threads, continue_episodes=continue_episodes,
    )  # fmt: skip
    try:
        return [collector.collect(model, step, 0, needs_values=True) for step in (7, 8)]
    finally:
        collector.close()


@pytest.mark.parametrize("num_worker_threads", [1, 2])
def test_an_episode_continues_in_the_next_rollout(parts, num_worker_threads):
    """Episodes that run over the end of a rollout, replayed from their specs with the actions of both."""
    _, env, model = parts
    first, second = two_rollouts(parts, True, num_worker_threads=num_worker_threads)
    ended = first.terminated[-1] | first.truncated[-1]
    assert 0 < (~ended).sum() and NUM_CHUNKS % HORIZON
    for b in (~ended).nonzero().flatten().tolist():
        before = (first.episode_ids[:, b] == first.episode_ids[-1, b]).nonzero().flatten()
        after = (second.episode_ids[:, b] == second.episode_ids[0, b]).nonzero().flatten()
        spec = first.specs[int(first.episode_ids[-1, b])]
        assert second.specs[int(second.episode_ids[0, b])] == spec
        env.reset(options={"episodes": [spec]})
        for t in before:
            chunk = env.chunk_step(model.decode_actions(first.action_tokens[t, b][None]).numpy())
        np.testing.assert_allclose(second.observation.state[b], chunk.observation.state[0], atol=1e-6)
        for t in after:
            chunk = env.chunk_step(model.decode_actions(second.action_tokens[t, b][None]).numpy())
        assert [bool(chunk.terminated[0]), bool(chunk.truncated[0])] == [
            bool(flags[after[-1], b]) for flags in (second.terminated, second.truncated)
        ]
        assert len(before) + len(after) <= HORIZON
        whole = next(one for row, one in second.episodes if row == b)
        assert (whole.spec, whole.num_env_steps) == (spec, len(before) + len(after))
    values = model.predict_values(**model.preprocess(second.observation.select(range(NUM_ENVS))))
    torch.testing.assert_close(first.bootstrap_values[-1][~ended], values[~ended].detach())
    fresh = two_rollouts(parts, False)[1]  # control: each rollout starts with episodes of its own
    assert all(
        fresh.specs[int(fresh.episode_ids[0, b])] != first.specs[int(first.episode_ids[-1, b])] for b in range(NUM_ENVS)
    )
