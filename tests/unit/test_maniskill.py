"""ManiSkill: its own numbers arrive unchanged, an episode depends on its spec alone, and what is wrong is said at once."""

from __future__ import annotations

from importlib.util import find_spec
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.envs import make_env
from rlinf.envs.graphics import backend as graphics
from rlinf.envs.maniskill import scene as maniskill_scene
from rlinf.envs.maniskill.env import ManiSkillConfig, ManiSkillSimulator
from rlinf.envs.maniskill.gpu_env import ManiSkillGpuConfig, ManiSkillGpuVectorEnv
from rlinf.envs.maniskill.scene import TASKS, seed_of
from rlinf.errors import ConfigError
from rlinf.types import EpisodeSpec


@pytest.fixture(scope="session")
def vulkan():
    if find_spec("mani_skill") is None:
        pytest.skip("the package mani_skill is not installed (scripts/setup.sh --sims)")
    works, message = graphics.probe_vulkan("cpu")
    if not works:
        pytest.skip(message)
    return graphics.choose_vulkan("cpu")


@pytest.fixture(scope="module", autouse=True)
def renderer(request):
    """A scene that keeps SAPIEN's renderer, which takes seconds to make, while the tests of this file run."""
    if find_spec("mani_skill") is None or not graphics.probe_vulkan("cpu")[0]:
        yield None
        return
    simulator = simulator_of(task="PushCube-v1")
    yield simulator
    simulator.close()


def spec_of(number, task_id=0):
    return EpisodeSpec("maniskill", task_id, number, 0)


def simulator_of(task="PushCube-v1", number=0, **settings):
    settings = {"cameras": [], "state": "full", "tasks": [task], **settings}
    graphics.choose_vulkan("cpu")
    simulator = ManiSkillSimulator(ManiSkillConfig(**settings), settings["tasks"])
    simulator.reset(spec_of(number))
    return simulator


def actions_of(count, width=7):
    return np.random.default_rng(3).uniform(-1, 1, (count, width)).astype(np.float32)


def test_every_task_has_the_time_limit_and_the_state_width_of_maniskill(vulkan):
    import mani_skill.envs  # noqa: F401
    from mani_skill.utils.registration import REGISTERED_ENVS

    assert {task: REGISTERED_ENVS[task].max_episode_steps for task in TASKS} == {
        task: known.horizon for task, known in TASKS.items()
    }
    simulator = ManiSkillSimulator(ManiSkillConfig(cameras=[], state="full", tasks=None), list(TASKS))
    for task_id, (task, known) in enumerate(TASKS.items()):
        simulator.reset(spec_of(0, task_id))
        assert simulator.observe().state.shape == (known.state_dim,), task
        assert simulator.observe().instruction == known.instruction


def test_an_episode_is_that_of_the_bare_env_with_the_seed_of_its_spec(vulkan):
    import gymnasium
    import mani_skill.envs  # noqa: F401

    bare = gymnasium.make(
        "LiftPegUpright-v1", obs_mode="state", control_mode="pd_ee_delta_pose", reward_mode="normalized_dense",
        sim_backend="physx_cpu", render_backend="cpu",
    )  # fmt: skip
    simulator = simulator_of("LiftPegUpright-v1", number=9)
    for action in actions_of(5):  # what ran before must not matter
        simulator.step(action)
    simulator.reset(spec_of(4))
    expected, _ = bare.reset(seed=seed_of("LiftPegUpright-v1", 4, 0))
    np.testing.assert_array_equal(simulator.observe().state, expected[0].numpy())
    for action in actions_of(8):
        expected, reward, _, _, info = bare.step(action)
        step = simulator.step(action)
        np.testing.assert_array_equal(simulator.observe().state, expected[0].numpy())
        assert (step.dense_reward, step.success) == (float(reward), bool(info["success"]))
    simulator.reset(spec_of(5))
    assert not np.array_equal(
        simulator.observe().state, bare.reset(seed=seed_of("LiftPegUpright-v1", 4, 0))[0][0].numpy()
    )
    bare.close()


