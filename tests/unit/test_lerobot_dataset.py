"""LeRobotDataset v3.0: what the lerobot package wrote is read, what is written is read back, statistics, damage."""

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rlinf.data import lerobot_dataset
from rlinf.data.formats import describe_dataset
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.data.statistics import QUANTILES, ImageStatistics, normalization_statistics, vector_statistics
from rlinf.errors import ConfigError, MissingDependencyError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "lerobot"
FRONT = "observation.images.front"
VIDEO_ERROR = 3.0
"""Mean grey levels by which a compressed frame may differ."""


def needs_av():
    pytest.importorskip("av", reason="PyAV is not installed: pip install -e '.[lerobot]'")


def truth(name: str) -> dict[str, np.ndarray]:
    stored = np.load(FIXTURES / f"{name}.npz")
    episodes = sorted({int(key.rpartition("_")[2]) for key in stored.files})
    joined = {kind: np.concatenate([stored[f"{kind}_{e}"] for e in episodes]) for kind in ("image", "state", "action")}
    joined["task"] = np.concatenate([np.repeat(stored[f"task_{e}"], len(stored[f"action_{e}"])) for e in episodes])
    joined["episode"] = np.concatenate([np.full(len(stored[f"action_{e}"]), e) for e in episodes])
    return joined


def open_fixture(folder: Path):
    return lerobot_dataset.open_dataset(folder, {"front": FRONT}, "observation.state")


