"""PushT and the SO-101 arm: the package's own numbers, units, sentences, experts, and lighter meshes for images."""

import importlib.util

import numpy as np
import pytest

from rlinf.envs import make_env
from rlinf.envs.graphics.renderer import clustered, lighten
from rlinf.envs.pusht.env import PushTConfig, PushTSimulator
from rlinf.envs.so101 import env as so101
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

needs_pusht = pytest.mark.skipif(
    importlib.util.find_spec("gym_pusht") is None, reason="gym-pusht is not installed (bash scripts/setup.sh --arms)"
)
needs_so101 = pytest.mark.skipif(
    importlib.util.find_spec("so101_nexus") is None,
    reason="so101-nexus is not installed (Python 3.12, bash scripts/setup.sh --arms)",
)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"colours": ["red", "pink"]}, r"red,pink.*Set env.colours=\[red\]"), ({"colours": []}, "one or more"),
     ({"num_distractors": 1}, r"num_distractors=1 with 1 colours.*Set env.colours=\[red,orange\]")],
)  # fmt: skip
def test_cubes_that_cannot_be_are_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        so101.SO101VectorEnv.check_names(so101.SO101Config(**settings))


@pytest.mark.parametrize(
    ("config", "version", "words"),
    [(PushTConfig(), (3, 12), "'gym-pusht' is missing.*setup.sh --arms"),
     (so101.SO101Config(), (3, 11), "'so101-nexus' is missing.*PYTHON=python3.12 .*setup.sh --arms"),
     (so101.SO101Config(), (3, 12), "'so101-nexus' is missing.*setup.sh --arms")],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_installation(config, version, words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setattr("sys.version_info", version)
    with pytest.raises(MissingDependencyError, match=words):
        make_env(config, 1, auto_reset=False)


def pusht(**settings):
    simulator = PushTSimulator(PushTConfig(**settings), ["push_t"])
    simulator.reset(EpisodeSpec("pusht", 0, 3, 0))
    return simulator


@needs_pusht
def test_pusht_has_the_packages_states_rewards_and_pictures():
    from gym_pusht.envs.pusht import PushTEnv

    theirs = PushTEnv(obs_type="pixels_agent_pos", observation_width=48, observation_height=48)
    seen, _ = theirs.reset(seed=derive_seed(0, "pusht", 3) % 2**31)
    ours = pusht(image_size=48, cameras=["top"], state="proprio")
    for action in np.random.default_rng(0).uniform(0, 512, (20, 2)).astype(np.float32):
        view = ours.observe()
        assert np.array_equal(view.images["top"], seen["pixels"])
        assert np.array_equal(view.state, seen["agent_pos"].astype(np.float32))
        seen, reward, _, _, info = theirs.step(action.astype(np.float64))
        step = ours.step(action)
        assert step.dense_reward == reward and step.success == info["is_success"]


@needs_pusht
def test_pusht_succeeds_above_95_percent_and_pays_the_fraction():
    simulator = pusht(dense="coverage")
    body = simulator._env.block
    goal = simulator._env.get_goal_pose_body(simulator._env.goal_pose)
    simulator._env.agent.position = 40, 40
    body.angle, body.position = goal.angle, goal.position
    assert simulator.step(np.array([40, 40], np.float32)) == (1.0, True, False, False)
    assert simulator._distance() == pytest.approx(0, abs=1e-3)
    body.position = goal.position + (30, 40)  # all corners move by 50 pixels
    assert simulator._distance() == pytest.approx(50, abs=1e-3)
    below = simulator.step(np.array([40, 40], np.float32))
    assert 0 < below.dense_reward < 1 and not below.success
    simulator.config.dense = "keypoints"
    assert simulator.step(np.array([40, 40], np.float32)).dense_reward == pytest.approx(below.dense_reward - 50 / 128)


@needs_pusht
def test_a_step_pulls_the_disc_relative_to_where_it_is():
    """Three repeated steps to the right; the same numbers as a target would pull it into a corner."""
    simulator = pusht(action="step", step_size=50, action_repeat=3)
    start = simulator.poses()["disc"][:2]
    by_target = pusht()
    for _ in range(3):
        place = by_target.poses()["disc"][:2]
        by_target.step(np.array([place[0] + 50, place[1]], np.float32))
    simulator.step(np.array([1, 0], np.float32))
    x, y = simulator.poses()["disc"][:2]
    assert (x, y) == pytest.approx(tuple(by_target.poses()["disc"][:2]), abs=1e-3)
    assert 20 < x - start[0] < 150 and y == pytest.approx(start[1])


def test_units_go_there_and_back():
    config = so101.SO101Config(units="lerobot")
    assert so101.in_units(config, so101.LOW)[5] == 0 and so101.in_units(config, so101.HIGH)[5] == 100
    assert so101.in_units(config, np.full(6, np.pi / 6))[:5] == pytest.approx(np.full(5, 30.0))
    joints = np.linspace(so101.LOW, so101.HIGH, 5)[3]
    assert so101.from_units(config, so101.in_units(config, joints)) == pytest.approx(joints)


def test_vertices_of_a_cell_become_one_and_flat_triangles_go():
    vertices = np.array([[0, 0, 0], [0.1, 0, 0], [2, 0, 0], [0, 2, 0], [2.2, 0, 0]], dtype=float)
    faces = np.array([[0, 2, 3], [2, 3, 1], [0, 1, 3], [3, 2, 0], [1, 4, 3]])
    means, left = clustered(vertices, faces, cell_m=1.0)
    assert sorted(map(tuple, means)) == [(0.0, 2.0, 0.0), (0.05, 0.0, 0.0), (2.1, 0.0, 0.0)]
    one, other, top = (means.tolist().index(each) for each in ([0.05, 0.0, 0.0], [2.1, 0.0, 0.0], [0.0, 2.0, 0.0]))
    turned = {tuple(np.roll([one, other, top], k)) for k in range(3)}
    mirrored = {tuple(np.roll([one, top, other], k)) for k in range(3)}
    assert len(left) == 2 and {tuple(face) for face in left} <= turned | mirrored


def test_a_lighter_mesh_keeps_its_place():
    """A sphere of thousands of triangles; the control is a cell as wide as the sphere, which leaves nothing."""
    mujoco = pytest.importorskip("mujoco")
    angles = np.linspace(0, 2 * np.pi, 60, endpoint=False), np.linspace(0.05, np.pi - 0.05, 60)
    turn, tilt = (grid.ravel() for grid in np.meshgrid(*angles))
    points = 0.05 * np.stack([np.sin(tilt) * np.cos(turn), np.sin(tilt) * np.sin(turn), np.cos(tilt)], axis=1)
    text = " ".join(f"{number:.6f}" for number in points.ravel())
    xml = f'<mujoco><asset><mesh name="ball" vertex="{text}"/></asset><worldbody><geom type="mesh" mesh="ball"/></worldbody></mujoco>'
    model = mujoco.MjModel.from_xml_string(xml)
    before = int(model.mesh_facenum[0])
    lighten(model, 0.02)
    after = int(model.mesh_facenum[0])
    used = model.mesh_vert[np.unique(model.mesh_face[:after])]
    assert 20 < after < before / 10
    assert np.linalg.norm(used, axis=1) == pytest.approx(np.full(len(used), 0.05), abs=0.012)
    corners = model.mesh_vert[model.mesh_face[:after]]
    normals = model.mesh_normal[model.mesh_facenormal[:after, 0]]
    assert ((corners.mean(1) * normals).sum(1) > 0).all()  # outwards
    assert not len(clustered(points, np.array([[0, 1, 2]]), 1.0)[1])


@pytest.fixture(scope="module")
def arm():
    return so101.SO101Simulator(so101.SO101Config(action_repeat=2), list(so101.TASKS))


def play(simulator, task_id, init_state_id, num_steps):
    simulator.reset(EpisodeSpec("so101", task_id, init_state_id, 0))
    rewards = []
    for _ in range(num_steps):
        step = simulator.step(simulator.expert_action())
        rewards.append(step.dense_reward)
        if step.success:
            return True, rewards
    return False, rewards


@needs_so101
@pytest.mark.parametrize(("task_id", "num_episodes"), [(0, 2), (1, 1), (2, 3)])
def test_the_expert_of_the_arm_succeeds(arm, task_id, num_episodes):
    assert all(play(arm, task_id, index, 200)[0] for index in range(num_episodes))


@needs_so101
def test_an_expert_that_misses_the_cube_lifts_nothing(arm):
    arm.reset(EpisodeSpec("so101", 0, 0, 0))
    assert not any(arm.step(arm.expert_action(aim_offset_m=(0.05, 0.05))).success for _ in range(100))


@needs_so101
def test_touch_pays_its_change_so_that_waiting_pays_nothing(arm):
    arm.reset(EpisodeSpec("so101", 2, 0, 0))
    still = sum(arm.step(np.zeros(6, np.float32)).dense_reward for _ in range(30))
    assert abs(still) < 0.05
    assert 0.2 < sum(play(arm, 2, 0, 200)[1]) <= 1.0


@needs_so101
def test_the_limits_sentences_and_steps_are_the_packages(arm):
    from so101_nexus.mujoco.base_env import _DELTA_ACTION_SCALE

    assert np.array_equal(so101.DELTA, _DELTA_ACTION_SCALE)
    for task_id, task in enumerate(so101.TASKS.values()):
        arm.reset(EpisodeSpec("so101", task_id, 0, 0))
        assert arm._env.task_description == task.instruction.format("red")
        assert arm._env._target_low == pytest.approx(so101.LOW) and arm._env._target_high == pytest.approx(so101.HIGH)
        assert 1 / arm._env.control_dt == so101.CONTROL_FREQ_HZ
        view = arm.observe()
        assert view.state.shape == (so101.FULL_STATE,) and view.state[-3 + task_id] == 1 and view.state[-3:].sum() == 1
        assert np.array_equal(view.state[:6], arm._env._get_current_qpos().astype(np.float32))


@needs_so101
def test_pictures_of_light_meshes_show_the_scene_of_the_full_ones(arm):
    arm.reset(EpisodeSpec("so101", 0, 1, 0))
    images = {}
    for rendering in ("fast", "full"):
        arm.config.rendering = rendering
        images[rendering] = arm._render_camera("wrist", 48).astype(int)
    arm.config.rendering = "fast"
    arm.reset(EpisodeSpec("so101", 0, 2, 0))
    other = arm._render_camera("wrist", 48).astype(int)
    near = np.abs(images["fast"] - images["full"]).mean()
    assert near < np.abs(other - images["full"]).mean(), "another scene looks as near"
    red = [image[..., 0] > 2 * image[..., 1] + 40 for image in images.values()]
    assert np.logical_and(*red).sum() > 0.8 * np.logical_or(*red).sum() > 0


@needs_so101
def test_arms_that_share_a_scene_do_not_disturb_each_other():
    """Two arms in turns, with cubes of two colours that are there or not, as each alone; sharing alone would fail."""
    config = so101.SO101Config(colours=["red", "green"], num_distractors=1, action_repeat=2)

    def run(simulators, specs):
        for simulator, spec in zip(simulators, specs, strict=True):
            simulator.reset(spec)
        return [
            [
                (simulator.step(simulator.expert_action()).dense_reward, simulator.observe().state)
                for simulator in simulators
            ]
            for _ in range(25)
        ]

    specs = [EpisodeSpec("so101", 1, index, 0) for index in (0, 5)]
    together = run([so101.SO101Simulator(config, list(so101.TASKS)) for _ in specs], specs)
    for place, spec in enumerate(specs):
        alone = run([so101.SO101Simulator(config, list(so101.TASKS))], [spec])
        for (reward, state), both in zip((each[0] for each in alone), together, strict=True):
            assert reward == both[place][0] and np.array_equal(state, both[place][1])
