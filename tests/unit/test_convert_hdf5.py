"""`rlinf convert`: HDF5 files of robomimic and LIBERO become datasets with the same numbers; what is broken is rejected."""

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hdf5_files import libero_episode, libero_file, robomimic_episode, robomimic_file

from rlinf.cli import main
from rlinf.commands import convert as converting
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.data import lerobot_dataset
from rlinf.data.hdf5 import ConvertConfig, open_demonstrations
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.preflight.compatibility import check_dataset

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install -e '.[lerobot]'")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

STOVE = "turn_on_the_stove_demo.hdf5"


def convert(source: Path, dataset: Path, *words: str) -> Path:
    assert main(["convert", f"source={source}", f"dataset={dataset}", *words]) == 0
    return dataset


def opened(folder: Path, *cameras: str):
    columns = {camera: f"observation.images.{camera}" for camera in cameras}
    state = "observation.state" if "observation.state" in lerobot_dataset.describe(folder).state_dims else None
    return lerobot_dataset.open_dataset(folder, columns, state, outcomes=True)


def recorded(folder: Path) -> dict:
    return json.loads((folder / "meta" / "rlinf.json").read_text())


def test_a_file_of_robomimic_keeps_its_numbers_and_its_upright_pictures(tmp_path, capsys):
    episodes = {
        "demo_0": robomimic_episode(0, 5),
        "demo_10": robomimic_episode(1, 2),
        "demo_2": robomimic_episode(2, 3),
    }
    episodes["demo_2"]["rewards"][:], episodes["demo_2"]["dones"][:] = 0, 0  # a failure, cut by the time limit
    source = robomimic_file(tmp_path / "image.hdf5", episodes, control_freq=25)
    folder = convert(source, tmp_path / "data", "task=lift the cube")
    dataset = opened(folder, "agentview", "robot0_eye_in_hand")
    observation, actions = dataset.rows(np.arange(len(dataset)))
    in_order = [episodes[name] for name in ("demo_0", "demo_2", "demo_10")]
    assert dataset.episode_ids.tolist() == [0] * 5 + [1] * 3 + [2] * 2

    def joined(*keys: str) -> np.ndarray:
        return np.concatenate([np.concatenate([each["obs"][key] for key in keys], axis=1) for each in in_order])

    np.testing.assert_array_equal(actions[:, 0], np.concatenate([e["actions"] for e in in_order]).astype(np.float32))
    expected = joined("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos").astype(np.float32)
    np.testing.assert_array_equal(observation.state, expected)
    images = joined("agentview_image")
    np.testing.assert_array_equal(observation.images["agentview"], images)
    assert not np.array_equal(observation.images["agentview"], images[:, ::-1, ::-1])
    np.testing.assert_array_equal(observation.images["robot0_eye_in_hand"], joined("robot0_eye_in_hand_image"))
    assert set(observation.instruction) == {"lift the cube"}
    came = dataset.outcomes
    assert (
        came.rewards.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
        and came.success.tolist() == (came.rewards == 1).tolist()
    )
    assert np.flatnonzero(came.terminated).tolist() == [4, 9], "the failure was cut, and is no end of the task"
    about = recorded(folder)
    assert about["layout"] == "robomimic" and not about["rotate_images"] and about["env"] == {} and about["whole"]
    assert [(e["name"], e["num_env_steps"], e["success"]) for e in about["episodes"]] == [
        ("demo_0", 5, True), ("demo_2", 3, False), ("demo_10", 2, True),
    ]  # fmt: skip
    assert json.loads((folder / "meta" / "info.json").read_text())["fps"] == 25
    printed = capsys.readouterr().out
    assert "3 episodes in the layout of robomimic, 2 with a reward of 1" in printed
    assert "'sft.cameras=[agentview,robot0_eye_in_hand]'" in printed and "turned" not in printed


def test_a_filter_key_cameras_and_state_are_chosen(tmp_path):
    episodes = {f"demo_{number}": robomimic_episode(number, 2 + number) for number in range(3)}
    source = robomimic_file(
        tmp_path / "image.hdf5", episodes, masks={"train": ["demo_2", "demo_0"], "valid": ["demo_1"]}
    )
    words = [
        "task=lift",
        "mask=train",
        "cameras=[agentview_image]",
        "state_keys=[object]",
        "rotate_images=true",
        "fps=7",
    ]
    dataset = opened(convert(source, tmp_path / "data", *words), "agentview")
    observation, _ = dataset.rows(np.arange(len(dataset)))
    kept = [episodes["demo_0"], episodes["demo_2"]]
    np.testing.assert_array_equal(
        observation.state, np.concatenate([e["obs"]["object"] for e in kept]).astype(np.float32)
    )
    turned = np.concatenate([e["obs"]["agentview_image"] for e in kept])[:, ::-1, ::-1]
    np.testing.assert_array_equal(observation.images["agentview"], turned)
    assert list(dataset.info.image_shapes) == ["observation.images.agentview"]
    stateless = convert(source, tmp_path / "stateless", "task=lift", "state_keys=[]")
    assert opened(stateless, "agentview").state is None


