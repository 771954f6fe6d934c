"""Every number of a rollout belongs to its step: an env and a policy whose numbers say which step they are of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.steps import SimulatorStep
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import ATTEMPT_STRIDE, RolloutCollector
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.types import ActionPrediction, Observation

NUM_ENVS, NUM_CHUNKS, CHUNK, HORIZON, GROUP = 6, 9, 2, 7, 2
SUCCESS_AT = {0: 5, 1: HORIZON + 1}
"""Task to the step that succeeds: episodes of task 0 terminate within a chunk, those of task 1 are truncated."""


def step_reward(init_state_id: int, step: int, action: float) -> float:
    """The reward of the env step with this number (from 1) of an episode."""
    return 100 * (init_state_id % 7) + step + 0.25 * action


def value_at(init_state_id: int, step: int) -> float:
    """What the policy believes of the state behind this many steps."""
    return 1000 * (init_state_id % 7) + step + 0.5


class ClockEnv(VectorEnv):
    """The state is (which episode, how many steps); so is the instruction."""

    suite = "clock"
    state_dim = 2

    def __init__(self, config, num_envs, auto_reset):
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(1), action_high=np.ones(1))
        self.numbers = np.zeros(num_envs, dtype=np.int64)
        self.specs = [None] * num_envs

    @classmethod
    def all_task_names(cls, config):
        return ["terminates", "is truncated"]

    def _reset_env(self, index, spec):
        self.numbers[index], self.specs[index] = 0, spec

    def _step_envs(self, ids, actions):
        self.numbers[ids] += 1
        rewards = [
            step_reward(self.specs[row].init_state_id, self.numbers[row], float(action))
            for row, (action,) in zip(ids, actions, strict=True)
        ]
        done = [self.numbers[row] == SUCCESS_AT[self.specs[row].task_id] for row in ids]
        return SimulatorStep(np.array(rewards, dtype=np.float32), np.array(done))

    def _observe(self, ids):
        states = [(self.specs[row].init_state_id % 7, self.numbers[row]) for row in ids]
        sentences = [f"{self.specs[row].init_state_id} at {self.numbers[row]}" for row in ids]
        return Observation({}, np.array(states, dtype=np.float32), sentences)


class ClockPolicy(ActionModel, torch.nn.Module):
    """Acts as the given uniforms say; its log-probs and values say of which state they are."""

    num_logprobs = num_uniforms = CHUNK
    predicts_values = True

    def preprocess(self, observation):
        return {"state": torch.from_numpy(observation.state)}

    def predict_values(self, state):
        return 1000 * state[:, 0] + state[:, 1] + 0.5

    def predict_action_batch(self, *, do_sample, temperature, uniforms, state):
        logits = torch.stack([state[:, 0], state[:, 1]], dim=-1)
        return ActionPrediction(uniforms[..., None], uniforms, logits, self.predict_values(state))

    def rollout_logprobs(self, prediction, temperature):
        return prediction.sequences + 10 * prediction.logits[:, 1:] + 100 * prediction.logits[:, :1]


def play(auto_reset: bool, num_lanes: int = 2, attempt: int = 0):
    config = EnvConfig(name="clock", max_episode_steps=HORIZON, success_bonus=0.0, cameras=[])
    env = ClockEnv(config, 1, auto_reset=False)
    sampler = EpisodeSampler(env.episode_specs("train"), 2, num_groups=NUM_ENVS // GROUP, group_size=GROUP, seed=5)
    collector = RolloutCollector(
        lambda count: ClockEnv(config, count, auto_reset), sampler, num_envs=NUM_ENVS, num_chunks=NUM_CHUNKS,
        temperature=1.0, num_lanes=num_lanes,
    )  # fmt: skip
    try:
        return collector.collect(ClockPolicy(), 3, 42, needs_values=True, attempt=attempt), sampler
    finally:
        collector.close()


def expected_rows(batch, sampler, auto_reset: bool, attempt: int):
    """What each row must hold, walking each env alone from its episodes; only the sampled actions are taken as given."""
    for b in range(NUM_ENVS):
        position, step, over = 0, 0, False
        for t in range(NUM_CHUNKS):
            spec = sampler.spec(3, b, position, attempt)
            which, start = spec.init_state_id, step
            rewards, executed = [0.0] * CHUNK, [False] * CHUNK
            terminated = truncated = False
            for c in range(CHUNK):
                if over or terminated or truncated:
                    continue
                step += 1
                rewards[c], executed[c] = step_reward(which, step, float(batch.action_tokens[t, b, c])), True
                terminated = step == SUCCESS_AT[spec.task_id]
                truncated = not terminated and step == HORIZON
            ended = terminated or truncated
            follows = truncated or (t == NUM_CHUNKS - 1 and not ended and not over)
            yield t, b, {
                "valid": not over, "spec": spec, "start": start, "rewards": rewards, "executed": executed,
                "terminated": terminated, "truncated": truncated,
                "bootstrap": value_at(which, step) if follows else 0.0, "position": position,
            }  # fmt: skip
            if ended and auto_reset:
                position, step = position + 1, 0
            elif ended:
                over = True


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("attempt", [0, 2])
def test_every_number_of_a_rollout_belongs_to_its_step(auto_reset, num_lanes, attempt):
    batch, sampler = play(auto_reset, num_lanes, attempt)
    states = torch.from_numpy(batch.observation.state).unflatten(0, (NUM_CHUNKS, NUM_ENVS))
    ends = {"terminated": 0, "truncated": 0}
    for t, b, row in expected_rows(batch, sampler, auto_reset, attempt):
        where = (t, b, row)
        assert bool(batch.loss_mask[t, b]) == row["valid"], where
        assert batch.action_mask[t, b].tolist() == row["executed"], where
        assert batch.action_rewards[t, b].tolist() == pytest.approx(row["rewards"], abs=1e-4), where
        assert bool(batch.terminated[t, b]) == row["terminated"], where
        assert bool(batch.truncated[t, b]) == row["truncated"], where
        assert float(batch.bootstrap_values[t, b]) == pytest.approx(row["bootstrap"]), where
        assert int(batch.policy_version[t, b]) == 42
        assert int(batch.group_ids[t, b]) == b // GROUP + attempt * ATTEMPT_STRIDE
        if not row["valid"]:
            continue
        which = row["spec"].init_state_id
        assert states[t, b].tolist() == [which % 7, row["start"]], where
        assert batch.observation.instruction[t * NUM_ENVS + b] == f"{which} at {row['start']}", where
        seen = batch.action_tokens[t, b] + 10 * row["start"] + 100 * (which % 7)
        torch.testing.assert_close(batch.rollout_logprobs[t, b], seen)
        assert float(batch.rollout_values[t, b]) == pytest.approx(value_at(which, row["start"])), where
        number = row["position"] * NUM_ENVS + b + attempt * ATTEMPT_STRIDE
        assert int(batch.episode_ids[t, b]) == number and batch.specs[number] == row["spec"]
        ends["terminated"] += row["terminated"]
        ends["truncated"] += row["truncated"]
    assert min(ends.values()) >= 2, "the test needs both kinds of end"
    # Actions are as random as they should be: no row repeats another.
    tokens = batch.action_tokens[batch.loss_mask].flatten()
    assert len(tokens.unique()) == len(tokens) and 0 < float(tokens.min()) and float(tokens.max()) < 1


def test_results_are_those_of_the_first_episode_of_each_env():
    batch, sampler = play(auto_reset=True)
    expected = []
    for b in range(NUM_ENVS):
        spec = sampler.spec(3, b, 0)
        rewards = batch.action_rewards[:, b][batch.episode_ids[:, b] == b]
        length = SUCCESS_AT[0] if spec.task_id == 0 else HORIZON
        expected.append((spec, spec.task_id == 0, length, pytest.approx(float(rewards.sum()), rel=1e-5)))
    results = [(one.spec, one.success, one.num_env_steps, one.episode_return) for one in batch.episodes]
    assert len(results) == NUM_ENVS and all(any(one == other for one in expected) for other in results)
