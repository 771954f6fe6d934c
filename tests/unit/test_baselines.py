"""Baselines that do not learn or do not see, on policies whose error is known."""

from dataclasses import replace

import numpy as np
import pytest
from thread_ranks import on_threads

from rlinf.config.schema import RunConfig
from rlinf.config.training import ClusterConfig
from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.errors import ConfigError
from rlinf.evaluation import baselines
from rlinf.evaluation.baselines import Constants, evaluate_baselines, noisy, plane_offsets, shifted
from rlinf.evaluation.config import EvaluationConfig
from rlinf.evaluation.disturbed_env import DisturbedEnv, RunningEpisodes
from rlinf.evaluation.evaluator import EvaluationPlan, evaluate_policy
from rlinf.evaluation.result import EvaluationResult
from rlinf.preflight.compatibility import check_evaluation
from rlinf.preflight.placement import check_evaluation_workers
from rlinf.types import EpisodeResult, EpisodeSpec, Observation

ERROR_M, ERROR = 0.04, 0.8  # the same, in metres and in env steps of 5 cm
DIRECTIONS = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
AIM, COLOUR, METRES = slice(4, 6), slice(20, 23), 0.2  # columns of the state, and their unit


def beside(errors):
    """A policy that stops beside the target, at ``errors [3, 2]`` in metres by the colour of the instruction."""

    def act(observation):
        error = observation.state[:, COLOUR] @ np.asarray(errors, np.float32)
        return ((METRES * observation.state[:, AIM] + error) / 0.05)[:, None]

    return act


def tabletop(num_envs=8, **settings):
    config = {"tasks": ["reach"], "cameras": [], "tolerance_m": 0.025, "max_episode_steps": 48, **settings}
    return make_env(TabletopConfig(**config), num_envs, auto_reset=False)


@pytest.fixture(scope="module")
def env():
    return tabletop()


def choose(policy, env):
    return Constants.choose(policy, env, env.episode_specs("train")[:12], plane_offsets(2, [ERROR], 4))


def rate(constants, policy, env):
    return evaluate_policy(policy, constants.apply(env), env.episode_specs("eval")[:24]).success_rate


def test_the_constant_that_removes_one_error_is_chosen(env):
    policy = beside(ERROR_M * DIRECTIONS[[0, 0, 0]])
    constants = choose(policy, env)
    assert np.allclose(constants.best, (-ERROR, 0)) and rate(constants, policy, env) == 1.0
    assert rate(Constants(np.array([ERROR, 0]), {}), policy, env) < 0.5, "control: the opposite constant"


def test_constants_per_instruction_remove_errors_that_one_constant_does_not(env):
    policy = beside(ERROR_M * DIRECTIONS)
    constants = choose(policy, env)
    chosen = {text: np.round(offset, 6).tolist() for text, offset in constants.by_instruction.items()}
    colours = ("red", "green", "blue")
    assert chosen == {f"reach the {c} block": (-ERROR * d).tolist() for c, d in zip(colours, DIRECTIONS, strict=True)}
    assert rate(constants, policy, env) == 1.0
    assert rate(Constants(constants.best, {}), policy, env) < 0.7, "control: one of them for all instructions"


def test_noise_is_uniform_around_the_action_and_follows_from_seed_and_episode():
    executed = {}
    for name, seed, num_envs, tasks in (("a", 0, 3, ["reach"]), ("b", 0, 8, ["push", "reach"]), ("c", 1, 8, ["reach"])):
        env, records = tabletop(num_envs, tasks=tasks, max_episode_steps=6), {}
        specs = [EpisodeSpec("tabletop", env.task_names.index("reach"), number, 7) for number in range(8)]
        recording = noisy(DisturbedEnv(env, records=records), 0.5, seed)
        evaluate_policy(lambda seen: np.full((len(seen), 4, 2), 0.25), recording, specs)
        executed[name] = np.stack([records[spec].actions for spec in specs]) - 0.25
    assert np.array_equal(executed["a"], executed["b"]) and not np.array_equal(executed["a"], executed["c"])
    assert executed["a"].shape == (8, 6, 2) and len(np.unique(executed["a"])) == 96
    assert 0.45 < np.abs(executed["a"]).max() <= 0.5 and abs(executed["a"].mean()) < 0.1


def test_shifts_are_in_halves_of_the_range_from_the_bound_and_clipped(env):
    wide = DisturbedEnv(env)
    wide.action_low, wide.action_high = np.array([-1.0, 0.0]), np.array([1.0, 4.0])
    moved = shifted(wide, lambda spec, instruction, steps: np.stack([-0.5 * steps, 0 * steps + len(instruction)], 1))
    spec = EpisodeSpec("tabletop", 0, 0, 0)
    running = RunningEpisodes([spec, None], Observation({}, None, ["x", "xx"]), np.array([3, 9]))
    actions = np.array([[[0.25, 1.0], [1.5, 3.0]], [[0.0, 0.0], [0.0, 0.0]]], np.float32)
    assert moved.motion(actions, running)[0].tolist() == [[-1.0, 3.0], [-1.0, 4.0]]
    running.steps[0] = 0
    assert moved.motion(actions, running)[0].tolist() == [[0.25, 3.0], [0.5, 4.0]], "1.5 is clipped before the shift"


@pytest.mark.parametrize("action_dim", [1, 2, 7])
def test_offsets_lie_on_circles_of_the_first_two_values(action_dim):
    offsets = plane_offsets(action_dim, [0.5, 1.0], 8)
    assert offsets.shape == (16, action_dim) and not offsets[:, 2:].any()
    assert np.linalg.norm(offsets, axis=1).max() == 1.0
    assert len(np.unique(offsets.round(6), axis=0)) == (16 if action_dim > 1 else 9)