@pytest.mark.parametrize(("task", "seed"), [("PullCubeTool-v1", 10), ("PlugCharger-v1", 8)])
def test_an_episode_with_contacts_is_the_same_in_a_used_simulator_as_in_a_fresh_one(vulkan, task, seed):
    """Contacts that PhysX keeps from the episode before would move things by centimetres."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (40, 7)).astype(np.float32)
    actions[:, 2] -= 0.5  # down, into the objects and the table
    actions[:, 3:6] *= 0.2
    actions = actions.clip(-1, 1)

    def play(simulator, number, taken):
        simulator.reset(spec_of(number))
        return [np.append(simulator.observe().state, simulator.step(action).dense_reward) for action in taken]

    fresh = play(simulator_of(task), 0, actions)
    used = simulator_of(task)
    other = play(used, 2, [*actions[::-1], *[actions[3]] * 20])
    np.testing.assert_array_equal(play(used, 0, actions), fresh)
    assert not np.array_equal(other[0], fresh[0]), "the control: another episode starts elsewhere"


@pytest.mark.parametrize(
    ("control", "width"), [("pd_ee_delta_pose", 7), ("pd_ee_delta_pos", 4), ("pd_joint_delta_pos", 8)]
)
def test_every_control_mode_has_its_actions_and_an_action_moves_the_hand(vulkan, control, width):
    env = make_env(ManiSkillConfig(control_mode=control, cameras=[], num_processes=0), 1, auto_reset=False)
    env.reset()
    assert env.action_dim == width == env._local._simulators[0]._scene._env.single_action_space.shape[0]
    before = np.array(env.poses([0])[0]["hand"][:3])
    env.chunk_step(np.eye(1, width, dtype=np.float32).repeat(3, 0)[None])
    assert np.linalg.norm(env.poses([0])[0]["hand"][:3] - before) > 0.05
    env.close()


def test_success_is_what_the_task_says_of_the_present_state(vulkan):
    from mani_skill.utils.structs.pose import Pose

    simulator = simulator_of("PushCube-v1")
    still = np.zeros(7, np.float32)
    assert not simulator.step(still).success
    env = simulator._scene._env
    env.obj.set_pose(
        Pose.create_from_pq(env.goal_region.pose.p + env.obj.pose.p * env.obj.pose.p.new_tensor([0, 0, 1]))
    )
    step = simulator.step(still)
    assert step.success and step.dense_reward == 1.0 and not step.terminated


def test_poses_tell_where_things_are(vulkan):
    simulator = simulator_of("PushCube-v1", state="proprio")
    poses = simulator.poses()
    assert set(poses) == {"cube", "goal_region", "hand"} and all(len(pose) == 7 for pose in poses.values())
    assert poses["cube"][2] == pytest.approx(0.02, abs=1e-3), "a cube of 4 cm lies on the table"
    np.testing.assert_array_equal(np.float32(poses["hand"]), simulator.observe().state[18:])


def test_pictures_show_the_goal_only_where_asked(vulkan):
    simulator, seen = simulator_of("PickCube-v1", cameras=["base_camera"], image_size=64), {}
    for simulator.config.show_goals in (False, True):
        image = simulator.observe().images["base_camera"].astype(int)
        assert image.shape == (64, 64, 3) and image.std() > 20
        green = (image[..., 1] > 1.5 * image[..., 0]) & (image[..., 1] > 1.5 * image[..., 2])
        seen[simulator.config.show_goals] = green.sum()
    assert seen[False] == 0 and seen[True] > 3, f"green pixels: {seen}"
    frame = simulator.render(48)
    assert frame.shape == (48, 48, 3) and frame.dtype == np.uint8
    simulator.close()


def test_the_class_for_the_gpu_gives_the_numbers_of_the_simulator(vulkan):
    """On the CPU, where it can have one row: all of its code but the device."""

    class OneRow(ManiSkillGpuVectorEnv):
        devices = ("physx_cpu", "cpu")

    env = OneRow(ManiSkillGpuConfig(tasks=["PushCube-v1"], image_size=32), 1, True)
    specs = [spec_of(2), spec_of(7)]
    queue = iter(specs[1:])
    observation, _ = env.reset(options={"episodes": specs[:1], "next_episode": lambda row: next(queue)})
    simulator = simulator_of("PushCube-v1", 2, cameras=["base_camera"], image_size=32, state="proprio")
    np.testing.assert_array_equal(observation.state[0], simulator.observe().state)
    actions = actions_of(4)
    step = env.chunk_step(actions[None])
    rewards = [simulator.step(action).dense_reward for action in actions]
    np.testing.assert_allclose(step.rewards[0], np.diff([0.0, *rewards]), atol=1e-6)
    view = simulator.observe()
    np.testing.assert_array_equal(step.observation.state[0], view.state)
    np.testing.assert_array_equal(step.observation.images["base_camera"][0], view.images["base_camera"])
    assert env.poses([0]) == [simulator.poses()]
    np.testing.assert_array_equal(env.render_frames([0], 40)[0], simulator.render(40))
    env._stats.horizons[:] = 5
    step = env.chunk_step(actions[:2][None])
    assert step.truncated[0] and env.current_specs() == specs[1:]
    simulator.reset(specs[1])
    np.testing.assert_array_equal(step.observation.state[0], simulator.observe().state)
    env.close()
    simulator.close()


def test_a_step_of_others_leaves_a_row_as_it_is(vulkan):
    simulator = simulator_of("PickCube-v1", state="proprio")
    before = simulator.observe().state
    simulator._scene.step(np.array([], dtype=np.int64), np.zeros((0, 7), np.float32))
    np.testing.assert_array_equal(simulator.observe().state, before)
    simulator._scene.step(np.array([0]), np.zeros((1, 7), np.float32))
    assert not np.array_equal(simulator.observe().state, before), "the control: its own step moves it"


def test_equal_generators_draw_as_a_list_of_new_generators_of_one_seed():
    ours = maniskill_scene.EqualGenerators(5)
    for seed in (7, 3, 7):
        ours.seed(seed)
        listed = [np.random.RandomState(seed) for _ in range(5)]
        for row in (3, 0, 3, -1):  # of a pair of normal draws, the second one is kept
            assert ours[row].normal() == listed[row].normal() and ours[row].randint(2**31) == listed[row].randint(2**31)
        assert [generator.uniform() for generator in ours] == [generator.uniform() for generator in listed]


class MadeUpScenes:
    """ManiSkill's own seeding and order of a reset around a made-up task of many rows, which PhysX would want a GPU for."""

    def __init__(self, num_envs):
        from mani_skill.envs.sapien_env import BaseEnv

        self.num_envs, self.device, self._batched_rng_backend = num_envs, torch.device("cpu"), "numpy:random_state"
        self.agent, self.gpu_sim_enabled, self._enhanced_determinism = None, False, False
        self.reconfiguration_freq, self._reconfig_counter, self._elapsed_steps = 0, 0, torch.zeros(num_envs)
        self._main_seed, self._batched_episode_rng, self._last_obs = None, None, None
        self.scene = SimpleNamespace(_reset_mask=torch.ones(num_envs, dtype=torch.bool))
        self.place, self.num_resets = torch.zeros(num_envs, 3), 0
        for name in ("_set_main_rng", "_set_episode_rng"):
            setattr(self, name, MethodType(getattr(BaseEnv, name), self))
        self._reset = MethodType(BaseEnv.reset, self)
        self.get_info, self.get_obs, self._clear_sim_state = dict, lambda info: self.place.clone(), lambda: None

    def reset(self, **arguments):
        self.num_resets += 1
        return self._reset(**arguments)

    def _initialize_episode(self, env_idx, options):
        """Draw as ManiSkill's tasks do: from torch for all rows at once, from the row's generator, and from the first one's."""
        drawn = [torch.rand(len(env_idx)), self._batched_episode_rng[env_idx].uniform(), self._episode_rng.uniform()]
        values = torch.stack([torch.as_tensor(each).float().expand(len(env_idx)) for each in drawn], dim=1)
        assert int(self.scene._reset_mask.sum()) == len(env_idx)
        self.place[self.scene._reset_mask] = values  # as ``set_pose`` does


