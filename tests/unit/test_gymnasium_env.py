"""gymnasium ids as environments: what the env says arrives unchanged, and what does not fit is refused with what to type."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rlinf.envs import make_env
from rlinf.envs.checker import check_env
from rlinf.envs.gymnasium_env import GymnasiumConfig, GymnasiumVectorEnv, spaces_of
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.seeding import derive_seed

MODULE = '''
import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """A point on a line: the action is its step, the goal is at 1; it falls off at -1."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space = gymnasium.spaces.Box(-0.5, 0.5, (2, 1), np.float64)
    observation_space = gymnasium.spaces.Dict(
        {"place": gymnasium.spaces.Box(-2.0, 2.0, (2,)), "near": gymnasium.spaces.Discrete(2)}
    )

    def __init__(self, render_mode=None, start=0.0, told=True):
        self.render_mode, self.start, self.told = render_mode, start, told

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.array([self.start, self.np_random.uniform(-0.1, 0.1)], np.float32)
        return self.observe(), {}

    def observe(self):
        return {"place": self.place, "near": int(self.place[0] > 0.5)}

    def step(self, action):
        assert action.shape == (2, 1) and action.dtype == np.float64
        self.place = self.place + action[:, 0].astype(np.float32)
        info = {"success": self.place[0] >= 1.0} if self.told else {}
        return self.observe(), float(self.place[0]), bool(self.place[0] < -1.0), False, info

    def render(self):
        return np.full((30, 60, 3), int(np.clip(100 + 50 * self.place[0], 0, 255)), np.uint8)


for name, changes in {"Walk-v0": {}, "Unbounded-v0": {"action_space": gymnasium.spaces.Box(-np.inf, np.inf, (1,))},
                      "Blind-v0": {"metadata": {"render_modes": []}},
                      "Words-v0": {"observation_space": gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))}}.items():
    gymnasium.register(name, entry_point=type(name[:-3], (Walk,), changes), max_episode_steps=6)