def error(images: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Mean absolute difference of each image."""
    return np.abs(images.astype(float) - expected).mean((1, 2, 3))


def test_rows_of_trimmed_episodes_keep_their_frame_numbers(tmp_path):
    """Numbers and time stamps that continue from another frame than 0 are those of a longer recording."""
    folder = shutil.copytree(FIXTURES / "images", tmp_path / "trimmed")
    (path,) = (folder / "data").glob("*/*.parquet")
    table = pq.read_table(path)
    for name, offset in (("frame_index", 7), ("timestamp", 0.7)):
        place, field = table.column_names.index(name), table.schema.field(name)
        moved = [value + offset for value in table.column(name).to_pylist()]
        table = table.set_column(place, field, pa.array(moved, field.type))
    pq.write_table(table, path)
    assert np.array_equal(open_fixture(folder).actions, open_fixture(FIXTURES / "images").actions)


@pytest.mark.parametrize("name", ["images", "video"])
def test_a_dataset_of_the_lerobot_package_is_read(name):
    if name == "video":
        needs_av()
    expected, dataset = truth(name), open_fixture(FIXTURES / name)
    observation, actions = dataset.rows(np.arange(len(dataset)))
    np.testing.assert_array_equal(actions[:, 0].numpy(), expected["action"])
    np.testing.assert_array_equal(observation.state, expected["state"])
    np.testing.assert_array_equal(dataset.episode_ids, expected["episode"])
    assert observation.instruction == expected["task"].tolist()
    images = observation.images["front"]
    if name == "images":
        np.testing.assert_array_equal(images, expected["image"])
    else:
        assert error(images, expected["image"]).max() < VIDEO_ERROR
        assert error(images, np.roll(expected["image"], 1, axis=0)).min() > VIDEO_ERROR, "a neighbour's frame differs"
    order = np.random.default_rng(0).permutation(len(dataset))
    np.testing.assert_array_equal(dataset.rows(order)[0].images["front"], images[order])


def test_statistics_agree_with_those_of_the_lerobot_package():
    expected = truth("images")
    theirs = json.loads((FIXTURES / "images" / "meta" / "stats.json").read_text())
    for key, values in (("action", expected["action"]), ("observation.state", expected["state"])):
        ours = vector_statistics(values)
        for name in ("min", "max", "mean", "std", "count"):  # their quantiles are means over episodes
            np.testing.assert_allclose(ours[name], theirs[key][name], atol=1e-5)
    counted = ImageStatistics()
    counted.add(expected["image"])
    for name in ("min", "max", "mean", "count"):  # their std of images is not one: lerobot 0.4.4 squares in uint8
        np.testing.assert_allclose(counted.result()[name], theirs[FRONT][name], atol=1e-5)
        assert np.shape(counted.result()[name]) == np.shape(theirs[FRONT][name])
    counted.add(255 - expected["image"][:1])
    assert np.abs(counted.result()["mean"] - theirs[FRONT]["mean"]).max() > 1e-5


def episodes(lengths=(5, 1, 4), size=(32, 48), state_dim=3, action_dim=2) -> list[dict]:
    """Smooth images that a video keeps, a different one in every row."""
    height, width = size
    made = []
    for number, length in enumerate(lengths):
        rng = np.random.default_rng(number)
        ramp = np.add.outer(np.arange(height), np.arange(width))[None, :, :, None]
        levels = ramp + rng.integers(0, 120, 3) + 14 * np.arange(length)[:, None, None, None]
        images = levels.clip(0, 255).astype(np.uint8)
        made.append({
            "images": {"front": images, "side": images[:, ::-1]},
            "state": rng.normal(size=(length, state_dim)).astype(np.float32) if state_dim else None,
            "actions": rng.normal(size=(length, action_dim)).astype(np.float32),
            "task": f"task {number % 2}",
            "rewards": rng.normal(size=length).astype(np.float32),
            "success": np.arange(length) == length - 1,
        })  # fmt: skip
    return made


class ManyFiles(LeRobotWriter):
    """Starts a new file with each episode."""

    data_file_mib = video_file_mib = 0


def write(folder: Path, made: list[dict], video: bool = False, writer_class=LeRobotWriter) -> Path:
    shape = made[0]["images"]["front"].shape[1:3]
    state_dim = 0 if made[0]["state"] is None else made[0]["state"].shape[1]
    with writer_class(
        folder, fps=10, image_shapes={"front": shape, "side": shape}, state_dim=state_dim,
        action_dim=made[0]["actions"].shape[1], video=video,
    ) as writer:  # fmt: skip
        for episode in made:
            writer.add_episode(**episode)
    return folder


CAMERAS = {"front": FRONT, "wrist": "observation.images.side"}


def joined(made: list[dict], key: str) -> np.ndarray:
    return np.concatenate([episode[key] for episode in made])


def test_images_come_back_bit_for_bit_over_several_files(tmp_path):
    made = episodes()
    folder = write(tmp_path / "data", made, writer_class=ManyFiles)
    assert len(list((folder / "data").rglob("*.parquet"))) == len(made)
    dataset = lerobot_dataset.open_dataset(folder, CAMERAS, "observation.state")
    observation, actions = dataset.rows(np.arange(len(dataset)))
    np.testing.assert_array_equal(observation.images["front"], np.concatenate([e["images"]["front"] for e in made]))
    np.testing.assert_array_equal(observation.images["wrist"], np.concatenate([e["images"]["side"] for e in made]))
    np.testing.assert_array_equal(observation.state, joined(made, "state"))
    np.testing.assert_array_equal(actions[:, 0].numpy(), joined(made, "actions"))
    assert observation.instruction == [e["task"] for e in made for _ in e["actions"]]


@pytest.mark.parametrize(("writer_class", "num_files"), [(ManyFiles, 3), (LeRobotWriter, 1)])
def test_videos_come_back_frame_for_frame(tmp_path, writer_class, num_files):
    needs_av()
    made = episodes()
    folder = write(tmp_path / "data", made, video=True, writer_class=writer_class)
    assert len(list((folder / "videos" / FRONT).rglob("*.mp4"))) == num_files
    dataset = lerobot_dataset.open_dataset(folder, CAMERAS, "observation.state")
    order = np.random.default_rng(1).permutation(len(dataset))
    seen = dataset.rows(order)[0].images
    for camera, name in (("front", "front"), ("wrist", "side")):
        expected = np.concatenate([e["images"][name] for e in made])
        assert error(seen[camera], expected[order]).max() < VIDEO_ERROR
        assert error(seen[camera], np.roll(expected, 1, axis=0)[order]).min() > VIDEO_ERROR


@pytest.mark.parametrize("video", [False, True])
def test_threads_read_what_one_thread_reads(tmp_path, video):
    if video:
        needs_av()
    folder = write(tmp_path / "data", episodes(lengths=(6, 7, 8)), video=video, writer_class=ManyFiles)
    dataset = lerobot_dataset.open_dataset(folder, CAMERAS, None)
    batches = [np.random.default_rng(number).integers(0, len(dataset), 8) for number in range(24)]
    alone = [dataset.rows(rows)[0].images["wrist"] for rows in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda rows: dataset.rows(rows)[0].images["wrist"], batches))
    assert all(np.array_equal(first, second) for first, second in zip(alone, together, strict=True))


def test_the_columns_have_the_types_that_the_lerobot_package_writes(tmp_path):
    made = episodes(size=(16, 24), state_dim=4)
    folder = write(tmp_path / "data", made)
    theirs, ours = FIXTURES / "images", folder
    for name in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        wanted = {field.name: str(field.type).replace("large_", "") for field in pq.read_schema(theirs / name)}
        found = {field.name: str(field.type).replace("large_", "") for field in pq.read_schema(ours / name)}
        assert {key: found.get(key) for key in wanted} == wanted
    info, expected = (json.loads((root / "meta" / "info.json").read_text()) for root in (ours, theirs))
    assert list(info) == list(expected) and info["features"][FRONT] == expected["features"][FRONT]
    same = ("codebase_version", "data_path", "video_path", "chunks_size", "splits")
    assert [info[key] for key in same] == [expected[key] for key in same]
    assert info["total_frames"] == 10 and info["total_episodes"] == 3 and info["total_tasks"] == 2
    rows = pq.read_table(ours / "data/chunk-000/file-000.parquet").to_pydict()
    assert rows["index"] == list(range(10)) and rows["frame_index"] == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3]
    assert rows["next.done"] == rows["next.success"] == [n in (4, 5, 9) for n in range(10)]
    np.testing.assert_allclose(rows["timestamp"], np.array(rows["frame_index"]) / 10, atol=1e-6)


def test_statistics_are_those_of_all_rows_and_of_each_episode(tmp_path):
    made = episodes(lengths=(40, 7))
    folder = write(tmp_path / "data", made)
    stats = json.loads((folder / "meta" / "stats.json").read_text())
    actions = joined(made, "actions").astype(np.float64)
    for name, share in QUANTILES.items():
        np.testing.assert_allclose(stats["action"][name], np.quantile(actions, share, axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0), rtol=1e-12)
    pixels = np.concatenate([e["images"]["front"] for e in made]).reshape(-1, 3)
    for name, share in QUANTILES.items():
        expected = np.quantile(pixels, share, axis=0, method="inverted_cdf") / 255
        np.testing.assert_allclose(np.reshape(stats[FRONT][name], 3), expected, rtol=1e-12)
    np.testing.assert_allclose(np.reshape(stats[FRONT]["std"], 3), (pixels / 255).std(0), rtol=1e-9)
    per_episode = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    for row, episode in zip(per_episode, made, strict=True):
        np.testing.assert_allclose(row["stats/action/mean"], episode["actions"].astype(np.float64).mean(0), rtol=1e-12)
    dataset = lerobot_dataset.open_dataset(folder, CAMERAS, "observation.state")
    found = dataset.statistics()
    assert found == normalization_statistics(joined(made, "actions"), joined(made, "state"))
    assert set(found) == {"action", "proprio"} and found["action"]["mask"] == [True, True]
    np.testing.assert_allclose(found["action"]["q99"], stats["action"]["q99"], rtol=1e-12)


def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(tmp_path):
    folder = write(tmp_path / "data", episodes())
    before = (folder / "meta" / "info.json").read_text()
    with pytest.raises(ConfigError, match="already exists. Set dataset="):
        write(folder, episodes(lengths=(2,)))
    assert (folder / "meta" / "info.json").read_text() == before
    with pytest.raises(RuntimeError), LeRobotWriter(
        tmp_path / "other", fps=10, image_shapes={"front": (32, 48), "side": (32, 48)}, state_dim=3, action_dim=2, video=False
    ) as writer:  # fmt: skip
        writer.add_episode(**episodes()[0])
        raise RuntimeError("the simulator fell over")
    with pytest.raises(ConfigError, match="No episodes"), LeRobotWriter(
        tmp_path / "empty", fps=10, image_shapes={}, state_dim=0, action_dim=2, video=False
    ):  # fmt: skip
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_that_another_process_has_made_meanwhile_costs_no_episodes(tmp_path):
    made = episodes()
    with pytest.raises(ConfigError, match="by a different process in the meantime") as caught, LeRobotWriter(
        tmp_path / "data", fps=10, image_shapes={"front": (32, 48), "side": (32, 48)}, state_dim=3, action_dim=2, video=False
    ) as writer:  # fmt: skip
        for episode in made:
            writer.add_episode(**episode)
        write(tmp_path / "other", made[:1]).rename(tmp_path / "data")
    kept = Path(str(caught.value).rpartition(" in '")[2].strip("'"))
    found, other = (lerobot_dataset.open_dataset(folder, CAMERAS, None) for folder in (kept, tmp_path / "data"))
    assert (len(found), len(other)) == (10, 5) and len(list(tmp_path.iterdir())) == 2


def copy(tmp_path: Path, name: str = "images") -> Path:
    return Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def test_a_dataset_cut_short_or_of_another_version_is_refused(tmp_path):
    folder = copy(tmp_path)
    path = folder / "meta" / "info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"total_frames": 13}))
    with pytest.raises(ConfigError, match="incomplete .it has 12 rows and 3 episodes.* 13 and 3.*use a different"):
        open_fixture(folder)
    data = folder / "data/chunk-000/file-000.parquet"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="incomplete .ArrowInvalid"):
        open_fixture(folder)
    for text, words in (
        (json.dumps(info | {"codebase_version": "v2.1"}), "version v2.1; expected v3.0.*convert_dataset_v21_to_v30"),
        ("{", "cannot be read as the description of a LeRobotDataset"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            describe_dataset(folder)


def test_a_video_that_is_missing_or_cut_and_a_frame_that_it_does_not_have_are_refused(tmp_path):
    needs_av()
    folder = copy(tmp_path, "video")
    dataset = open_fixture(folder)
    dataset.frames["front"].times[3] += 60 * 10240
    dataset.rows(np.array([2]))
    with pytest.raises(ConfigError, match=r"no frame at 60.300 s"):
        dataset.rows(np.array([3]))
    (video,) = folder.rglob("*.mp4")
    video.write_bytes(video.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read as a video"):
        open_fixture(folder).rows(np.array([0]))
    video.unlink()
    with pytest.raises(ConfigError, match=r"file-000.mp4 is missing.*use a different"):
        open_fixture(folder)


def test_numbers_that_are_not_finite_and_odd_images_of_a_video_are_refused(tmp_path):
    made = episodes()
    made[2]["actions"][1, 0] = np.nan
    with pytest.raises(ConfigError, match="'action' of episode 2 is .*expected finite numbers"):
        write(tmp_path / "own", made)
    folder = write(tmp_path / "data", episodes())
    (path,) = (folder / "data").glob("*/*.parquet")
    table = pq.read_table(path)
    actions, place = table.column("action").to_pylist(), table.column_names.index("action")
    actions[7][0] = float("nan")
    pq.write_table(table.set_column(place, "action", pa.array(actions, table.schema.field("action").type)), path)
    with pytest.raises(ConfigError, match=r"action of row 7 \(episode 2\) is not finite"):
        lerobot_dataset.open_dataset(folder, CAMERAS, None)
    with pytest.raises(ConfigError, match=r"odd image sizes.*Set collect.video=false"):
        write(tmp_path / "odd", episodes(size=(31, 48)), video=True)


@pytest.mark.parametrize(("module", "video"), [("pyarrow", False), ("av", True)])
def test_a_missing_package_names_the_command(tmp_path, monkeypatch, module, video):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{module}.*pip install -e '\.\[lerobot\]'"):
        write(tmp_path / "data", episodes(), video=video)
    assert list(tmp_path.iterdir()) == []


PAGE = Path(__file__).resolve().parents[2] / "docs" / "datasets.md"


def test_the_dataset_that_the_page_writes_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?LeRobotWriter.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    exec(compile(code, PAGE.name, "exec"), {})
    info = lerobot_dataset.describe(tmp_path / "data" / "own")
    assert (info.num_episodes, info.num_rows, info.action_dim, info.state_dims["observation.state"]) == (2, 100, 2, 3)
    assert info.image_shapes == {"observation.images.top": (64, 64)}
    read = lerobot_dataset.open_dataset(info.folder, {"top": "observation.images.top"}, info.state_key, outcomes=True)
    assert np.flatnonzero(read.outcomes.success).tolist() == [49, 99] and read.tasks == ["push the block"]


EPISODE = {
    "images": {"top": np.zeros((4, 6, 8, 3), np.uint8)}, "state": np.zeros((4, 3)), "actions": np.zeros((4, 2)), "task": "go",
    "rewards": np.zeros(4), "success": np.zeros(4),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), [
    ("images", {"top": np.zeros((4, 6, 8, 3))}, r"'observation.images.top' .*float64.*uint8 \(4, 6, 8, 3\)"),
    ("state", None, r"'observation.state'.*\(4, 3\)"), ("state", np.full((4, 3), np.nan), "'observation.state'.*finite"),
    ("actions", np.zeros((4, 3)), r"'action'.*\(4, 3\).*\(4, 2\)"), ("actions", np.zeros((0, 2)), "no actions"),
    ("success", [0, 0, 0.5, 1], "`success`.*0.5"), ("rewards", np.zeros(3), r"'next.reward'.*\(3,\).*\(4, 1\)"),
    ("actions", np.zeros(4), r"'action'.*\(4,\).*\(4, 2\)"),
])  # fmt: skip
def test_an_episode_of_other_shapes_or_kinds_is_refused_by_name(tmp_path, name, value, words):
    sizes = {"image_shapes": {"top": (6, 8)}, "state_dim": 3, "action_dim": 2}
    with pytest.raises(ConfigError, match=words), LeRobotWriter(tmp_path / "d", fps=5, video=False, **sizes) as writer:
        writer.add_episode(**EPISODE)
        writer.add_episode(**{**EPISODE, name: value})
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize("name", ["next.success", "next.done", "next.truncated", "intervention"])
@pytest.mark.parametrize(
    "values", [["no", "no", "yes", "yes"], [0.0, float("nan"), 1.0, 1.0], [0, None, 1, 1], [[0, 0]] * 4]
)
def test_flags_of_a_dataset_that_are_none_are_refused_by_column_and_value(tmp_path, name, values):
    with LeRobotWriter(
        tmp_path / "d", fps=5, image_shapes={}, state_dim=0, action_dim=2, video=False, more=["intervention"]
    ) as writer:
        kept = {key: EPISODE[key] for key in ("actions", "task", "rewards", "success")}
        writer.add_episode({}, None, **kept, more={"intervention": [0, 1, 1, 0]})
    assert lerobot_dataset.open_dataset(tmp_path / "d", {}, None, outcomes=True).outcomes.intervention.tolist() == [
        False,
        True,
        True,
        False,
    ]
    (path,) = (tmp_path / "d" / "data").glob("*/*.parquet")
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values)), path)
    with pytest.raises(ConfigError, match=f"{name}'? of .*d"):
        lerobot_dataset.open_dataset(tmp_path / "d", {}, None, outcomes=True)


def test_a_dataset_without_state_and_with_one_number_per_action(tmp_path):
    made = episodes(state_dim=0, action_dim=1)
    dataset = lerobot_dataset.open_dataset(write(tmp_path / "data", made), CAMERAS, None)
    observation, actions = dataset.rows(np.array([0, 9]))
    assert observation.state is None and dataset.statistics().keys() == {"action"}
    np.testing.assert_array_equal(actions[:, 0].numpy(), joined(made, "actions")[[0, 9]])