def test_all_baselines_sample_like_the_evaluation_and_the_base_runs_first(monkeypatch):
    calls = []

    def evaluate_policy(model, env, specs, *, plan, on_result, **sampling):
        calls.append((model if isinstance(model, str) else "script", sampling))
        return EvaluationResult([EpisodeResult(spec, "reach", False, 0.0, 1) for spec in specs])

    monkeypatch.setattr(baselines, "evaluate_policy", evaluate_policy)
    env, sampling = tabletop(tasks=["reach", "reach_zone"]), {"greedy": False, "temperature": 0.7, "seed": 5}
    specs = env.episode_specs("eval")[:4]
    evaluate_baselines(
        "policy", "base", env, specs, after_base=lambda: calls.append(("exchange", sampling)), **sampling
    )
    assert [name for name, _ in calls] == ["base"] * (32 + 2 + 3) + ["exchange"] + ["policy"] * 2 + ["script"]
    assert all(given == sampling for _, given in calls)


class Recorder:
    """Stays, and records the observations."""

    def __init__(self):
        self.seen = []

    def act(self, observation):
        self.seen.append(observation)
        return np.zeros((len(observation), 1, 2))


def test_spoilt_inputs_reach_the_evaluated_policy_and_shifts_the_policy_before_rl(monkeypatch):
    monkeypatch.setattr(baselines, "NUM_TRAINING", 4)
    env = tabletop(tasks=["reach", "reach_zone"], cameras=["front"], state="none", image_size=32, max_episode_steps=2)
    specs, policy, base = env.episode_specs("eval")[:8], Recorder(), Recorder()
    plain = Recorder()
    evaluate_policy(plain, env, specs)
    first, shown = plain.seen[0].images["front"], plain.seen[0].instruction
    rows = evaluate_baselines(policy, base, env, specs)
    assert [row["success"]["episodes"] for row in rows] == [8] * 10 and len(base.seen) == 2 * (32 + 2 + 3)
    assert {text for seen in base.seen for text in seen.instruction} >= set(shown)
    grey, still, different, fixed = (policy.seen[at : at + 2] for at in range(0, 8, 2))
    assert len(policy.seen) == 8 and np.unique([seen.images["front"] for seen in grey]).tolist() == [
        round(first.mean())
    ]
    partners = [2, 3, 4, 5, 6, 7, 0, 1]  # of the same task
    for seen in still:
        np.testing.assert_array_equal(seen.images["front"], first[partners])
    assert not np.array_equal(first, first[partners]) and still[0].instruction == shown
    assert all(old != new for old, new in zip(shown, different[0].instruction, strict=True))
    assert set(different[1].instruction) <= set(shown)
    assert fixed[1].instruction == [shown[0]] * 8
    np.testing.assert_array_equal(fixed[0].images["front"], first)


def test_rows_depend_neither_on_the_number_of_envs_nor_on_ranks(monkeypatch):
    monkeypatch.setattr(baselines, "NUM_TRAINING", 6)
    monkeypatch.setattr(baselines, "plane_offsets", lambda dim: plane_offsets(dim, [ERROR], 4))
    policy, rows, settings = (
        beside(ERROR_M * DIRECTIONS),
        [],
        {"tasks": ["reach", "reach_zone"], "max_episode_steps": 16},
    )
    for num_envs in (3, 8):
        env = tabletop(num_envs, **settings)
        rows.append(evaluate_baselines(policy, None, env, env.episode_specs("eval")[:14], seed=3))
    assert rows[0] == rows[1] and len({row["success"]["return_mean"] for row in rows[0] if row["success"]}) > 5
    assert [row["success"] is None for row in rows[0]] == [False] * 5 + [True] * 2 + [False] * 3
    specs, envs = env.episode_specs("eval")[:14], [tabletop(5, **settings), env]
    ranks = on_threads(
        2,
        lambda group: evaluate_baselines(
            policy, None, envs[group.rank], specs, plan=EvaluationPlan(ranks=group), seed=3
        ),
    )
    assert ranks == [rows[0]] * 2
    other = evaluate_baselines(policy, None, env, env.episode_specs("eval")[:14], seed=4)
    assert [row == again for row, again in zip(rows[0], other, strict=True)].count(False) == 3, "control: only noise"


def test_a_task_with_several_goals_has_no_script_without_the_instruction(monkeypatch):
    monkeypatch.setattr(baselines, "NUM_TRAINING", 2)
    monkeypatch.setattr(baselines, "plane_offsets", lambda dim: plane_offsets(dim, [ERROR], 2))
    env = tabletop(tasks=["reach", "push"], max_episode_steps=2)
    *_, last = evaluate_baselines(Recorder(), None, env, env.episode_specs("eval")[:9])
    assert last["success"] is None and "script" in last["note"]
    (first,) = env.episode_specs("eval")[:1]
    assert env.task_names[first.task_id] == "reach"
    *_, last = evaluate_baselines(Recorder(), None, env, [first])
    assert last["success"]["episodes"] == 1, "idle envs with a task of several goals do not count"


def test_baselines_need_a_policy_in_this_process_and_held_out_episodes():
    evaluation = EvaluationConfig(baselines=True, num_videos_per_task=0)
    config = RunConfig(env=TabletopConfig(), evaluation=evaluation, cluster=ClusterConfig(start="ray", num_processes=1))
    check_evaluation(config)
    settings = {"model.url": "ws://host:8000", "evaluation.split": "train", "cluster.num_rollout_workers": 2}
    for key, value in settings.items():
        section, name = key.split(".")
        changed = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        with pytest.raises(ConfigError, match=rf"{key}.*{value}.*evaluation\.baselines=false"):
            (check_evaluation_workers if section == "cluster" else check_evaluation)(changed)