gymnasium.register("Endless-v0", entry_point=Walk)
'''  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def walk_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "walk_for_tests.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
    for name in ("Walk-v0", "Unbounded-v0", "Blind-v0", "Words-v0", "Endless-v0"):
        gymnasium.registry.pop(name, None)


def config_of(name="Walk-v0", **settings):
    return GymnasiumConfig(id=f"walk_for_tests:{name}", **{"num_processes": 0, **settings})


def build(num_envs=1, auto_reset=False, name="Walk-v0", **settings):
    return make_env(config_of(name, **settings), num_envs, auto_reset=auto_reset)


def steps_of(env, step, count):
    """Rewards, success, terminated, truncated of each of ``count`` equal steps of a single env."""
    action = np.full((1, 1, 2), step, np.float32)
    results = [env.chunk_step(action) for _ in range(count)]
    return [(float(r.rewards[0, 0]), bool(r.success[0]), bool(r.terminated[0]), bool(r.truncated[0])) for r in results]


@pytest.mark.parametrize(
    "settings",
    [{"cameras": ["render"], "image_size": 16}, {"terminate_on_success": True, "success_bonus": 1.0}, {"state": "none", "cameras": ["render"]}],
)  # fmt: skip
def test_an_env_of_a_module_fulfils_the_contract(settings):
    assert check_env(lambda num_envs, auto: build(num_envs, auto, **settings)) == []


def test_an_env_of_a_module_runs_in_processes_and_gives_the_same_numbers():
    seen = []
    for count in (0, 2):
        env = build(3, num_processes=count, cameras=["render"], image_size=16)
        env.reset(seed=4)
        actions = np.random.default_rng(0).uniform(-0.5, 0.5, (3, 4, 2)).astype(np.float32)
        step = env.chunk_step(actions)
        seen.append((step.observation.state, step.observation.images["render"], step.rewards))
        env.close()
    for here, there in zip(*seen, strict=True):
        np.testing.assert_array_equal(here, there)


def test_an_episode_is_that_of_the_bare_env_with_the_seed_of_its_spec():
    env = make_env(GymnasiumConfig(id="Pendulum-v1", num_processes=0), 1, auto_reset=False)
    spec = env.episode_specs("eval")[3]
    bare = gymnasium.make("Pendulum-v1")
    seed = derive_seed(spec.seed, "gymnasium", "Pendulum-v1", spec.init_state_id) % 2**31
    expected, _ = bare.reset(seed=seed)
    observation, _ = env.reset(options={"episodes": [spec]})
    np.testing.assert_array_equal(observation.state[0], expected)
    for action in np.random.default_rng(0).uniform(-2, 2, (5, 1)).astype(np.float32):
        expected, reward, *_ = bare.step(action)
        observation, rewards, *_ = env.step(action[None])
        np.testing.assert_array_equal(observation.state[0], expected)
        assert rewards[0] == np.float32(reward)
    other, _ = env.reset(options={"episodes": [env.episode_specs("eval")[4]]})
    assert not np.array_equal(other.state[0], bare.reset(seed=seed)[0]), "another episode begins elsewhere"


def test_a_state_is_the_flattened_observation_and_has_its_bounds():
    env = build(kwargs={"start": 0.6})
    observation, _ = env.reset()
    assert env.state_dim == 4 and env.instruction_of(0) == "do the task"
    near, place = observation.state[0, :2], observation.state[0, 2:]
    np.testing.assert_array_equal(near, [0, 1])
    assert place[0] == np.float32(0.6)
    np.testing.assert_array_equal(env.state_bounds()[1], [1, 1, 2, 2])


def test_success_termination_and_the_time_limit_are_passed_on():
    env = build()
    env.reset()
    assert steps_of(env, 0.5, 6) == [(0.5, False, False, False), (1.0, True, False, False), (1.5, True, False, False),
                                     (2.0, True, False, False), (2.5, True, False, False), (3.0, True, False, True)]  # fmt: skip
    env.reset()
    assert steps_of(env, -0.5, 3)[-1] == (-1.5, False, True, False), "it fell off: terminated, and not by success"
    env = build(terminate_on_success=True, success_bonus=10.0)
    env.reset()
    assert steps_of(env, 0.5, 2)[-1] == (11.0, True, True, False)


@pytest.mark.parametrize(("threshold", "expected"), [(10.5, True), (10.6, False)])
def test_a_success_by_return_is_counted_when_the_episode_ends(threshold, expected):
    env = build(kwargs={"told": False}, success_return=threshold, reward_scale=0.5)
    env.reset()
    outcomes = steps_of(env, 0.5, 6)  # 0.5 + 1 + ... + 3 = 10.5
    assert [reward for reward, *_ in outcomes] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert [success for _, success, _, _ in outcomes] == [False] * 5 + [expected]
    env = build(kwargs={"told": False}, success_return=-9.0)
    env.reset()
    assert [success for _, success, _, _ in steps_of(env, -0.5, 3)] == [False, False, True], "not before its end"


def test_pictures_are_stretched_to_a_square():
    env = build(cameras=["render"], image_size=20)
    observation, _ = env.reset()
    assert observation.images["render"].shape == (1, 20, 20, 3) and (observation.images["render"] == 100).all()
    assert env.render_frames([0], 48).shape == (1, 48, 48, 3)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"id": "Pendulun-v1"}, ConfigError, ["Pendulun-v1", "Did you mean 'Pendulum-v1'"]),
        ({"id": "no_such_module_at_all:Env-v0"}, ConfigError, ["no_such_module_at_all", "PYTHONPATH"]),
        ({"id": "CartPole-v1"}, ConfigError, ["Discrete(2)", "Box with finite bounds", "env.id"]),
        ({"id": "walk_for_tests:Unbounded-v0"}, ConfigError, ["inf", "finite bounds"]),
        ({"id": "walk_for_tests:Words-v0"}, ConfigError, ["Sequence", "env.state=none"]),
        ({"id": "walk_for_tests:Endless-v0"}, ConfigError, ["without a time limit", "env.max_episode_steps=200"]),
        ({"kwargs": {"gravityy": 1}}, ConfigError, ["gravityy", "env.kwargs={...}"]),
        ({"cameras": ["front"]}, ConfigError, ["front", "env.cameras=[render]"]),
        ({"cameras": ["render", "render"]}, ConfigError, ["twice", "Type env.cameras=[render]"]),
        ({"tasks": ["other"]}, ConfigError, ["other", "Type env.tasks=[Pendulum-v1]"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_type(settings, error, words):
    with pytest.raises(error) as raised:
        make_env(GymnasiumConfig(num_processes=0, **settings), 1, auto_reset=False)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_package_that_the_env_needs_is_named(monkeypatch):
    def missing(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled(
            'pygame is not installed, run `pip install "gymnasium[classic_control]"`'
        )

    monkeypatch.setattr(gymnasium, "make", missing)
    with pytest.raises(MissingDependencyError, match=r"env.id=Other-v0 .*pip install"):
        spaces_of(GymnasiumConfig(id="Other-v0"))


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (ImportError("run `pip install shimmy`"), MissingDependencyError, ["env.id=Other-v1", "pip install shimmy"]),
        (ModuleNotFoundError("No module named 'jax'", name="jax"), MissingDependencyError, ["env.id=Other-v1", "jax"]),
        (
            OSError("File no.xml does not exist"),
            ConfigError,
            ["no.xml", "env.kwargs={'xml_file': 'no.xml'}", "Type env.kwargs="],
        ),
        (ValueError("XML Error"), ConfigError, ["XML Error", "Type env.kwargs="]),
    ],
)
def test_an_env_that_cannot_be_made_is_told_with_what_to_type(monkeypatch, raised, error, words):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(error) as told:
        spaces_of(GymnasiumConfig(id="Other-v1", kwargs={"xml_file": "no.xml"}))
    assert all(word in str(told.value) for word in words), told.value


def test_the_physics_engine_is_among_the_packages_that_the_manifest_records():
    pytest.importorskip("mujoco")
    assert set(GymnasiumVectorEnv.packages_of(GymnasiumConfig(id="Reacher-v5"))) >= {"gymnasium", "mujoco"}
    assert "mujoco" not in GymnasiumVectorEnv.packages_of(GymnasiumConfig(id="Pendulum-v1"))


def test_frames_are_drawn_without_a_camera_and_an_env_that_cannot_is_told_how_to_do_without():
    env = build()
    env.reset()
    assert env.render_frames([0], 32).shape == (1, 32, 32, 3)
    env = build(name="Blind-v0")
    env.reset()
    with pytest.raises(ConfigError, match="Blind-v0.*num_videos_per_task=0"):
        env.render_frames([0], 32)
    with pytest.raises(ConfigError, match=r"Blind-v0.*env.cameras=\[\]"):
        build(name="Blind-v0", cameras=["render"])
