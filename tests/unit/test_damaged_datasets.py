"""Datasets that are damaged, or that others wrote: each fault is one error that names the file, and foreign layouts are read."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from rlinf.data import lerobot_dataset, rlds_dataset
from rlinf.data.config import SFTConfig
from rlinf.data.filters import filtered_rows
from rlinf.data.formats import describe_dataset, image_columns, open_dataset
from rlinf.data.frames import frame_numbers
from rlinf.data.rlds_dataset import Blobs, masked_crc32c
from rlinf.data.video import VideoWriter
from rlinf.errors import ConfigError, RLinfError, UnreadableRowError
from rlinf.options import from_mapping

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

FIXTURES = Path(__file__).parents[1] / "fixtures"
FRONT = "observation.images.front"


@pytest.fixture
def lerobot(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURES / "lerobot" / "images", tmp_path / "lerobot"))


@pytest.fixture
def rlds(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURES / "rlds", tmp_path / "rlds"))


def open_lerobot(folder: Path):
    return lerobot_dataset.open_dataset(folder, {"front": FRONT}, "observation.state")


def data_file(folder: Path) -> Path:
    (path,) = (folder / "data").glob("*/*.parquet")
    return path


def change_column(folder: Path, name: str, change: Callable[[list], list]) -> None:
    path = data_file(folder)
    table = pq.read_table(path)
    position = table.column_names.index(name)
    values = pa.array(change(table.column(name).to_pylist()), table.schema.field(name).type)
    pq.write_table(table.set_column(position, table.schema.field(name), values), path)


def change_info(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "meta" / "info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def with_value(row: int, value: object) -> Callable[[list], list]:
    return lambda values: [*values[:row], value, *values[row + 1 :]]


DAMAGED_ROWS = {
    "no image": (FRONT, with_value(2, None), r"row 2 .*no image 'observation.images.front', in .*file-000.parquet"),
    "index twice": ("index", lambda values: [*values[:3], values[2], *values[4:]], "two rows with the index 2"),
    "unknown task": ("task_index", with_value(0, 99), "task_index 99, but meta/tasks.parquet has"),
    "absolute path": (FRONT, with_value(0, {"bytes": None, "path": "/etc/hostname"}), "'/etc/hostname'; expected a path within"),
    "path that leads out": (FRONT, with_value(0, {"bytes": None, "path": "a/../../b.png"}), "'a/../../b.png'; expected"),
    "missing image file": (FRONT, with_value(0, {"bytes": None, "path": "images/none.png"}), "none.png"),
    "torn episode": ("episode_index", lambda values: [*values[:-1], values[0]], "not consecutive"),
}  # fmt: skip


@pytest.mark.parametrize(("column", "change", "expected"), DAMAGED_ROWS.values(), ids=DAMAGED_ROWS)
def test_damaged_rows_are_refused_when_the_dataset_is_opened(lerobot, column, change, expected):
    open_lerobot(lerobot)
    change_column(lerobot, column, change)
    with pytest.raises(ConfigError, match=f"(?s){expected}.*[Uu]se a different"):
        open_lerobot(lerobot)


@pytest.mark.parametrize("content", ["{", '{"env": 3}'])
def test_a_damaged_record_of_the_conditions_is_refused(lerobot, content):
    (lerobot / "meta" / "rlinf.json").write_text(content)
    with pytest.raises(ConfigError, match=r"rlinf.json is damaged.*use a different"):
        describe_dataset(lerobot)


def test_images_of_another_size_than_described_are_refused(lerobot):
    height, width = describe_dataset(lerobot).image_shapes[FRONT]
    change_info(lerobot, lambda info: info["features"][FRONT].update(shape=[64, 64, 3]))
    with pytest.raises(
        ConfigError, match=rf"row 1 has {height} x {width} pixels, but its description requires 64 x 64"
    ):
        open_lerobot(lerobot).rows(np.array([1]))


def test_videos_outside_the_folder_are_refused(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "lerobot" / "video", tmp_path / "video"))
    change_info(folder, lambda info: info.update(video_path="../other/{video_key}/file-{file_index:03d}.mp4"))
    with pytest.raises(ConfigError, match=r"'../other/.*expected a path within the folder. Use a different"):
        open_lerobot(folder)


def everything(dataset) -> list[np.ndarray]:
    seen, actions = dataset.rows(np.arange(len(dataset)))
    return [seen.images["front"], seen.state, actions.numpy(), dataset.episode_ids, np.array(seen.instruction)]


def test_rows_are_in_the_order_of_their_index_wherever_they_lie(lerobot):
    expected = everything(open_lerobot(lerobot))
    table = pq.read_table(data_file(lerobot))
    order = np.random.default_rng(0).permutation(table.num_rows)
    pq.write_table(table.take(order), data_file(lerobot))
    for found, wanted in zip(everything(open_lerobot(lerobot)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert not np.array_equal(found[order], wanted), "the order of the file is told apart"


def test_images_beside_the_parquet_files_are_read(lerobot):
    expected = everything(open_lerobot(lerobot))

    def move_out(values: list) -> list:
        (lerobot / "images").mkdir()
        for row, value in enumerate(values):
            (lerobot / "images" / f"{row}.png").write_bytes(value["bytes"])
        return [{"bytes": None, "path": f"images/{row}.png"} for row in range(len(values))]

    change_column(lerobot, FRONT, move_out)
    for found, wanted in zip(everything(open_lerobot(lerobot)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


AXES = ["channels", "height", "width"]


@pytest.mark.parametrize("names", [AXES, {"axes": AXES}, None])
def test_shapes_with_the_channels_first_are_understood(lerobot, names):
    height, width = describe_dataset(lerobot).image_shapes[FRONT]
    assert height != width
    change_info(lerobot, lambda info: info["features"][FRONT].update(shape=[3, height, width], names=names))
    assert describe_dataset(lerobot).image_shapes[FRONT] == (height, width)
    assert open_lerobot(lerobot).rows(np.array([0]))[0].images["front"].shape == (1, height, width, 3)


def test_the_digest_tells_datasets_apart(lerobot):
    before = open_lerobot(lerobot).digest()
    assert open_lerobot(lerobot).digest() == before
    state = pq.read_table(data_file(lerobot)).column("observation.state").to_pylist()
    change_column(lerobot, "observation.state", with_value(3, [number + 1 for number in state[3]]))
    assert open_lerobot(lerobot).digest() != before


def open_rlds(folder: Path):
    return rlds_dataset.open_dataset(folder, {"front": "image"}, "state")


def slow_crc(data: bytes) -> int:
    """CRC-32C bit by bit, masked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("length", [0, 1, 8, 511, 512, 1543])