def test_rows_that_are_reset_together_begin_as_each_of_them_alone():
    """One call of ManiSkill, and rows that are not reset stay; without our change a row's draw depends on its neighbours."""
    pytest.importorskip("mani_skill")
    seeds = {row: 100 + row for row in range(8)}
    alone = MadeUpScenes(8)
    for row, seed in seeds.items():  # one row after the other, as a reset of one row is
        alone.reset(seed=[seed] * 8, options={"env_idx": torch.tensor([row])})
    scene = maniskill_scene.Scene.__new__(maniskill_scene.Scene)
    scene._env, scene._num_envs, scene._on_cpu = MadeUpScenes(8), 8, False
    scene._state, scene._seeds = np.zeros((8, 3)), maniskill_scene.draw_each_row_by_its_seed(scene._env)
    scene.reset(np.array([5, 1, 6]), [105, 101, 106])
    chosen = torch.tensor([1, 5, 6])
    assert torch.equal(scene._env.place[chosen], alone.place[chosen]) and scene._env.num_resets == 1
    assert (scene._env.place[[0, 2, 3, 4, 7]] == 0).all()
    np.testing.assert_array_equal(scene._state, scene._env.place.numpy())
    scene.reset(np.arange(8), list(seeds.values()))
    assert torch.equal(scene._env.place, alone.place) and scene._env.num_resets == 2
    plain = MadeUpScenes(8)
    plain.reset(seed=list(seeds.values()), options={"env_idx": torch.arange(8)})
    assert not torch.equal(plain.place, alone.place), "a control"


