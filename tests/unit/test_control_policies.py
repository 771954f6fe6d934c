"""Controls that learn nothing: constant corrections and noise, on a policy whose error is known."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.types import ActionPrediction

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from control_policies import ShiftedPolicy, best_offset, evaluate_noise, plane_offsets

NUM_EPISODES = 24


class Straight:
    """Goes to a point 7 cm beside the target, which it reads from the state."""

    action_chunks_len, num_uniforms = 1, 2

    def __init__(self, error_m):
        self.error_m = torch.tensor(error_m)

    def preprocess(self, observation):
        return {"state": torch.from_numpy(observation.state)}

    def prompt_lengths(self, observation):
        return [0] * len(observation)

    def predict_action_batch(self, *, do_sample, state, **_):
        assert not do_sample, "the controls are around the greedy action"
        actions = ((0.2 * state[:, 4:6] + self.error_m) / 0.05).clamp(-1, 1).float()[:, None]
        return ActionPrediction(actions, actions.flatten(1), actions, torch.zeros(len(state)))


@pytest.fixture(scope="module")
def env():
    return make_env(TabletopConfig(tasks=["reach"], cameras=[]), 8, auto_reset=False)


def specs(env, split):
    return env.episode_specs(split)[:NUM_EPISODES]


def test_the_best_constant_mends_one_error_and_is_found_on_training_episodes(env):
    base = Straight((0.07, 0.0))
    before = evaluate_policy(base, env, specs(env, "eval")).success_rate
    chosen, results = best_offset(base, env, specs(env, "train"), plane_offsets(2, [0.5], 4))
    assert np.allclose(chosen, (-0.5, 0.0), atol=1e-6) and len(results) == 4
    moved = ShiftedPolicy(base, env.action_low, env.action_high, chosen)
    after = evaluate_policy(moved, env, specs(env, "eval")).success_rate
    assert after > before + 0.2
    assert min(result.success_rate for result in results) < after, "control: another direction does not"


def test_noise_is_drawn_around_the_greedy_action_from_the_stream_of_the_episode(env):
    base = Straight((0.0, 0.0))
    assert evaluate_noise(base, env, specs(env, "eval"), 0.0).success_rate == 1.0
    first, again, other = (
        evaluate_noise(Straight((0.07, 0.0)), env, specs(env, "eval"), 1.0, seed) for seed in (0, 0, 1)
    )
    steps = [[result.num_env_steps for result in each.results] for each in (first, again, other)]
    assert steps[0] == steps[1] != steps[2]


def test_shifts_are_in_halves_of_the_range_and_clipped():
    low, high = np.array([-1.0, 0.0]), np.array([1.0, 4.0])
    base, state = Straight((0.0, 0.0)), torch.zeros(2, 31)
    moved = ShiftedPolicy(base, low, high, (0.25, 0.5)).predict_action_batch(do_sample=False, state=state)
    assert moved.actions.tolist() == [[[0.25, 1.0]]] * 2
    uniforms = torch.tensor([[0.5, 0.75], [0.999, 0.25]])
    noisy = ShiftedPolicy(base, low, high, noise=2.0).predict_action_batch(uniforms=uniforms, state=state)
    torch.testing.assert_close(noisy.actions, torch.tensor([[[0.0, 2.0]], [[1.0, 0.0]]]))
    assert noisy.actions[0, 0, 1] != moved.actions[0, 0, 1]
    outside = SimpleNamespace(predict_action_batch=lambda **_: moved._replace(actions=torch.tensor([[[1.5, 2.0]]])))
    shifted = ShiftedPolicy(outside, low, high, (-0.5, 0.25)).predict_action_batch(do_sample=False)
    assert shifted.actions.tolist() == [[[0.5, 2.5]]], "moved from the bound"


def test_offsets_lie_on_circles_of_the_first_two_numbers():
    offsets = np.array(plane_offsets(7, [0.5, 1.0], 8))
    assert offsets.shape == (16, 7) and not offsets[:, 2:].any()
    np.testing.assert_allclose(np.linalg.norm(offsets, axis=1), [0.5] * 8 + [1.0] * 8)
    assert len({tuple(row) for row in offsets.round(6)}) == 16
