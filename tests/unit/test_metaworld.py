"""Meta-World: repeatable episodes, cameras, goals, experts, and what is rejected."""

import importlib.util
import weakref
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import yaml

from rlinf.envs import make_env
from rlinf.envs.metaworld import env as adapter
from rlinf.envs.metaworld.env import CAMERAS, INSTRUCTIONS, UPSIDE_DOWN_CAMERAS, MetaWorldConfig, MetaWorldSimulator
from rlinf.options import from_mapping
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

needs_metaworld = pytest.mark.skipif(
    importlib.util.find_spec("metaworld") is None, reason="metaworld is not installed (bash scripts/setup.sh --sims)"
)


def simulator(task="reach-v3", **settings):
    return MetaWorldSimulator(MetaWorldConfig(**({"cameras": [], "state": "full"} | settings)), [task])


def spec(init_state_id=0, seed=0, task_id=0):
    return EpisodeSpec("metaworld", task_id, init_state_id, seed)


def play(sim, episode, num_steps=6):
    """States ``[T + 1, S]`` and rewards ``[T]`` of fixed random actions."""
    sim.reset(episode)
    states, rewards = [sim.observe().state], []
    for action in np.random.default_rng(0).uniform(-1, 1, (num_steps, 4)).astype(np.float32):
        rewards.append(sim.step(action).dense_reward)
        states.append(sim.observe().state)
    return np.array(states), np.array(rewards)


@needs_metaworld
def test_tasks_and_groups_are_those_of_the_package():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3
    from metaworld.policies import ENV_POLICY_MAP

    assert list(INSTRUCTIONS) == list(ALL_V3_ENVIRONMENTS) and len(INSTRUCTIONS) == 50
    assert set(INSTRUCTIONS) <= set(ENV_POLICY_MAP) and len(set(INSTRUCTIONS.values())) == 50
    groups = resources.files("rlinf.config") / "env"
    mt10 = from_mapping(MetaWorldConfig, yaml.safe_load((groups / "metaworld_mt10.yaml").read_text()))
    assert mt10.tasks == list(MT10_V3) and replace(mt10, tasks=None) == MetaWorldConfig()


@needs_metaworld
def test_an_episode_of_every_task_depends_on_its_spec_alone():
    for task in INSTRUCTIONS:
        sim = simulator(task)
        (states, rewards), other = play(sim, spec(3), 2), play(sim, spec(4), 1)
        again = play(sim, spec(3), 2)
        np.testing.assert_array_equal(again[0], states, err_msg=task)
        np.testing.assert_array_equal(again[1], rewards, err_msg=task)
        assert not np.array_equal(other[0][0], states[0]), task
        sim.close()


@needs_metaworld
@pytest.mark.parametrize("task", ["basketball-v3", "shelf-place-v3", "push-v3", "window-close-v3"])
def test_trajectories_are_those_of_the_package_for_the_same_draw(task):
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    sim = simulator(task)
    states, rewards = play(sim, spec(7))
    env = ALL_V3_ENVIRONMENTS[task]()
    env._set_task_called, env._partially_observable, env._freeze_rand_vec = True, False, True
    del env.sawyer_observation_space
    env._last_rand_vec = sim._env._last_rand_vec
    env.reset()
    steps = [env.step(a)[:2] for a in np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32)]
    # From the second step on: the package's first frame stack shows parts of the scene where they were before the reset.
    np.testing.assert_array_equal(states[2:, :39], np.array([s for s, _ in steps[1:]], dtype=np.float32))
    np.testing.assert_array_equal(rewards, 0.1 * np.array([r for _, r in steps]))
    assert not np.array_equal(play(sim, spec(8))[0], states)


@needs_metaworld
def test_the_draw_lies_in_the_package_s_space_and_fills_it():
    sim, draws = simulator("button-press-topdown-v3"), []
    for number in range(40):
        sim.reset(spec(number))
        draws.append(sim._env._last_rand_vec)
    space = sim._env._random_reset_space
    shares = (np.array(draws) - space.low) / np.maximum(space.high - space.low, 1e-9)
    assert (shares >= 0).all() and (shares <= 1).all()
    assert (shares[:, :2].min(0) < 0.15).all() and (shares[:, :2].max(0) > 0.85).all()
    expected = np.random.default_rng(derive_seed(0, "metaworld", "button-press-topdown-v3", 39))
    np.testing.assert_array_equal(draws[-1], expected.uniform(space.low, space.high))


@needs_metaworld
@pytest.mark.parametrize("task", ["reach-v3", "push-v3", "drawer-open-v3"])
def test_experts_succeed_and_idling_does_not(task):
    sim = simulator(task)
    for number, act in (
        (0, sim.expert_action),
        (1, sim.expert_action),
        (2, sim.expert_action),
        (0, lambda: np.zeros(4)),
    ):
        sim.reset(spec(number))
        assert any(sim.step(act()).success for _ in range(200)) == (act == sim.expert_action), number