def test_the_checksum_of_long_records_is_that_of_the_definition(length):
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8).tobytes()
    assert masked_crc32c(data) == masked_crc32c(memoryview(data)) == slow_crc(data)
    # RFC 3720's CRC-32C of "123456789", with the mask of TensorFlow's crc32c.h.
    assert slow_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def change_parquet(path: Path, name: str, values: list, kind=None) -> None:
    """Replace a column, or add one, or (None) drop it."""
    table = pq.read_table(path)
    if name in table.column_names:
        kind = kind or table.schema.field(name).type
        table = table.drop_columns([name])
    if values is not None:
        table = table.append_column(name, pa.array(values, kind))
    pq.write_table(table, path)


EPISODES = "meta/episodes/chunk-000/file-000.parquet"
DIFFERENT = {  # 12 rows in 3 episodes at 10 a second
    "frame number": (None, "frame_index", [0, 1, 3], r"row 2 \(episode 0\) has the frame_index 3"),
    "length": (EPISODES, "length", [9], "length of episode 0 is {} according to its rows, but 9"),
    "begin": (EPISODES, "dataset_from_index", [0, 7], "dataset_from_index of episode 1 is {}"),
    "end": (EPISODES, "dataset_to_index", [3], "dataset_to_index of episode 0 is {}"),
    "episode": (EPISODES, "episode_index", [0, 1, 3], "episode_index of episode 2 is 2 according to its rows, but 3"),
    "data file": (EPISODES, "data/file_index", [0, 1], "data/chunk-000/file-001.parquet is missing"),
    "rate": (None, "timestamp", list(np.arange(12) / 30), "0.0333 s apart, but meta/info.json states fps=10"),
}


