"""The base class of environments, on a simulator whose numbers are counted by hand."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlinf.envs import ENVS, make_env
from rlinf.envs.base import SimulatorStep, VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import EVAL_INIT_STATE_OFFSET, EpisodeList
from rlinf.envs.libero.tasks import package_folder
from rlinf.errors import ConfigError, MissingDependencyError, NonFiniteError
from rlinf.types import EpisodeSpec, Observation


class CountingEnv(VectorEnv):
    """Counts up; dense reward = new count x 10; success at 3 + init_state_id; failure on actions above 0.9."""

    suite = "counting"

    def __init__(self, config, num_envs, auto_reset):
        super().__init__(config, num_envs, auto_reset, action_low=[-1.0], action_high=[2.0])
        self.counts = np.zeros(num_envs, dtype=np.int64)
        self.goals = np.zeros(num_envs, dtype=np.int64)
        self.num_observed = 0

    @classmethod
    def all_task_names(cls, config):
        return ["one", "two", "three"]

    @property
    def state_dim(self):
        return 1

    def _reset_env(self, index, spec):
        self.counts[index], self.goals[index] = 0, 3 + spec.init_state_id

    def _step_envs(self, ids, actions):
        self.counts[ids] += 1
        dense = (10.0 * self.counts[ids]).astype(np.float32)
        return SimulatorStep(dense, self.counts[ids] == self.goals[ids], actions[:, 0] > 0.9)

    def _observe(self, ids):
        self.num_observed += len(ids)
        return Observation({}, self.counts[ids][:, None].astype(np.float32), ["count"] * len(ids))


def spec(init_state_id, task_id=0):
    return EpisodeSpec("counting", task_id, init_state_id, 0)


def build(num_envs=2, auto_reset=False, **settings):
    return CountingEnv(EnvConfig(cameras=[], max_episode_steps=5, **settings), num_envs, auto_reset)


def test_chunk_stops_at_success_and_pays_the_bonus_once():
    env = build(reward_mode="shaped", success_bonus=1.0)
    env.reset(options={"episodes": [spec(0), spec(100)]})
    step = env.chunk_step(np.zeros((2, 4, 1)))
    assert step.rewards.tolist() == [[10, 20, 31, 0], [10, 20, 30, 40]]
    assert step.executed.tolist() == [[True, True, True, False], [True] * 4]
    assert step.terminated.tolist() == [True, False] and step.truncated.tolist() == [False, False]
    assert step.final_env_ids.tolist() == [0] and step.final_observation.state.tolist() == [[3]]
    result = step.episodes[0]
    assert (result.task, result.success, result.episode_return, result.num_env_steps) == ("one", True, 61.0, 3)


@pytest.mark.parametrize("name", ["success", "terminated", "truncated"])
@pytest.mark.parametrize("value", [float("nan"), 0.5, "no"])
def test_a_flag_of_a_simulator_that_is_none_is_refused_by_name(monkeypatch, name, value):
    env, step = build(2), CountingEnv._step_envs
    monkeypatch.setattr(CountingEnv, "_step_envs", lambda *given: step(*given)._replace(**{name: np.array([0, value])}))
    env.reset(options={"episodes": [spec(0), spec(1)]})
    with pytest.raises(ConfigError, match=rf"`{name}`.*0 or 1"):
        env.chunk_step(np.zeros((2, 1, 1)))


def test_an_episode_that_the_simulator_cuts_is_truncated_unless_it_also_ends(monkeypatch):
    env, step = build(2), CountingEnv._step_envs
    cut = np.array([True, True])
    monkeypatch.setattr(CountingEnv, "_step_envs", lambda *given: step(*given)._replace(truncated=cut))
    env.reset(options={"episodes": [spec(0), spec(1)]})
    result = env.chunk_step(np.array([[[0.0]] * 3, [[1.0]] * 3]))  # an action of 1 is a failure
    assert result.executed.tolist() == [[True, False, False]] * 2
    assert (result.terminated.tolist(), result.truncated.tolist()) == ([False, True], [True, False])
    assert result.final_observation.state.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("mode", "expected"), [("sparse", [0, 0, 5, 0]), ("shaped", [10, 20, 35, 40]), ("relative", [10, 10, 15, 10])]
)
def test_reward_modes(mode, expected):
    env = build(1, reward_mode=mode, success_bonus=5.0, terminate_on_success=False)
    env.reset(options={"episodes": [spec(0)]})
    assert env.chunk_step(np.zeros((1, 4, 1))).rewards.tolist() == [expected]


@pytest.mark.parametrize(
    ("init_state", "settings", "actions", "expected"),
    [
        (100, {}, [0] * 7, (False, True, False, 5)),
        (2, {}, [0] * 7, (True, False, True, 5)),  # a success in the last step is no truncation
        (2, {}, [0, 1, 0], (True, False, False, 2)),  # a failure
        (0, {"terminate_on_success": False}, [0] * 7, (False, True, True, 5)),  # success at 3 is remembered
    ],
    ids=["time limit", "success in the last step", "failure", "success without termination"],
)
def test_an_episode_has_one_end(init_state, settings, actions, expected):
    env = build(1, **settings)
    env.reset(options={"episodes": [spec(init_state)]})
    step = env.chunk_step(np.array(actions, dtype=float)[None, :, None])
    (result,) = step.episodes
    ends = step.terminated.item(), step.truncated.item()
    assert (*ends, step.success.item(), step.executed.sum()) == expected
    assert (result.success, result.num_env_steps) == expected[2:]


def test_finished_rows_freeze_and_are_not_observed_again():
    env = build()
    env.reset(options={"episodes": [spec(0), spec(100)]})
    env.chunk_step(np.zeros((2, 4, 1)))
    before = env.num_observed
    step = env.chunk_step(np.zeros((2, 1, 1)))
    assert env.num_observed - before == 1
    assert step.rewards[0].tolist() == [0] and not step.executed[0].any() and not step.terminated[0]
    assert step.observation.state.tolist() == [[3], [5]] and step.success.tolist() == [True, False]


def test_a_row_without_an_episode_is_neither_reset_nor_observed_nor_stepped():
    env = build(3)
    env.counts[:], env.goals[:] = 7, -1
    observation, _ = env.reset(options={"episodes": [None, spec(0), None]})
    assert env.num_observed == 1 and observation.state.tolist() == [[0]] * 3  # idle rows show the first one in use
    step = env.chunk_step(np.ones((3, 2, 1)) * 0.5)
    assert env.counts.tolist() == [7, 2, 7] and env.goals.tolist() == [-1, 3, -1] and env.num_observed == 2
    assert step.executed.tolist() == [[False] * 2, [True] * 2, [False] * 2] and not step.rewards[[0, 2]].any()
    assert step.observation.state.tolist() == [[0], [2], [0]] and env.current_specs() == [None, spec(0), None]
    step = env.chunk_step(np.zeros((3, 2, 1)))
    assert step.final_env_ids.tolist() == [1] and [one.spec for one in step.episodes] == [spec(0)]
    assert not (step.terminated | step.truncated)[[0, 2]].any() and not len(step.lost_env_ids)
    assert not env.chunk_step(np.zeros((3, 4, 1))).executed.any()
    env.reset(options={"episodes": [spec(100), None, None]})  # an idle row runs, and the row that ran is idle
    step = env.chunk_step(np.zeros((3, 7, 1)))
    assert step.executed.sum(1).tolist() == [5, 0, 0] and step.final_env_ids.tolist() == [0]


def test_auto_reset_shows_the_next_episode_and_keeps_the_last_observation():
    env = build(auto_reset=True)
    asked = []

    def next_episode(row):
        asked.append(row)
        return spec(50)

    env.reset(options={"episodes": [spec(0), spec(100)], "next_episode": next_episode})
    step = env.chunk_step(np.zeros((2, 3, 1)))
    assert asked == [0] and env.current_specs() == [spec(50), spec(100)]
    assert step.observation.state.tolist() == [[0], [3]] and step.final_observation.state.tolist() == [[3]]
    assert env.chunk_step(np.zeros((2, 1, 1))).observation.state.tolist() == [[1], [4]]


def test_step_returns_gymnasiums_five():
    env = build(auto_reset=True)
    observation, infos = env.reset(options={"episodes": [spec(0), spec(1)], "next_episode": lambda row: spec(9)})
    assert observation.state.tolist() == [[0], [0]] and infos == {}
    for _ in range(2):
        env.step(np.zeros((2, 1)))
    observation, rewards, terminated, truncated, infos = env.step(np.zeros((2, 1)))
    assert observation.state.tolist() == [[0], [3]] and rewards.tolist() == [31, 30]
    assert terminated.tolist() == [True, False] and truncated.tolist() == [False, False]
    assert infos["success"].tolist() == [True, False] and infos["_final_obs"].tolist() == [True, False]
    assert infos["final_obs"][0].state.tolist() == [[3]] and infos["final_obs"][1] is None


def test_reset_without_options_draws_training_episodes_by_seed():
    env = build(8)
    draws = []
    for seed in (1, 1, 2):
        env.reset(seed=seed)
        draws.append(env.current_specs())
    assert draws[0] == draws[1] != draws[2]
    assert all(one.init_state_id < 100_000 for one in draws[0])


def test_episode_list_is_round_robin_and_disjoint():
    env = build(num_train_init_states=4, num_eval_init_states=2)
    assert env.task_names == ["one", "two", "three"] and build(tasks=["three", "one"]).task_names == ["one", "three"]
    train, held_out = env.episode_specs("train"), env.episode_specs("eval")
    assert (len(train), len(held_out)) == (12, 6)
    assert [one.task_id for one in train[:6]] == [0, 1, 2, 0, 1, 2] and train[-1] == train[11]
    assert len({*train, *held_out}) == 18
    with pytest.raises(IndexError):
        train[12]
    assert len(EpisodeList("x", 10, 10**8, 0, 0)) == 10**9  # made on demand


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build(tasks=["thre"]), "Did you mean 'three'"),
        (lambda: build(tasks=[]), r"env.tasks is \[\]; expected at least one"),
        (lambda: build(num_train_init_states=EVAL_INIT_STATE_OFFSET + 1).episode_specs("train"), "evaluation split"),
        (lambda: build().reset(options={"episode": []}), "Did you mean 'episodes'"),
        (lambda: build().reset(options={"episodes": [spec(0)]}), "1 episodes for 2 envs"),
        (lambda: build(2, True).reset(options={"episodes": [spec(0), None]}), "Env 1 has None.*auto_reset=False"),
        (lambda: build(1).reset(options={"episodes": [EpisodeSpec("other", 0, 0, 0)]}), "not an episode of 'counting'"),
        (lambda: build().step(np.zeros((2, 1))), "call reset"),
        (lambda: build().render_frames([0], 64), "cannot render"),
        (lambda: make_env(EnvConfig(name="tabletpo"), 1, auto_reset=True), "Did you mean 'tabletop'"),
        (lambda: make_env(OmegaConf.create({"name": "tabletop"}), 1, auto_reset=True),
         r"called with a DictConfig; expected an EnvConfig\. Pass build_config\(<composed configuration>\)\.env"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (np.zeros((2, 1, 2)), r"shape \(2, 1, 2\)"),
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (np.array([[[0.0]], [[np.inf]]]), "env 1 is not finite"),
    ],
)
def test_bad_actions_are_refused_before_anything_moves(actions, words):
    env = build()
    env.reset()
    with pytest.raises(ConfigError, match=words):
        env.chunk_step(actions)
    assert env.counts.tolist() == [0, 0]


def test_action_statistics_are_those_of_the_bounds():
    statistics = build().action_statistics()["action"]
    assert statistics["q01"] == [-1.0] and statistics["q99"] == [2.0] and statistics["mask"] == [True]
    assert statistics["mean"] == [0.5] and statistics["std"] == pytest.approx([3 / 12**0.5])


def test_a_method_that_is_missing_is_named():
    class Half(VectorEnv):
        @classmethod
        def all_task_names(cls, config):
            return ["one"]

    class Most(Half):
        def _observe(self, ids):
            return Observation({}, None, ["wait"] * len(ids))

    for cls, error, words in (
        (Half, TypeError, "Half.*_observe"),
        (Most, NotImplementedError, "Most overrides neither _reset_env nor _reset_envs"),
    ):
        with pytest.raises(error, match=words):
            cls(EnvConfig(cameras=[]), 2, False, -np.ones(1), np.ones(1))


def test_modules_of_envs_import_neither_simulators_nor_torch():
    """So that a worker process starts fast, and a missing simulator is no error of an import."""
    names = (
        "{'torch', 'mujoco', 'libero', 'robosuite', 'metaworld', 'mani_skill', 'sapien', 'gym_pusht', 'so101_nexus'}"
    )
    modules = ", ".join(
        f"rlinf.envs{name}"
        for name in ("", ".libero.env", ".metaworld.env", ".maniskill.env", ".pusht.env", ".so101.env")
    )
    code = f"import sys; import rlinf.envs; print('gymnasium' in sys.modules); import {modules}; print({names} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "set()"], result.stdout + result.stderr


SIMULATORS = {
    "metaworld": "rlinf.envs.metaworld.env.importlib.util.find_spec",
    "maniskill": "rlinf.envs.maniskill.scene.find_spec",
    "libero": "rlinf.envs.libero.tasks.importlib.util.find_spec",
}
"""Env that needs a package, to the function with which it looks for it."""


@pytest.mark.parametrize("name", SIMULATORS)
def test_a_missing_package_is_named_with_its_installation(name, monkeypatch):
    monkeypatch.setattr(SIMULATORS[name], lambda *_: None)
    package = {"maniskill": "mani_skill"}.get(name, name)
    if name == "libero":
        package_folder.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=f"'{package}' is missing.*bash scripts/setup.sh --sims"):
            make_env(ENVS.get(name).config_class(), 1, auto_reset=False)
    finally:
        package_folder.cache_clear()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("tabletop", {"tasks": ["rech"]}, r"Did you mean 'reach'\?.*Set env.tasks=\[reach\]"),
        ("metaworld", {"cameras": ["topview", "coner4"]},
         r"'coner4' in env\.cameras\. Did you mean 'corner4'\?.* Set env\.cameras=\[topview,corner4\]"),
        ("libero", {"suite": "libero_goal", "tasks": ["turn_on_the_stov"]}, "Did you mean 'turn_on_the_stove'"),
        ("maniskill", {"cameras": ["base_camera"] * 2}, r"repeats a camera. Set env.cameras=\[base_camera\]"),
        ("maniskill", {"tasks": None, "state": "full"}, "'PickCube-v1': 42.*env.state=proprio"),
        ("maniskill_gpu", {"tasks": None}, r"selects 12.*env.tasks=\[PickCube-v1\]"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_refused_with_the_nearest_one_before_a_simulator_starts(
    name, settings, words, monkeypatch
):
    if name == "libero" and importlib.util.find_spec("libero") is None:
        pytest.skip("LIBERO is not installed (bash scripts/setup.sh --sims)")
    if name in SIMULATORS or name == "maniskill_gpu":
        monkeypatch.setattr("rlinf.envs.maniskill.scene.find_spec", lambda package: package)
    config = ENVS.get(name).config_class(**settings)
    with pytest.raises(ConfigError, match=words):
        ENVS.get(name).check_names(config)
        make_env(config, 2, auto_reset=False)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize(("where", "words"), [
    ("first state", "env 1, task 'two', .*init_state_id=7.*, env step 0: value 0 of the state .from 0. is"),
    ("state", "env 1, task 'two', .*init_state_id=7.*, env step 2: value 0 of the state .from 0. is"),
    ("reward", "env 1, task 'two', .*init_state_id=7.*, env step 2: the reward for action 1 of its chunk .from 0. is"),
])  # fmt: skip
def test_rewards_and_states_that_are_not_finite_are_refused_by_env_task_and_step(where, words, value):
    env = build(reward_mode="shaped")
    observe, step = env._observe, env._step_envs

    def broken_observe(ids):
        seen = observe(ids)
        if where == "first state" or (where == "state" and env.counts[1] == 2):
            seen.state[ids == 1] = value
        return seen

    def broken_step(ids, actions):
        taken = step(ids, actions)
        taken.dense_reward[(ids == 1) & (env.counts[ids] == 2) & (where == "reward")] = value
        return taken

    env._observe, env._step_envs = broken_observe, broken_step
    episodes = {"episodes": [spec(5), spec(7, task_id=1)]}
    with pytest.raises(NonFiniteError, match=f"env.name=.*{words} {value}"):
        env.reset(options=episodes)
        env.chunk_step(np.zeros((2, 2, 1)))
    env._observe, env._step_envs = observe, step  # control
    env.reset(options=episodes)
    assert np.isfinite(env.chunk_step(np.zeros((2, 2, 1))).rewards).all()


@pytest.mark.parametrize(("images", "state", "words"), [
    ({"front": np.full((2, 8, 8, 3), 0.5)}, np.float32, r"Images of 'front' are float64 .* must be uint8 \[2, height, width, 3\]"),
    ({}, np.float64, r"`state` is float64 \(2, 1\); it must be float32 \[2, 1\]"),
    ({"front": np.zeros((2, 8, 8, 3), np.uint8)}, np.float32, None),
])  # fmt: skip
def test_images_and_states_of_another_number_format_are_refused(images, state, words):
    env = build()
    env._observe = lambda ids: Observation(images, env.counts[ids][:, None].astype(state), ["count"] * len(ids))
    if words is None:
        env.reset()
        return
    with pytest.raises(ConfigError, match=words):
        env.reset()
