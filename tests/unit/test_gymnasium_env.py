"""gymnasium ids as environments: what the env says arrives unchanged, and what does not fit is rejected with what to type."""

import importlib
import re
import sys
from dataclasses import replace
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.contracts.env import check_env
from rlinf.envs import make_env
from rlinf.envs.graphics import backend as graphics
from rlinf.envs.gymnasium import env as gymnasium_env
from rlinf.envs.gymnasium.env import GymnasiumConfig, GymnasiumSimulator, action_bounds, action_of, spaces_of
from rlinf.envs.process.trial import run_in_child, run_trial
from rlinf.errors import ConfigError, MissingDependencyError, SimulatorError
from rlinf.preflight.compatibility import check_evaluation
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

MODULE = '''
import ctypes
import os

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


class Remembers(Walk):
    """Its first episode starts elsewhere than the ones after it."""

    def reset(self, seed=None, options=None):
        self.start, before = 0.5, self.start
        super().reset(seed=seed)
        self.place[0] = before
        return self.observe(), {}


class Short(Walk):
    """Says itself that time is over, after 4 steps."""

    def reset(self, seed=None, options=None):
        self.time = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.time += 1
        *most, _, info = super().step(action)
        return *most, self.time >= 4, info


class Undrawable(Walk):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled("run `pip install paint`")


class Plain(gymnasium.Env):
    """As short as an env can be: no render_mode, no render_modes."""

    metadata = {"render_fps": 4}
    action_space = observation_space = gymnasium.spaces.Box(-0.1, 0.1, (1,), np.float64)

    def reset(self, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return action, 0.0, False, False, {}


class OldReset(Plain):
    def reset(self):
        return self.np_random.uniform(-0.1, 0.1, 1)


class NoInfo(Plain):
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-0.1, 0.1, 1)


class OldStep(Plain):
    def step(self, action):
        return action, 0.5, False, {}


class Bare:
    """No gymnasium.Env at all."""

    action_space = observation_space = Plain.action_space
    step = OldStep.step

    def reset(self):
        return np.zeros(1)


class Dies(Plain):
    def reset(self, seed=None, options=None):
        print("loading meshes")
        os._exit(7)


class Crashes(Plain):
    def step(self, action):
        return ctypes.string_at(0)


class Hangs(Plain):
    def step(self, action):
        while True:
            pass


class Raises(Plain):
    def reset(self, seed=None, options=None):
        raise LookupError("no mesh 'cup.obj'")


gymnasium.register("Undrawable-v0", entry_point=Undrawable, max_episode_steps=6)
gymnasium.register("Remembers-v0", entry_point=Remembers, max_episode_steps=6)
gymnasium.register("Short-v0", entry_point=Short)
for name, changes in {"Walk-v0": {}, "Unbounded-v0": {"action_space": gymnasium.spaces.Box(-np.inf, np.inf, (1,))},
                      "Tuple-v0": {"action_space": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])},
                      "Blind-v0": {"metadata": {"render_modes": []}},
                      "Words-v0": {"observation_space": gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))}}.items():
    gymnasium.register(name, entry_point=type(name[:-3], (Walk,), changes), max_episode_steps=6)
for each in (Plain, OldReset, NoInfo, OldStep, Bare, Dies, Crashes, Hangs, Raises):
    gymnasium.register(f"{each.__name__}-v0", entry_point=each, max_episode_steps=6)
gymnasium.register("Endless-v0", entry_point=Walk)
'''  # fmt: skip


def tried_here(trial, config, what):
    """A trial without the process around it, which takes a second."""
    return run_trial(trial(config))


@pytest.fixture(scope="module", autouse=True)
def walk_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "walk_for_tests.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.import_module("walk_for_tests")
        patch.setattr(gymnasium_env, "run_in_child", tried_here)
        yield
    sys.modules.pop("walk_for_tests")  # so that tests which come back to this file on this worker register again
    for name in [name for name, spec in gymnasium.registry.items() if "walk_for_tests" in str(spec.entry_point)]:
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
    assert not np.array_equal(other.state[0], bare.reset(seed=seed)[0]), "another episode starts elsewhere"


def test_a_state_is_the_flattened_observation_and_has_its_bounds():
    env = build(kwargs={"start": 0.6})
    observation, _ = env.reset()
    assert env.state_dim == 4 and env.instruction_of(0) == "do the task"
    near, place = observation.state[0, :2], observation.state[0, 2:]
    np.testing.assert_array_equal(near, [0, 1])
    assert place[0] == np.float32(0.6)
    np.testing.assert_array_equal(env.state_bounds()[1], [1, 1, 2, 2])