@needs_metaworld
def test_a_miscalibrated_expert_stops_beside_its_goal():
    sim, offset = simulator("reach-v3"), np.array([0.08, -0.06])
    sim.reset(spec(2))
    for _ in range(150):
        sim.step(sim.expert_action(tuple(offset)))
    hand, goal = sim.observe().state[:3], sim.observe().state[36:39]
    np.testing.assert_allclose(hand[:2] - goal[:2], offset, atol=0.015)


@needs_metaworld
def test_repeated_actions_are_single_steps_up_to_success():
    one, five = simulator(), simulator(action_repeat=5)
    one.reset(spec(1))
    five.reset(spec(1))
    num_steps = 0
    while num_steps < 60:
        num_steps += 1
        action = five.expert_action()
        step = five.step(action)
        for _ in range(5):
            single = one.step(action)
            if single.success:
                break
        assert step == single
        np.testing.assert_array_equal(one.observe().state, five.observe().state)
        if step.success:
            break
    assert step.success and num_steps > 3


@needs_metaworld
def test_states_have_the_declared_width_and_name_the_task():
    tasks = ["window-close-v3", "reach-v3"]
    for state, width in (("full", 89), ("proprio", 4), ("none", 0)):
        config = MetaWorldConfig(tasks=tasks, state=state, cameras=[], num_processes=0)
        env = make_env(config, 2, auto_reset=False)
        assert env.task_names == ["reach-v3", "window-close-v3"]  # in the suite's order
        seen = env.reset(options={"episodes": [spec(), spec(task_id=1)]})[0]
        assert env.state_dim == env.state_width(config) == width
        assert (
            seen.instruction == [INSTRUCTIONS[name] for name in env.task_names] == [*map(env.instruction_of, range(2))]
        )
        if state == "none":
            assert seen.state is None and env.state_bounds() is None
            continue
        assert seen.state.shape == (2, width) and seen.state.dtype == np.float32
        if state == "proprio":
            low, high = env.state_bounds()
            assert ((seen.state >= low) & (seen.state <= high)).all()
        else:
            places = [list(INSTRUCTIONS).index(name) for name in env.task_names]  # not their places in env.tasks
            np.testing.assert_array_equal(seen.state[:, 39:], np.eye(50)[places])
        env.close()


@needs_metaworld
def test_pictures_are_upright():
    sim = simulator("drawer-close-v3", cameras=list(CAMERAS), image_size=32)
    sim.reset(spec())
    model, data = sim._env.model, sim._env.data
    assert {model.camera(index).name for index in range(model.ncam)} == set(CAMERAS)
    for camera in CAMERAS:
        up = data.cam_xmat[model.camera(camera).id].reshape(3, 3)[2, 1]  # height gained on the way up the image
        assert (up < -0.1) == (camera in UPSIDE_DOWN_CAMERAS), (camera, up)
    as_drawn = simulator("drawer-close-v3", cameras=list(CAMERAS), image_size=32, upright=False)
    as_drawn.reset(spec())
    turned, raw = sim.observe().images, as_drawn.observe().images
    for camera in CAMERAS:
        expected = raw[camera][::-1, ::-1] if camera in UPSIDE_DOWN_CAMERAS else raw[camera]
        np.testing.assert_array_equal(turned[camera], expected)
        assert turned[camera].std() > 10 and turned[camera].shape == (32, 32, 3)


def goal_colour(sim, size=256):
    """Mean colour of the pixels of topview where the goal must be: 1.5 m above (0, 0.5), 45 degrees wide, y upwards."""
    image, (x, y, z) = sim._render_camera("topview", size).astype(int), sim._numbers[36:]
    scale = size / 2 / np.tan(np.radians(22.5)) / (1.5 - z)
    row, column = round(size / 2 - (y - 0.5) * scale), round(size / 2 + x * scale)
    return image[row - 1 : row + 2, column - 1 : column + 2].reshape(-1, 3).mean(0)


@needs_metaworld
@pytest.mark.parametrize("task", ["reach-v3", "assembly-v3", "sweep-v3"])
def test_the_goal_is_drawn_where_it_is(task, monkeypatch):
    sim = simulator(task)
    sim.reset(spec(1))
    sim.step(np.zeros(4, np.float32))
    seen = goal_colour(sim)
    monkeypatch.setattr(adapter, "_show_goal", lambda env: env.data.site_xpos.__setitem__(slice(None), -5.0))
    hidden = goal_colour(sim)
    assert np.abs(seen - hidden).max() > 60, (seen, hidden)


@needs_metaworld
def test_one_renderer_of_a_task_draws_all_its_envs():
    from rlinf.envs.graphics.renderer import StateRenderer

    sims = [simulator("peg-insert-side-v3", cameras=["corner4"], image_size=48) for _ in range(2)]
    images = []
    for number, sim in enumerate(sims):
        sim.reset(spec(number))
        own = StateRenderer(sim._env.model, 48, 400)
        images.append(sim.observe().images["corner4"])
        expected = own.render([sim._env.data], [sim._env.model.camera("corner4").id])[0, 0, ::-1, ::-1]
        np.testing.assert_array_equal(images[-1], expected)
        own.close()
    assert sims[0]._env is not sims[1]._env and not np.array_equal(*images)


