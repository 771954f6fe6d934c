"""What `rlinf convert` wrote trains as the demonstrations do that it was made from, and replays in the simulator."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hdf5_files import libero_file, robomimic_file
from run_results import weights_of

from rlinf.cli import main
from rlinf.data import lerobot_dataset
from rlinf.envs.libero.assets import find_assets
from rlinf.envs.libero.env import LiberoConfig, LiberoSimulator
from rlinf.envs.libero.tasks import check_packages
from rlinf.errors import MissingDependencyError
from rlinf.types import EpisodeSpec

pytest.importorskip("h5py", reason="h5py is not installed: pip install -e '.[lerobot]'")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

QUIET = ["tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1"]
ENV = ["env=tabletop", "env.tasks=[reach]", "env.max_episode_steps=8", "env.state=proprio", "env.image_size=32"]
RUN = ["model=openvla_tiny", "model.action_chunks_len=2", "sft.batch_size=8", "sft.max_steps=3", "evaluation.num_episodes=2",
       "evaluation.num_envs=2", "evaluation.num_videos_per_task=0"]  # fmt: skip
STOVE = "turn_on_the_stove"


def opened(folder: Path, *cameras: str):
    columns = {camera: f"observation.images.{camera}" for camera in cameras}
    return lerobot_dataset.open_dataset(folder, columns, "observation.state", outcomes=True)


def episodes_of(folder: Path) -> dict[str, dict]:
    """Return the episodes of a collected dataset in the form in which robomimic stores them."""
    dataset = opened(folder, "front")
    observation, actions = dataset.rows(np.arange(len(dataset)))
    episodes = {}
    for number in range(dataset.num_episodes):
        rows = np.flatnonzero(dataset.episode_ids == number)
        success = dataset.outcomes.success[rows]
        episodes[f"demo_{number}"] = {
            "obs": {"front_image": observation.images["front"][rows], "robot0_eef_pos": observation.state[rows]},
            "actions": actions[rows, 0].numpy(), "rewards": success.astype(float), "dones": success.astype(int),
            "attrs": {"ep_meta": json.dumps({"lang": observation.instruction[rows[0]]})},
        }  # fmt: skip
    return episodes


def test_a_converted_file_trains_the_same_policy_as_the_dataset_it_was_made_from(tmp_path):
    collected = tmp_path / "collected"
    assert (
        main(["collect", *ENV, *QUIET, f"dataset={collected}", "collect.num_episodes=12", "collect.only_success=false"])
        == 0
    )
    source = robomimic_file(tmp_path / "demo.hdf5", episodes_of(collected))
    for name, more in (("converted", []), ("turned", ["rotate_images=true"])):
        words = [f"source={source}", f"dataset={tmp_path / name}", "state_keys=[robot0_eef_pos]", *more]
        assert main(["convert", *words]) == 0
    weights = {}
    for name in ("collected", "converted", "turned"):
        words = [f"sft.dataset={tmp_path / name}", f"output_dir={tmp_path / 'runs' / name}"]
        assert main(["sft", *ENV, *QUIET, *RUN, *words]) == 0
        weights[name] = weights_of(tmp_path / "runs" / name, "sft_000003")

    def equal(one: str, other: str) -> bool:
        return all(torch.equal(tensor, weights[other][key]) for key, tensor in weights[one].items())

    assert equal("collected", "converted") and not equal("collected", "turned")


def missing() -> str | None:
    """Why LIBERO cannot run here; None: it can."""
    try:
        check_packages()
        find_assets(None)
    except MissingDependencyError as error:
        return str(error)
    return None


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("seen_after_action", [True, False])
def test_a_converted_episode_of_libero_replays_in_the_simulator_picture_by_picture(seen_after_action, tmp_path):
    config = LiberoConfig(
        suite="libero_goal", tasks=[STOVE], image_size=32, rendering="fast", num_settling_steps=2, num_processes=0,
        cameras=["agentview", "wrist"],
    )  # fmt: skip
    simulator, spec = LiberoSimulator(config, [STOVE]), EpisodeSpec("libero_goal", 0, 3, 0)
    rng = np.random.default_rng(0)
    acted = np.concatenate([rng.uniform(-1, 1, (6, 6)), rng.choice([-1.0, 1.0], (6, 1))], axis=1)
    simulator.reset(spec)
    views, states = [simulator.observe()], [mujoco_state(simulator)]
    for action in acted:
        simulator.step(action)
        views.append(simulator.observe())
        states.append(mujoco_state(simulator))
    seen = views[1:] if seen_after_action else views[:-1]
    ends = (np.arange(6) == 5).astype(np.uint8)
    episode = {
        "obs": {
            "agentview_rgb": np.stack([view.images["agentview"][::-1, ::-1] for view in seen]),
            "eye_in_hand_rgb": np.stack([view.images["wrist"][::-1, ::-1] for view in seen]),
            "ee_states": np.stack([view.state[:6] for view in seen]),
            "gripper_states": np.stack([view.state[6:] for view in seen]),
            "joint_states": np.stack(states[1:] if seen_after_action else states[:-1])[:, 1:8],
        },
        "actions": acted, "states": np.stack(states[:-1]), "rewards": ends, "dones": ends,
        "attrs": {"init_state": states[0]},
    }  # fmt: skip
    source = libero_file(tmp_path / f"{STOVE}_demo.hdf5", {"demo_0": episode})
    assert main(["convert", f"source={source}", f"dataset={tmp_path / 'data'}"]) == 0
    dataset = opened(tmp_path / "data", "agentview", "wrist")
    assert len(dataset) == (5 if seen_after_action else 6) and dataset.tasks == [views[0].instruction]
    observation, actions = dataset.rows(np.arange(len(dataset)))
    simulator.reset(spec)
    if seen_after_action:
        simulator.step(acted[0])  # nothing was seen before it
    for row in range(len(dataset)):
        view = simulator.observe()
        for camera in config.cameras:
            np.testing.assert_array_equal(observation.images[camera][row], view.images[camera])
        np.testing.assert_array_equal(observation.state[row], view.state)
        np.testing.assert_allclose(actions[row, 0], acted[row + seen_after_action], atol=1e-7)
        simulator.step(acted[row + seen_after_action])
    assert not np.array_equal(observation.images["agentview"][0], simulator.observe().images["agentview"])


def mujoco_state(simulator: LiberoSimulator) -> np.ndarray:
    """Return time, positions and velocities, as LIBERO's files hold them."""
    data = simulator._state.data
    return np.concatenate([[data.time], data.qpos, data.qvel])