def test_an_instruction_of_each_episode_is_kept(tmp_path):
    episodes = {f"demo_{number}": robomimic_episode(number, 2) for number in range(2)}
    for number, text in enumerate(("open the drawer", "close the drawer")):
        episodes[f"demo_{number}"]["attrs"]["ep_meta"] = json.dumps({"lang": text})
    folder = convert(robomimic_file(tmp_path / "kitchen.hdf5", episodes), tmp_path / "data")
    assert opened(folder, "agentview").tasks == ["open the drawer", "close the drawer"]


def test_a_file_of_libero_is_turned_and_each_observation_goes_with_the_action_that_follows_it(tmp_path, capsys):
    episodes = {f"demo_{number}": libero_episode(number, 4 + number) for number in range(2)}
    source = libero_file(tmp_path / STOVE, episodes)
    folder = convert(source, tmp_path / "data")
    dataset = opened(folder, "agentview", "wrist")
    observation, actions = dataset.rows(np.arange(len(dataset)))
    assert dataset.episode_ids.tolist() == [0] * 3 + [1] * 4
    np.testing.assert_array_equal(
        actions[:, 0], np.concatenate([e["actions"][1:] for e in episodes.values()]).astype(np.float32)
    )
    for camera, key in (("agentview", "agentview_rgb"), ("wrist", "eye_in_hand_rgb")):
        expected = np.concatenate([e["obs"][key][:-1, ::-1, ::-1] for e in episodes.values()])
        np.testing.assert_array_equal(observation.images[camera], expected)
    state = [
        np.concatenate([e["obs"]["ee_states"], e["obs"]["gripper_states"]], axis=1)[:-1] for e in episodes.values()
    ]
    np.testing.assert_array_equal(observation.state, np.concatenate(state).astype(np.float32))
    assert dataset.tasks == ["turn on the stove"], (
        "that of the evaluation, not that of the file: 'Turn on the stove now'"
    )
    assert (
        np.flatnonzero(dataset.outcomes.success).tolist()
        == [2, 6]
        == np.flatnonzero(dataset.outcomes.terminated).tolist()
    )
    about = recorded(folder)
    assert about["env"] == {"name": "libero", "gripper": "env", "rendering": "full"} and about["rotate_images"]
    assert all(episode["seen_after_action"] for episode in about["episodes"])
    printed = capsys.readouterr().out
    assert "rotated by 180 degrees" in printed and "with the next action in 2 episodes" in printed
    unpaired = opened(convert(source, tmp_path / "as_stored", "seen_after_action=false"), "agentview")
    assert len(unpaired) == 9 and not np.array_equal(unpaired.actions[:3], dataset.actions[:3])


def test_rows_that_were_seen_before_their_action_stay_as_they_are(tmp_path):
    episode = libero_episode(0, 5, seen_after_action=False)
    folder = convert(libero_file(tmp_path / STOVE, {"demo_0": episode}, language=None), tmp_path / "data")
    dataset = opened(folder, "wrist")
    np.testing.assert_array_equal(dataset.actions, episode["actions"].astype(np.float32))
    np.testing.assert_array_equal(
        dataset.rows(np.arange(5))[0].images["wrist"], episode["obs"]["eye_in_hand_rgb"][:, ::-1, ::-1]
    )
    assert not recorded(folder)["episodes"][0]["seen_after_action"]


def test_a_folder_of_files_becomes_one_dataset_with_all_tasks(tmp_path):
    suite = tmp_path / "libero_10"
    suite.mkdir()
    names = ["KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it_demo.hdf5", STOVE]
    for number, name in enumerate(names):
        libero_file(suite / name, {"demo_0": libero_episode(number, 3)})
    libero_file(suite / "renamed.h5", {"demo_0": libero_episode(2, 3)}, language='"Turn off the stove"')
    dataset = opened(convert(suite, tmp_path / "data"), "agentview")
    assert dataset.tasks == ["turn on the stove and put the moka pot on it", "Turn off the stove", "turn on the stove"]
    assert dataset.task_ids.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_converted_file_of_libero_is_for_that_env_and_its_conventions(tmp_path):
    folder = convert(libero_file(tmp_path / STOVE, {"demo_0": libero_episode(0, 3)}), tmp_path / "data")
    libero = [
        "env=libero_goal",
        "model=openvla_tiny",
        "model.action_token_len=7",
        "env.cameras=[agentview]",
        "env.image_size=16",
    ]

    def checked(*words: str):
        return check_dataset(build_config(compose_config([*words, f"sft.dataset={folder}", "sft.max_steps=1"])), None)

    assert checked(*libero).num_episodes == 1
    for words, expected in (
        (["env=tabletop"], "collected with env.name=libero"),
        ([*libero, "env.gripper=openvla"], "env.gripper=env, but the current env has env.gripper=openvla"),
        ([*libero, "env.rendering=fast"], "sft.allow_mismatch=.rendering."),
    ):
        with pytest.raises(ConfigError, match=expected):
            checked(*words)