@pytest.mark.parametrize(("file", "name", "first", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_rows_that_contradict_the_description_are_named(lerobot, file, name, first, expected):
    path = data_file(lerobot) if file is None else lerobot / file
    before = pq.read_table(path).column(name).to_pylist()
    change_parquet(path, name, [*first, *before[len(first) :]])
    differs = next(i for i, (a, b) in enumerate(zip(first, before, strict=False)) if a != b) if file else 0
    with pytest.raises(ConfigError, match=expected.format(before[differs])):
        open_lerobot(lerobot)


WRONG_COLUMNS = {
    "ragged": (
        "observation.state",
        [[1.0] * 5, [1.0] * 3],
        None,
        r"observation.state of .* \(row 0 has 5 values.* states 4",
    ),
    "null": ("observation.state", [[1.0, 2.0, None, 4.0]], None, "row 0 lacks a value"),
    "text": ("action", ["1"] * 12, pa.string(), "action of .*string; expected numbers"),
    "too large": ("action", [[2**24 + 1, 0]] * 12, pa.list_(pa.int64()), "action of .*float32"),
    "beyond float32": ("action", [[1e300, 0]] * 12, pa.list_(pa.float64()), "action of row 0 .*not finite"),
    "missing": ("task_index", None, None, "no column 'task_index'"),
    "images as text": (FRONT, ["a.png"] * 12, pa.string(), "expected images"),
}


@pytest.mark.parametrize(("name", "first", "kind", "expected"), WRONG_COLUMNS.values(), ids=WRONG_COLUMNS)
def test_columns_of_another_shape_or_kind_are_refused_by_name(lerobot, name, first, kind, expected):
    table = pq.read_table(data_file(lerobot))
    values = None if first is None else [*first, *table.column(name).to_pylist()[len(first) :]]
    variable = pa.list_(pa.float32()) if name == "observation.state" else None
    change_parquet(data_file(lerobot), name, values, kind or variable)
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        open_lerobot(lerobot)


@pytest.mark.parametrize("kind", ["float64", "int16", "float16"])
def test_numbers_of_all_kinds_are_read(lerobot, kind):
    values = [[row, -row] for row in range(12)]
    change_parquet(
        data_file(lerobot),
        "action",
        values,
        pa.list_(getattr(pa, kind)()) if kind != "float16" else pa.list_(pa.float16()),
    )
    change_info(lerobot, lambda info: info["features"]["action"].update(dtype=kind))
    found = open_lerobot(lerobot)
    assert found.actions.dtype == np.float32 and found.actions.tolist() == values and found.info.action_dim == 2


def test_instructions_are_found_by_number_and_among_other_columns(lerobot):
    path, expected = lerobot / "meta/tasks.parquet", open_lerobot(lerobot)
    texts = [expected.tasks[task] for task in expected.task_ids]
    table = pq.read_table(path)
    text = next(name for name in table.column_names if name != "task_index")
    change_parquet(path, "subtask", ["a", "b"])
    change_parquet(path, "task_index", [5 * number for number in table.column("task_index").to_pylist()])
    change_column(lerobot, "task_index", lambda values: [5 * number for number in values])
    found = open_lerobot(lerobot)
    assert [found.tasks[task] for task in found.task_ids] == texts and found.tasks == expected.tasks
    change_parquet(path, text, None)
    change_parquet(path, "words", ["a", "b"])
    with pytest.raises(ConfigError, match="has the columns .*subtask.*words; expected task_index"):
        open_lerobot(lerobot)


def test_any_json_in_the_description_is_read_or_refused(lerobot):
    """Every field of info.json, with a value of every other kind: nothing but an RLinfError."""
    path = lerobot / "meta" / "info.json"
    info = json.loads(path.read_text())
    wrong = [None, True, -1, 0.5, 1e999, 10**30, "{", [], ["a"], {"a": 1}, {"axes": [None]}, [[2], 3]]
    features = [("features", name, key) for name in (FRONT, "action", "index") for key in ("dtype", "shape", "names")]
    kept, rejected = [], 0
    unread = {"total_tasks", "chunks_size", "data_files_size_in_mb", "video_files_size_in_mb", "splits"}
    for place in [(key,) for key in info if key not in unread] + [("features", "action"), *features]:
        for value in wrong:
            changed = json.loads(json.dumps(info))
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            path.write_text(json.dumps(changed))
            try:
                open_lerobot(lerobot).rows(np.array([0]))
                kept.append(place)
            except RLinfError as error:
                rejected += 1
                assert str(error.args[0]).count("\n") == 0
            except KeyError as error:  # the camera is no image any more, which `image_columns` finds first
                assert FRONT in str(error) and place[0] == "features"
    assert rejected > 50 and ("features", FRONT, "names") in kept and ("robot_type",) in kept
    missing = [
        json.dumps({key: info[key] for key in info if key != name}) for name in ("total_frames", "total_episodes")
    ]
    for content in ("[" * 100_000, "3", "\udcff", "", *missing):
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match="info.json cannot be read"):
            describe_dataset(lerobot)


GRID = np.arange(10) / 30
JITTER = np.random.default_rng(0).uniform(0, 0.02, 10)
FRAMES_OF_ROWS = {
    "exact": (GRID, GRID, list(range(10))),
    "rounded to float32": (GRID + 5000, (GRID + 5000).astype(np.float32).astype(float), list(range(10))),
    "more frames than rows": (GRID, GRID[2:7], [2, 3, 4, 5, 6]),
    "drift below a frame": (GRID, GRID - 0.8 / 30, list(range(10))),
    "jitter": (GRID, GRID + JITTER, list(range(10))),
    "frames at uneven times": (GRID + JITTER, GRID + JITTER, list(range(10))),
    "drift of a whole frame": (GRID, GRID + 1 / 30, [*range(1, 10), -1]),
    "a frame is lost, later ones are early": (GRID[:9], GRID, [*range(9), -1]),
    "a frame is lost, later ones have their times": (np.delete(GRID, 4), GRID, [0, 1, 2, 3, -1, 4, 5, 6, 7, 8]),
    "one lost, one too many": (np.append(np.delete(GRID, 4), 10 / 30), GRID, [0, 1, 2, 3, -1, 4, 5, 6, 7, 8]),
    "half the rate": (GRID * 2, GRID, [0, -1, 1, -1, 2, -1, 3, -1, 4, -1]),
    "two rows at one time": (GRID, np.where(GRID == GRID[3], GRID[2], GRID), [0, 1, 2, -1, *range(4, 10)]),
    "inexact among more frames": (GRID, GRID[:3] + 0.004, [-1, -1, -1]),
    "one frame": (GRID[:1], GRID[:2], [0, -1]),
}  # fmt: skip


@pytest.mark.parametrize(("shown", "wanted", "expected"), FRAMES_OF_ROWS.values(), ids=FRAMES_OF_ROWS)
def test_rows_show_the_frame_at_their_time_or_of_their_number(shown, wanted, expected):
    assert frame_numbers(shown, wanted).tolist() == expected


@pytest.fixture
def filmed(tmp_path) -> Path:
    """The dataset with its images as a video, whose frames are grey levels of 20 times the row."""
    pytest.importorskip("av", reason="PyAV is not installed: pip install -e '.[lerobot]'")
    folder = Path(shutil.copytree(FIXTURES / "lerobot" / "video", tmp_path / "video"))
    film(folder, range(12))
    return folder


def film(folder: Path, rows) -> None:
    (path,) = folder.rglob("*.mp4")
    path.unlink()
    writer = VideoWriter(path, 10, 32, 48)
    for row in rows:
        if row is None:  # time continues without a frame
            writer.num_frames += 1
        else:
            writer.append(np.full((1, 32, 48, 3), 20 * row, np.uint8))
    writer.close()


def shown(dataset) -> list[int]:
    images = dataset.rows(np.arange(len(dataset)))[0].images["front"]
    return np.rint(images.mean((1, 2, 3)) / 20).astype(int).tolist()


def drift(folder: Path, frames: float) -> None:
    name = f"videos/{FRONT}/from_timestamp"
    starts = pq.read_table(folder / EPISODES).column(name).to_pylist()
    change_parquet(folder / EPISODES, name, [start + frames / 10 * number for number, start in enumerate(starts)])


def test_every_row_shows_its_own_frame_though_episodes_begin_early_in_the_file(filmed):
    assert shown(open_lerobot(filmed)) == list(range(12))
    for frames in (-0.4, 0.45):
        drift(filmed, frames)
        assert shown(open_lerobot(filmed)) == list(range(12))
    drift(filmed, 1.0)
    with pytest.raises(UnreadableRowError, match="has no separate frame at"):
        open_lerobot(filmed)


def test_a_lost_frame_is_found_when_the_dataset_is_opened(filmed):
    film(filmed, [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11])
    with pytest.raises(UnreadableRowError, match=r"row 11 \(episode 2\).*at 1.1000 s \(11 frames for 12 rows"):
        open_lerobot(filmed)
    film(filmed, [0, 1, 2, 3, None, 5, 6, 7, 8, 9, 10, 11])
    with pytest.raises(UnreadableRowError, match="row 4 .*at 0.4000 s"):
        open_lerobot(filmed)
    found = lerobot_dataset.open_dataset(filmed, {"front": FRONT}, None, skip_unreadable=True)
    assert shown(found) == [0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11] and np.flatnonzero(found.unreadable).tolist() == [4]


@pytest.mark.parametrize("template", ["{", "{video_key.x}", "videos/none.mp4"])
def test_templates_of_paths_that_lead_nowhere_are_refused(filmed, template):
    change_info(filmed, lambda info: info.update(video_path=template))
    with pytest.raises(ConfigError, match="video_path|none.mp4 is missing"):
        open_lerobot(filmed)


@pytest.mark.parametrize("content", [b"", b"no image"])
def test_rows_without_a_readable_image_are_left_out_on_request(lerobot, content, caplog):
    expected = open_lerobot(lerobot).rows(np.arange(12))[0].images["front"]
    change_column(
        lerobot,
        FRONT,
        lambda values: [{"bytes": content, "path": None} if n in (0, 7) else v for n, v in enumerate(values)],
    )
    with pytest.raises(UnreadableRowError, match="row 0"):
        open_lerobot(lerobot).rows(np.arange(12))
    found = lerobot_dataset.open_dataset(lerobot, {"front": FRONT}, None, skip_unreadable=True)
    assert np.flatnonzero(found.unreadable).tolist() == [0, 7] and "2 of 12 rows have no image" in caplog.text
    source = filtered_rows(found, SFTConfig())
    assert len(source) == 10
    rows = [row for row in range(12) if row not in (0, 7)]
    np.testing.assert_array_equal(source.rows(np.arange(10))[0].images["front"], expected[rows])
    found.chunk_len = 3  # actions of rows that are left out stay in the chunks of the others
    assert np.array_equal(found.rows(np.array([6]))[1][0, 1], found.actions[7])
    change_column(lerobot, FRONT, lambda values: [{"bytes": content, "path": None}] * 12)
    with pytest.raises(UnreadableRowError, match="12 of 12"):
        lerobot_dataset.open_dataset(lerobot, {"front": FRONT}, None, skip_unreadable=True)


def rename(folder: Path, old: str, new: str) -> None:
    table = pq.read_table(data_file(folder))
    pq.write_table(
        table.rename_columns([new if name == old else name for name in table.column_names]), data_file(folder)
    )
    change_info(folder, lambda info: info["features"].update({new: info["features"].pop(old)}))


def env_of(state_dim=4, rate=10.0):
    return SimpleNamespace(
        action_dim=2, state_dim=state_dim, metadata={"render_fps": rate}, config=SimpleNamespace(name="tabletop", cameras=["front"]),
        check_statistics=lambda config, statistics: None,
    )  # fmt: skip


def sft_of(*words: str) -> SFTConfig:
    values = (word.removeprefix("sft.").partition("=") for word in words)
    return from_mapping(SFTConfig, {key: yaml.safe_load(value) for key, _, value in values}, "sft")


def suggestion(error: Exception) -> str:
    return str(error).rpartition("Set ")[2].split(" if ")[0].strip("'")


def test_actions_under_another_name_are_found_by_the_suggestion(lerobot):
    expected = open_lerobot(lerobot)
    rename(lerobot, "action", "actions")
    folder = f"sft.dataset={lerobot}"
    with pytest.raises(
        ConfigError, match=r"'action'.*actions \(2\).*observation.state \(4\)|observation.state.*actions"
    ) as caught:
        open_dataset(sft_of(folder), env_of())
    found = open_dataset(sft_of(folder, suggestion(caught.value)), env_of())
    np.testing.assert_array_equal(found.actions, expected.actions)
    with pytest.raises(ConfigError, match="'act' .*Set sft.action_key=actions"):
        open_dataset(sft_of(folder, "sft.action_key=act"), env_of())


def test_columns_are_joined_in_the_order_that_is_typed(lerobot):
    expected = open_lerobot(lerobot)
    rename(lerobot, "action", "action.arm")
    change_parquet(data_file(lerobot), "action.hand", list(range(12)), pa.int32())
    change_info(
        lerobot, lambda info: info["features"].update({"action.hand": {"dtype": "int32", "shape": [1], "names": None}})
    )
    env = env_of(state_dim=5)
    env.action_dim = 3
    words = [f"sft.dataset={lerobot}", "sft.state_key=[action.hand,observation.state]"]
    with pytest.raises(ConfigError) as caught:
        open_dataset(sft_of(*words), env)
    found = open_dataset(sft_of(*words, suggestion(caught.value)), env)
    hand = np.arange(12, dtype=np.float32)[:, None]
    columns = {"action.arm": expected.actions, "action.hand": hand}
    np.testing.assert_array_equal(
        found.actions, np.hstack([columns[name] for name in found.info.state_dims if name in columns])
    )
    np.testing.assert_array_equal(found.state, np.hstack([hand, expected.state]))


def test_another_rate_than_the_envs_is_a_warning_that_can_be_accepted(lerobot, caplog):
    folder = f"sft.dataset={lerobot}"
    for rate in (10, 10.9, None):  # rlinf collect rounds an env's rate
        open_dataset(sft_of(folder), env_of(rate=rate))
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        open_dataset(sft_of(folder), env_of(rate=12.5))
    assert "10 rows per second" in caplog.text and "12.5 steps" in caplog.text
    words = suggestion(caplog.text)
    caplog.clear()
    open_dataset(sft_of(folder, words), env_of(rate=12.5))
    assert not caplog.text


def change_features(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "features.json"
    features = json.loads(path.read_text())
    change(features["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"])
    path.write_text(json.dumps(features))


def test_rlds_images_of_any_size_have_the_size_of_the_first(rlds):
    def free(features):
        image = features["observation"]["featuresDict"]["features"]["image"]["image"]
        image["shape"] = {"dimensions": ["-1", "-1", "3"]}

    change_features(rlds, free)
    assert describe_dataset(rlds).image_shapes == {"image": (16, 16), "wrist_image": (16, 16)}
    assert open_rlds(rlds).rows(np.array([0]))[0].images["front"].shape == (1, 16, 16, 3)


def test_rlds_images_of_another_size_than_described_are_refused(rlds):
    text = (rlds / "features.json").read_text()
    (rlds / "features.json").write_text(text.replace('"16"', '"32"'))
    with pytest.raises(ConfigError, match="tiny_rlds-train.* has 16 x 16 pixels, but .* requires 32 x 32"):
        open_rlds(rlds).rows(np.array([0]))


def test_an_rlds_encoding_is_refused_by_name(rlds):
    change_features(rlds, lambda features: features["action"]["tensor"].update(encoding="zlib"))
    with pytest.raises(ConfigError, match="steps/action .*encoding 'zlib'"):
        open_rlds(rlds)
    packed = {"tensor": {"shape": {"dimensions": ["8"]}, "dtype": "float32", "encoding": "bytes"}}
    change_features(rlds, lambda features: features["action"]["tensor"].update(encoding="none"))
    change_features(rlds, lambda features: features["observation"]["featuresDict"]["features"].update(state=packed))
    with pytest.raises(ConfigError, match="steps/observation/state .*encoding 'bytes'"):
        open_rlds(rlds)


def changed_examples(monkeypatch, change: Callable[[dict], None]) -> None:
    """Change the second episode."""
    parse, count = rlds_dataset.parse_example, []

    def changed(*arguments):
        found = parse(*arguments)
        count.append(1)
        if len(count) == 2:
            change(found)
        return found

    monkeypatch.setattr(rlds_dataset, "parse_example", changed)


def no_steps(found: dict) -> None:
    for key in list(found):
        found[key] = np.empty(0, np.float32)


EPISODES_OF_RLDS = {
    "no steps": (no_steps, "Episode 1 in .*has no steps"),
    "width": (lambda found: found.update({"steps/observation/state": found["steps/observation/state"][:-1]}), "Episode 1 in .*steps/observation/state"),
    "numbers": (lambda found: found.update({"steps/observation/image": found["steps/action"]}), "Episode 1 in .*number of values for image"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), EPISODES_OF_RLDS.values(), ids=EPISODES_OF_RLDS)
def test_rlds_episodes_of_another_shape_are_refused_by_name(rlds, monkeypatch, change, expected):
    changed_examples(monkeypatch, change)
    with pytest.raises(ConfigError, match=expected):
        open_rlds(rlds)


def test_an_empty_rlds_image_is_found_when_the_dataset_is_opened(rlds, monkeypatch):
    def empty(found):
        offsets, lengths = found["steps/observation/image"]
        found["steps/observation/image"] = Blobs(offsets, np.where(np.arange(len(lengths)) == 1, 0, lengths))

    whole = open_rlds(rlds)
    row = int(np.flatnonzero(whole.episode_ids == 1)[1])
    changed_examples(monkeypatch, empty)
    with pytest.raises(UnreadableRowError, match=rf"row {row} \(episode 1\): no image in"):
        open_rlds(rlds)
    monkeypatch.undo()
    changed_examples(monkeypatch, empty)
    found = rlds_dataset.open_dataset(rlds, {"front": "image"}, "state", skip_unreadable=True)
    assert np.flatnonzero(found.unreadable).tolist() == [row]


def test_columns_of_an_rlds_dataset_are_joined():
    found = rlds_dataset.open_dataset(FIXTURES / "rlds", {}, ["joint_state", "state"], action_key=["action"])
    parts = [rlds_dataset.open_dataset(FIXTURES / "rlds", {}, name).state for name in ("joint_state", "state")]
    np.testing.assert_array_equal(found.state, np.hstack(parts))


def test_one_column_cannot_stand_for_two_cameras(lerobot):
    with pytest.raises(
        ConfigError, match=r"sft.cameras is \[front,observation.images.front\].* twice.*Set sft.cameras="
    ):
        image_columns(describe_dataset(lerobot), ["front", "wrist"], ["front", FRONT])