@needs_metaworld
def test_fast_images_have_few_triangles_and_nearly_the_same_pixels():
    cameras, views = ["corner4", "gripperPOV"], []
    for rendering, number in (("full", 1), ("fast", 1), ("full", 2)):
        sim = simulator("soccer-v3", cameras=cameras, image_size=64, rendering=rendering)
        sim.reset(spec(number))
        views.append(np.stack([sim.observe().images[camera] for camera in cameras]).astype(float))
    full, fast, other = views
    differences = np.abs(fast - full).mean((1, 2, 3))
    assert (differences > 0).all() and (differences < 3).all()
    assert (np.abs(other - full).mean((1, 2, 3)) > differences).all(), "control: another initial state"
    path = sim._env.fullpath
    slow, light = (int(adapter._renderers[64, fast][path].model.mesh_facenum.sum()) for fast in (False, True))
    assert light < slow / 3


@needs_metaworld
def test_scenes_are_used_again_and_idle_ones_are_few(monkeypatch):
    monkeypatch.setattr(adapter, "_idle_scenes", [])
    monkeypatch.setattr(adapter, "MAX_IDLE_SCENES", 1)
    first, second = simulator("reach-v3"), simulator("reach-v3")
    first.reset(spec())
    second.reset(spec())
    scenes = first._env, second._env
    assert scenes[0] is not scenes[1]
    first.close()
    second.close()
    assert [env for _, env in adapter._idle_scenes] == [scenes[1]]  # the one that was used last
    third = simulator("reach-v3")
    third.reset(spec(1))
    assert third._env is scenes[1] and not adapter._idle_scenes


@needs_metaworld
def test_poses_tell_where_things_are():
    sim = simulator("drawer-open-v3")
    sim.reset(spec(1))
    before = sim.poses()
    for _ in range(120):
        sim.step(sim.expert_action())
    after = sim.poses()
    assert all(len(pose) == 7 and abs(np.linalg.norm(pose[3:]) - 1) < 1e-6 for pose in after.values())
    np.testing.assert_allclose(after["hand"][:3], sim.observe().state[:3], atol=1e-6)
    assert after["drawer_link"][1] < before["drawer_link"][1] - 0.1 and after["drawer"] == before["drawer"]


@needs_metaworld
@pytest.mark.parametrize(
    ("camera", "upright"), [("corner4", True), ("corner4", False), ("corner2", True), ("topview", True)]
)
def test_the_path_of_a_chunk_is_where_the_fingers_are_seen(camera, upright):
    sim = simulator(cameras=[camera], upright=upright, image_size=32)
    sim.reset(spec(3))
    for _ in range(25):
        sim.step(np.array([1.0, 0.2, -0.3, -1.0]))
    for _ in range(60):  # until the arm rests
        sim.step(np.array([0.0, 0.0, 0.0, -1.0]))
    chunk = np.array([[-1.0, 0.5, 0.5, -1.0]] * 10)
    path, before = sim.chunk_path(chunk, 256), sim.render(256).astype(int)
    np.testing.assert_array_equal(sim.chunk_path(chunk, 128), path / 2)
    for _ in range(6):
        sim.step(np.array([0.0, 0.0, 0.0, 1.0]))
    rows, columns = np.nonzero(np.abs(sim.render(256) - before).max(-1) > 20)  # the gripper closes
    seen = np.array([np.median(columns), np.median(rows)])
    assert np.linalg.norm(path[0] - seen) < 15, "pixels of 256"
    assert np.linalg.norm(256 - path[0] - seen) > 40, "control: the image the other way around"
    again, later = sim.chunk_path(chunk, 256), []
    for action in chunk:
        sim.step(action)
        later.append(sim.chunk_path(chunk[:1], 256)[0])
    np.testing.assert_allclose(later, again[1:], atol=1e-6)
    assert np.linalg.norm(later[-1] - (2 * path[0] - path[-1])) > 5, "control: the other direction"


@needs_metaworld
def test_renderers_beyond_the_number_of_envs_are_closed(monkeypatch):
    monkeypatch.setattr(adapter, "_renderers", {})
    monkeypatch.setattr(adapter, "_simulators", weakref.WeakSet())
    monkeypatch.setattr(adapter, "MIN_RENDERERS", 1)
    tasks = ["reach-v3", "push-v3", "door-open-v3"]
    sims = [MetaWorldSimulator(MetaWorldConfig(tasks=tasks, image_size=16), tasks) for _ in range(2)]
    seen = []

    def show(sim, task_id):
        sim.reset(spec(task_id=task_id))
        sim.observe()
        seen.append(list(adapter._renderers[16, False].values())[-1])

    for number in (0, 1):
        show(sims[number], number)
    for number in (0, 1):
        show(sims[number], number)
    assert seen[2:] == seen[:2], "one for each env: two tasks in turn do not take each other's"
    show(sims[0], 2)
    assert [renderer._gl is None for renderer in (*seen[:2], seen[-1])] == [True, False, False]
    assert len(adapter._renderers[16, False]) == 2