def robomimic(tmp_path: Path, change: Callable[[dict], None] | None = None) -> list[str]:
    """A file of three episodes, the second of which is changed."""
    episodes = {f"demo_{number}": robomimic_episode(number, 3) for number in range(3)}
    if change is not None:
        change(episodes["demo_1"])
    robomimic_file(tmp_path / "image.hdf5", episodes, masks={"train": ["demo_0"], "none": []})
    return [f"source={tmp_path / 'image.hdf5'}", "task=lift"]


def cut(tmp_path: Path) -> list[str]:
    words = robomimic(tmp_path)
    path = tmp_path / "image.hdf5"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return words


def written(write: Callable[[h5py.File], None]) -> Callable[[Path], list[str]]:
    def make(tmp_path: Path) -> list[str]:
        with h5py.File(tmp_path / "image.hdf5", "w") as file:
            write(file)
        return [f"source={tmp_path / 'image.hdf5'}", "task=lift"]

    return make


def without(key: str) -> Callable[[Path], list[str]]:
    return lambda tmp_path: robomimic(tmp_path, lambda episode: episode.pop(key))


def with_obs(key: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], list[str]]:
    return lambda tmp_path: robomimic(tmp_path, lambda e: e["obs"].update({key: change(e["obs"][key])}))


def option(*words: str) -> Callable[[Path], list[str]]:
    return lambda tmp_path: [*robomimic(tmp_path), *words]


def changed(
    key: str, change: Callable[[np.ndarray], np.ndarray], all_keys: bool = False
) -> Callable[[Path], list[str]]:
    def edit(episode: dict) -> None:
        for name in [each for each in episode if each not in ("obs", "attrs")] if all_keys else [key]:
            episode[name] = change(episode[name])
        if all_keys:
            episode["obs"] = {name: change(values) for name, values in episode["obs"].items()}

    return lambda tmp_path: robomimic(tmp_path, edit)


def no_language(tmp_path: Path) -> list[str]:
    return robomimic(tmp_path)[:1]