SPACES = {
    "a choice": (gymnasium.spaces.Discrete(3, start=-1), [[-1.5, 1.5]], [[-1.5], [-0.4], [0.6], [1.5]], [-1, 0, 1, 1]),
    "choices": (gymnasium.spaces.MultiDiscrete([[2, 3]]), [[-0.5, 1.5], [-0.5, 2.5]],
                [[-0.5, -0.5], [0.4, 1.6], [1.5, 2.5]], [[[0, 0]], [[0, 2]], [[1, 2]]]),
    "switches": (gymnasium.spaces.MultiBinary(2), [[-0.5, 1.5]] * 2, [[-0.5, 1.5], [0.6, 0.4]], [[0, 1], [1, 0]]),
    "integers": (gymnasium.spaces.Box(0, 5, (1,), np.uint8), [[-0.5, 5.5]], [[-0.5], [2.6], [5.5]], [[0], [3], [5]]),
    "numbers": (gymnasium.spaces.Box(-2, 1, (1, 1), np.float64), [[-2, 1]], [[-2], [0.25], [1]], [[[-2]], [[0.25]], [[1]]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPACES)
def test_numbers_stand_for_actions_of_the_space(kind):
    space, bounds, given, expected = SPACES[kind]
    low, high = action_bounds(space, "Any-v0")
    assert low.dtype == high.dtype == np.float32 and np.stack([low, high], 1).tolist() == bounds
    for numbers, action in zip(given, expected, strict=True):
        taken = action_of(space, np.float32(numbers))
        assert space.contains(taken) and np.array_equal(taken, action), (numbers, taken)


def test_an_env_that_keeps_things_over_a_reset_is_made_again_for_each_episode():
    env = build(name="Remembers-v0")
    places = [env.reset(seed=number)[0].state[0, 2] for number in range(3)]
    assert places == [0.0, 0.0, 0.0] and check_env(lambda n, auto: build(n, auto, name="Remembers-v0")) == []
    kept = build(name="Remembers-v0", new_each_episode=False)
    assert [kept.reset(seed=number)[0].state[0, 2] for number in range(3)] == [0.0, 0.5, 0.5], "the control"


def test_pictures_of_a_mujoco_env_depend_on_the_episode_alone():
    pytest.importorskip("mujoco")
    if graphics.probe_rendering()[0] is None:
        pytest.skip(graphics.probe_rendering()[1])
    size = {"width": 48, "height": 48}
    config = GymnasiumConfig(id="InvertedPendulum-v5", cameras=["render"], image_size=48, kwargs=size)

    def images(settings, numbers):
        """The first images of episodes that follow each other in one simulator."""
        simulator = GymnasiumSimulator(settings, [settings.id])
        seen = []
        for number in numbers:
            simulator.reset(EpisodeSpec("gymnasium", 0, number, 0))
            seen.append(simulator.observe().images["render"])
        simulator.close()
        return seen

    (first,), (other, again) = images(config, [0]), images(config, [1, 0])
    np.testing.assert_array_equal(again, first)
    assert not np.array_equal(other, first)
    kept = images(replace(config, new_each_episode=False), [1, 0])
    assert not np.array_equal(kept[1], first), "the control: the camera looks where the first episode started"


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("limit", [4, 5])
def test_an_env_s_own_time_limit_is_a_truncation_and_no_end(limit, processes):
    env = build(name="Short-v0", max_episode_steps=limit, num_processes=processes)
    env.reset()
    assert steps_of(env, 0.0, 4)[-1][2:] == (False, True)
    env.reset()
    assert steps_of(env, -0.3, 4)[-1][2:] == (True, False), "it also fell off"
    env.close()


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
    stateless = build(name="Words-v0", state="none", cameras=["render"])  # its observation could not be a state
    assert stateless.reset()[0].images["render"].shape == (1, 64, 64, 3)


@pytest.mark.parametrize(("kind", "found"), [
    ("float", "float64 .* from 0 to 0.5"), ("rgba", r"uint8 \(30, 40, 4\)"),
])  # fmt: skip
def test_pictures_of_another_number_format_are_refused_before_a_run(monkeypatch, walk_module, kind, found):
    images = {
        "float": np.linspace(0.0, 0.5, 3600).reshape(30, 40, 3), "bool": np.ones((30, 40, 3), bool),
        "int": np.full((30, 40, 3), 100), "rgba": np.full((30, 40, 4), 100, np.uint8),
    }  # fmt: skip
    monkeypatch.setattr("walk_for_tests.Walk.render", lambda self: images[kind])
    monkeypatch.setattr(gymnasium_env, "_results", {})
    with pytest.raises(ConfigError, match=f"env.id=.* renders images of {found}.*expected uint8.*set env.cameras"):
        build(cameras=["render"], image_size=20)


@pytest.mark.parametrize(("settings", "words"), [
    ({"id": "Pendulun-v1"}, ["Pendulun-v1", "Did you mean 'Pendulum-v1'"]),
    ({"id": "no_such_module_at_all:Env-v0"}, ["no_such_module_at_all", "PYTHONPATH"]),
    ({"id": "walk_for_tests:Tuple-v0"}, ["Tuple(", "with finite bounds, Discrete", "env.id"]),
    ({"id": "walk_for_tests:Unbounded-v0"}, ["inf", "finite bounds"]),
    ({"id": "walk_for_tests:Words-v0"}, ["Sequence", "env.state=none"]),
    ({"id": "walk_for_tests:Endless-v0"}, ["without a time limit", "env.max_episode_steps=200"]),
    ({"cameras": ["render", "render"]}, ["repeats a camera", "Set env.cameras=[render]"]),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_type(settings, words):
    with pytest.raises(ConfigError) as raised:
        make_env(GymnasiumConfig(num_processes=0, **settings), 1, auto_reset=False)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(("raised", "error", "words"), [
    (ImportError("run `pip install shimmy`"), MissingDependencyError, "env.id=Other-v1 .*pip install shimmy"),
    (ModuleNotFoundError("No module named 'jax'", name="jax"), MissingDependencyError, "env.id=Other-v1 .*jax"),
    (gymnasium.error.DependencyNotInstalled("run `pip install paint`"), MissingDependencyError, "Other-v1 .*install paint"),
    (OSError("no.xml does not exist"), ConfigError, "env.kwargs={'xml_file': 'no.xml'}: OSError: no.xml.* set env.kwargs="),
])  # fmt: skip
def test_an_env_that_cannot_be_made_is_told_with_what_to_type(monkeypatch, raised, error, words):
    monkeypatch.setattr(gymnasium, "make", Mock(side_effect=raised))
    with pytest.raises(error, match=words):
        spaces_of(GymnasiumConfig(id="Other-v1", kwargs={"xml_file": "no.xml"}))


def test_frames_are_drawn_without_a_camera_and_an_env_that_cannot_is_told_how_to_do_without():
    env = build()
    env.reset()
    assert env.render_frames([0], 32).shape == (1, 32, 32, 3)
    with pytest.raises(MissingDependencyError, match=r"Undrawable-v0 need.*pip install paint.*env\.cameras=\[\]"):
        build(name="Undrawable-v0", cameras=["render"])
    build(name="Undrawable-v0").reset()
    env = build(name="Blind-v0")
    env.reset()
    with pytest.raises(ConfigError, match="Blind-v0.*num_videos_per_task=0"):
        env.render_frames([0], 32)
    with pytest.raises(ConfigError, match=r"Blind-v0.*env.cameras=\[\]"):
        build(name="Blind-v0", cameras=["render"])


def test_videos_that_cannot_be_drawn_are_refused_before_the_run(monkeypatch):
    def check(name, num_videos=2):
        given = ["env=gymnasium", f"env.id={name}", f"evaluation.num_videos_per_task={num_videos}"]
        check_evaluation(build_config(compose_config(given)))

    check("walk_for_tests:Walk-v0")
    with pytest.raises(MissingDependencyError, match="pip install paint.*set .*evaluation.num_videos_per_task=0"):
        check("walk_for_tests:Undrawable-v0")
    with pytest.raises(ConfigError, match="no render_mode=rgb_array.*Set evaluation.num_videos_per_task=0"):
        check("walk_for_tests:Blind-v0")
    for name in ("walk_for_tests:Undrawable-v0", "walk_for_tests:Blind-v0"):
        check(name, num_videos=0)
    monkeypatch.setattr("rlinf.envs.gymnasium.env.choose_backend", lambda *_: pytest.fail("opened a GL"))
    check("InvertedPendulum-v5")


def test_actions_lie_in_a_space_whose_bounds_are_no_float32():
    space = gymnasium.spaces.Box(np.array([-0.1, -1e-3]), np.array([0.1, 0.3]), (2,), np.float64)
    low, high = action_bounds(space, "x")
    assert np.float64(low[0]) < space.low[0], "the control: in float32 the bound lies outside"
    for numbers in (low, high, (low + high) / 2):
        assert space.contains(action_of(space, numbers))
    whole = gymnasium.spaces.Box(0, 2**31 - 1, (1,), np.int32)
    assert [int(action_of(whole, bound)[0]) for bound in action_bounds(whole, "x")] == [0, 2**31 - 1]
    for bound, width in ((1e300, 1), (1.0, 0)):
        with pytest.raises(ConfigError, match="finite bounds"):
            action_bounds(gymnasium.spaces.Box(-bound, bound, (width,), np.float64), "x")


def test_an_env_without_render_modes_has_no_pictures_and_runs():
    env = build(name="Plain-v0")
    assert check_env(lambda num_envs, auto: build(num_envs, auto, name="Plain-v0")) == []
    assert env.metadata["render_fps"] == 4 and env.config.cameras == []
    with pytest.raises(ConfigError, match=r"no render_mode=rgb_array. Set env.cameras=\[\]"):
        build(name="Plain-v0", cameras=["render"])


def test_a_class_that_is_no_gymnasium_env_is_named():
    with pytest.raises(ConfigError, match=r"Bare-v0 .*class MyEnv\(gymnasium.Env\)"):
        build(name="Bare-v0")


@pytest.mark.parametrize(
    ("name", "words"), [("OldReset-v0", "no seed"), ("NoInfo-v0", "without info"), ("OldStep-v0", "not 5")]
)
def test_gym_s_older_interface_is_named_with_a_line_that_mends_it(monkeypatch, name, words):
    with pytest.raises(ConfigError, match=f"{name}.*{words}") as raised:
        build(name=name)
    line, scope = re.search("`(def .*?)`", str(raised.value))[1], {"gymnasium": gymnasium}
    exec(f"class Mended(gymnasium.Wrapper):\n    {line}", scope)
    maker = gymnasium.spec(name).entry_point
    mended = gymnasium.envs.registration.EnvSpec("Mended-v0", lambda: scope["Mended"](maker()), max_episode_steps=6)
    monkeypatch.setitem(gymnasium.registry, "Mended-v0", mended)
    monkeypatch.setattr(gymnasium_env, "_results", {})
    gymnasium_env._spaces_here.cache_clear()
    config = GymnasiumConfig(id="Mended-v0", num_processes=0)
    assert check_env(lambda num_envs, auto: make_env(config, num_envs, auto_reset=auto)) == []


@pytest.mark.parametrize(("name", "words"), [
    ("Dies-v0", ["first reset", "status 7", "loading meshes"]), ("Crashes-v0", ["first step", "SIGSEGV", "walk_for_tests.py"]),
    ("Hangs-v0", ["first step", "0.5 s (env.step_timeout_s)", "walk_for_tests.py"]),
    ("Raises-v0", ["first reset", "LookupError", "cup.obj", "walk_for_tests.py"]),
])  # fmt: skip
def test_an_env_that_dies_or_hangs_at_its_first_call_ends_a_process_of_its_own(monkeypatch, name, words):
    monkeypatch.setattr(gymnasium_env, "run_in_child", run_in_child)
    with pytest.raises(SimulatorError) as raised:
        build(name=name, step_timeout_s=0.5)
    assert all(word in str(raised.value) for word in [f"walk_for_tests:{name}", *words]), raised.value


PLUGIN = """
import gymnasium
from walk_for_tests import Plain

class Own(Plain):
    pass

gymnasium.register("{name}-class-v0", entry_point=Own, max_episode_steps=6)
gymnasium.register("{name}-lambda-v0", entry_point=lambda **kwargs: Own(**kwargs), max_episode_steps=6)
"""


@pytest.mark.parametrize("kind", ["class", "lambda"])
def test_what_a_plugin_registers_reaches_the_worker_processes(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(gymnasium_env, "run_in_child", run_in_child)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"plugin_of_{kind}"
    (tmp_path / f"{name}.py").write_text(PLUGIN.format(name=name))
    given = ["env=gymnasium", f"env.id={name}-{kind}-v0", f"plugins=[{tmp_path}/{name}.py]", "env.num_processes=1"]
    env = make_env(build_config(compose_config(given)).env, 1, auto_reset=False)
    assert env.reset()[0].state.tolist() == [[0.0]]
    env.close()


def test_an_env_of_the_main_script_runs_in_this_process_or_is_refused(monkeypatch):
    maker = sys.modules["walk_for_tests"].Plain
    monkeypatch.setattr(maker, "__module__", "__main__")
    monkeypatch.setitem(
        gymnasium.registry, "OfMain-v0", gymnasium.envs.registration.EnvSpec("OfMain-v0", maker, max_episode_steps=6)
    )
    monkeypatch.setattr(gymnasium_env, "run_in_child", run_in_child)
    with pytest.raises(ConfigError, match=r"OfMain-v0.*that registers it: plugins=\["):
        make_env(GymnasiumConfig(id="OfMain-v0"), 1, auto_reset=False)
    env = make_env(GymnasiumConfig(id="OfMain-v0", num_processes=0), 1, auto_reset=False)
    assert env.reset()[0].state.tolist() == [[0.0]]