def test_a_reset_leaves_the_generator_of_the_policy_as_it_was():
    pytest.importorskip("mani_skill")
    drawn = []
    scene = SimpleNamespace(_reset_mask=torch.ones(2, dtype=torch.bool))
    env = SimpleNamespace(num_envs=2, device=torch.device("cpu"), scene=scene)
    env._initialize_episode = lambda *_: drawn.append(float(torch.rand(())))
    maniskill_scene.draw_each_row_by_its_seed(env).update({0: 5, 1: 5})
    before = torch.get_rng_state()
    env._initialize_episode(torch.arange(2), {})
    assert torch.equal(torch.get_rng_state(), before) and drawn[0] == drawn[1]


def test_offloading_frees_the_simulation_and_the_next_reset_builds_another(monkeypatch):
    made = []

    class Counted:
        def __init__(self, *arguments):
            made.append(self)
            self.closed, self.resets = False, []

        def reset(self, rows, seeds):
            self.resets.append((rows.tolist(), len(seeds)))

        def images(self, rows):
            return {}

        def state(self, rows):
            return np.zeros((len(rows), 25), np.float32)

        def close(self):
            self.closed = True

    monkeypatch.setattr("rlinf.envs.maniskill.gpu_env.Scene", Counted)
    monkeypatch.setattr("rlinf.envs.maniskill.gpu_env.choose_vulkan", lambda device: device)
    monkeypatch.setattr(maniskill_scene, "find_spec", lambda name: name)
    config = ManiSkillGpuConfig(tasks=["PushCube-v1"], cameras=[])
    env = make_env(config, 3, auto_reset=False)
    for _ in range(2):
        env.reset(options={"episodes": [spec_of(2), None, spec_of(7)]})
        env.offload()
        assert made[-1].closed and made[-1].resets == [([0, 2], 2)]
        with pytest.raises(ConfigError, match="call reset"):
            env.chunk_step(np.zeros((3, 1, env.action_dim)))
    assert len(made) == 2 and env.on_gpu
    env.close()