def other_convention(tmp_path: Path) -> list[str]:
    libero_file(tmp_path / STOVE, {"demo_0": libero_episode(0, 3)})
    with h5py.File(tmp_path / STOVE, "a") as file:
        file["data"].attrs["macros_image_convention"] = "opencv"
    return [f"source={tmp_path / STOVE}"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda tmp_path: [f"source={tmp_path}"], "has no file .*Set source="),
        (lambda tmp_path: ["source=nowhere"], "source='nowhere' does not exist"),
        (lambda tmp_path: [], "needs source="),
        (cut, "image.hdf5 is damaged or incomplete .*truncated"),
        (written(lambda file: file.create_group("episodes")), "no episodes under 'data' \\(it contains episodes"),
        (without("actions"), "demo_1 of .* has no 'actions'; it has dones, "),
        (with_obs("agentview_image", lambda images: images[:-1]), "demo_1 .*actions 3, .*obs/agentview_image 2, "),
        (with_obs("robot0_eef_pos", lambda x: x * np.nan), "demo_1 .*obs/robot0_eef_pos of row 0 is not finite"),
        (option("mask=none"), "mask=none selects no episodes"),
        (option("mask=trian"), "mask=trian, but .* has mask/ with none, train.*Did you mean 'train'.*Set mask="),
        (option("cameras=[agentview]"), "cameras names 'agentview'; .* agentview_image, robot0_eye_in_hand_image among"),
        (option("state_keys=[joints]"), "state_keys names 'joints'.*object.*or state_keys="),
        (option("tsak=lift"), "There is no key 'tsak'"),
        (no_language, "has no instruction for data/demo_0.*Set 'task="),
        (other_convention, "macros_image_convention=opencv; expected opengl"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_one_error_and_leaves_nothing(make, expected, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = make(tmp_path)
    assert main(["convert", *words, "dataset=data"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and re.search(expected, error), error
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(("settings", "words", "fps"), [(None, (), 20), ({"control_freq": 12.5}, ("fps=12",), 12)])
def test_the_frequency_of_env_args(settings, words, fps, tmp_path):
    source = robomimic(tmp_path)
    with h5py.File(tmp_path / "image.hdf5", "a") as file:
        file["data"].attrs["env_args"] = json.dumps({"env_kwargs": settings})
    assert main(["convert", *source, *words, f"dataset={tmp_path / 'data'}"]) == 0
    assert json.loads((tmp_path / "data" / "meta" / "info.json").read_text())["fps"] == fps


def test_random_damage_is_one_error_or_none(tmp_path):
    """40 random bytes of a file change: either it is still read, or it is told to be damaged."""
    robomimic(tmp_path)
    path, rng, rejected = tmp_path / "image.hdf5", np.random.default_rng(0), 0
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    for number in range(40):
        contents = whole.copy()
        contents[rng.integers(0, len(whole), 40)] = rng.integers(0, 256, 40)
        damaged = tmp_path / f"{number}.hdf5"
        damaged.write_bytes(contents.tobytes())
        try:
            for _ in open_demonstrations(ConvertConfig(str(damaged), task="lift")).read():
                pass
        except ConfigError as error:
            assert str(damaged) in str(error)
            rejected += 1
    assert 10 < rejected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: e["obs"].pop("joint_states"), "has no vectors 'obs/joint_states', so whether"),
        (lambda e: e.update(states=e["states"] * 0), "No arm moves"),
    ],
)
def test_what_cannot_be_measured_of_libero_is_asked_for(change, expected, tmp_path, capsys):
    episode = libero_episode(0, 4)
    change(episode)
    source = libero_file(tmp_path / STOVE, {"demo_0": episode})
    assert main(["convert", f"source={source}", f"dataset={tmp_path / 'data'}"]) == 2
    error = capsys.readouterr().err
    assert re.search(expected + ".*Set seen_after_action=true .* or seen_after_action=false", error), error
    for value, rows in (("true", 3), ("false", 4)):
        words = [f"source={source}", f"dataset={tmp_path / value}", f"seen_after_action={value}"]
        assert main(["convert", *words]) == 0
        assert [each["num_env_steps"] for each in recorded(tmp_path / value)["episodes"]] == [rows]
        printed = capsys.readouterr().out
        assert f"with the {'next action' if value == 'true' else 'action of its frame'} in 1 episodes" in printed


def test_an_episode_that_is_long_enough_is_measured(tmp_path):
    short, late = libero_episode(0, 2), libero_episode(1, 5)
    short["states"][:] = short["states"][0]  # stands still
    episodes = {"demo_0": short, "demo_1": late}
    folder = convert(libero_file(tmp_path / STOVE, episodes), tmp_path / "data")
    assert [each["seen_after_action"] for each in recorded(folder)["episodes"]] == [True, True]


@pytest.mark.parametrize("package", ["h5py", "pyarrow"])
def test_a_missing_package_is_named_with_its_installation(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=f"{package}.*Run pip install -e '..lerobot.'"):
        converting.convert(ConvertConfig("nowhere", str(tmp_path / "data")))


def test_nothing_is_overwritten_and_videos_need_even_sides(tmp_path):
    source = robomimic_file(tmp_path / "image.hdf5", {"demo_0": robomimic_episode(0, 2, (11, 16))})
    config = ConvertConfig(str(source), str(tmp_path / "data"), task="lift", video=True)
    with pytest.raises(ConfigError, match="'agentview' have 11 x 16 pixels; expected even .*Set video=false"):
        converting.convert(config)
    config.video, config.dataset = False, str(tmp_path)
    with pytest.raises(ConfigError, match="exists; expected a new folder"):
        converting.convert(config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_conversion_that_is_stopped_leaves_nothing(number, tmp_path, monkeypatch):
    add_episode, read = converting.LeRobotWriter.add_episode, []

    def interrupted(self, *args, **kwargs):
        add_episode(self, *args, **kwargs)
        read.append(kwargs)
        if len(read) == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(converting.LeRobotWriter, "add_episode", interrupted)
    before = signal.getsignal(number)
    (tmp_path / "out").mkdir()
    assert main(["convert", *robomimic(tmp_path), f"dataset={tmp_path / 'out' / 'data'}"]) == 130
    assert len(read) == 2 and list((tmp_path / "out").iterdir()) == [] and signal.getsignal(number) is before


def test_pictures_are_read_when_it_is_the_turn_of_their_episode(tmp_path, monkeypatch):
    robomimic(tmp_path)
    read = []
    real = h5py.Dataset.__getitem__

    def counted(self, index, *rest):
        if self.dtype == np.uint8:
            read.append(self.name.split("/")[2])
        return real(self, index, *rest)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    found = open_demonstrations(ConvertConfig(str(tmp_path / "image.hdf5"), task="lift"))
    assert read == []
    episodes = found.read()
    for number in range(3):
        next(episodes)
        assert set(read) == {f"demo_{earlier}" for earlier in range(number + 1)}
