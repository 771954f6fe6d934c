"""Datasets that are damaged, or that others wrote: each fault is one error that names the file, and foreign layouts are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf.data import lerobot_dataset, rlds_dataset
from rlinf.data.formats import describe_dataset, image_columns
from rlinf.data.rlds_dataset import masked_crc32c
from rlinf.errors import ConfigError

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
    "no image": (FRONT, with_value(2, None), r"row 2 has no image 'observation.images.front', in .*file-000.parquet"),
    "empty image": (FRONT, with_value(2, {"bytes": None, "path": None}), "row 2 has no image"),
    "index twice": ("index", lambda values: [*values[:3], values[2], *values[4:]], "two rows with the index 2"),
    "unknown task": ("task_index", with_value(0, 99), "task_index 99, but meta/tasks.parquet has"),
    "absolute path": (FRONT, with_value(0, {"bytes": None, "path": "/etc/hostname"}), "'/etc/hostname'; required: a path within"),
    "path that leads out": (FRONT, with_value(0, {"bytes": None, "path": "a/../../b.png"}), "'a/../../b.png'; required"),
    "missing image file": (FRONT, with_value(0, {"bytes": None, "path": "images/none.png"}), "none.png"),
    "torn episode": ("episode_index", lambda values: [*values[:-1], values[0]], "not consecutive"),
}  # fmt: skip


@pytest.mark.parametrize(("column", "change", "expected"), DAMAGED_ROWS.values(), ids=DAMAGED_ROWS)
def test_damaged_rows_are_refused_when_the_dataset_is_opened(lerobot, column, change, expected):
    open_lerobot(lerobot)
    change_column(lerobot, column, change)
    with pytest.raises(ConfigError, match=f"(?s){expected}.*[Uu]se another"):
        open_lerobot(lerobot)


@pytest.mark.parametrize("name", ["total_frames", "total_episodes"])
def test_a_description_without_its_counts_is_refused(lerobot, name):
    change_info(lerobot, lambda info: info.pop(name))
    with pytest.raises(ConfigError, match=rf"info.json cannot be read .*'{name}'.*Use another"):
        describe_dataset(lerobot)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"env": 3}'])
def test_a_damaged_record_of_the_conditions_is_refused(lerobot, content):
    (lerobot / "meta" / "rlinf.json").write_text(content)
    with pytest.raises(ConfigError, match=r"rlinf.json is damaged.*use another"):
        describe_dataset(lerobot)


def test_images_of_another_size_than_described_are_refused(lerobot):
    height, width = describe_dataset(lerobot).image_shapes[FRONT]
    change_info(lerobot, lambda info: info["features"][FRONT].update(shape=[64, 64, 3]))
    with pytest.raises(ConfigError, match=rf"row 1 has {height} x {width} pixels, but its description says 64 x 64"):
        open_lerobot(lerobot).rows(np.array([1]))


def test_videos_outside_the_folder_are_refused(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "lerobot" / "video", tmp_path / "video"))
    change_info(folder, lambda info: info.update(video_path="../other/{video_key}/file-{file_index:03d}.mp4"))
    with pytest.raises(ConfigError, match=r"'../other/.*required: a path within the folder. Use another"):
        open_lerobot(folder)


def test_one_column_cannot_stand_for_two_cameras(lerobot):
    with pytest.raises(
        ConfigError, match=r"sft.cameras is \[front,observation.images.front\].* twice.*Set sft.cameras="
    ):
        image_columns(describe_dataset(lerobot), ["front", "wrist"], ["front", FRONT])


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


@pytest.mark.parametrize("names", [["channels", "height", "width"], None])
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


def test_rlds_images_of_another_size_than_described_are_refused(rlds):
    text = (rlds / "features.json").read_text()
    assert '"16"' in text
    (rlds / "features.json").write_text(text.replace('"16"', '"32"'))
    with pytest.raises(ConfigError, match=r"tiny_rlds-train.* has 16 x 16 pixels, but its description says 32 x 32"):
        open_rlds(rlds).rows(np.array([0]))
