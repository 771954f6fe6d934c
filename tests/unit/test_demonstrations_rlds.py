"""RLDS folders: what tensorflow-datasets wrote is read without TensorFlow; damage is rejected."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from rlinf.data import rlds_dataset
from rlinf.data.formats import describe_dataset
from rlinf.data.rlds_dataset import Blobs, parse_example, records
from rlinf.errors import ConfigError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "rlds"
CAMERAS = {"front": "image", "wrist": "wrist_image"}


def truth(kind: str) -> np.ndarray:
    stored = np.load(FIXTURE / "truth.npz")
    names = sorted(
        (name for name in stored.files if name.startswith(f"{kind}_")), key=lambda name: int(name.rpartition("_")[2])
    )
    return np.concatenate([stored[name] for name in names])


def test_a_dataset_of_tensorflow_datasets_is_read():
    dataset = rlds_dataset.open_dataset(FIXTURE, CAMERAS, "state")
    observation, actions = dataset.rows(np.arange(len(dataset)))
    np.testing.assert_array_equal(actions[:, 0].numpy(), truth("action"))
    np.testing.assert_array_equal(observation.state, truth("state"))
    np.testing.assert_array_equal(observation.images["wrist"], truth("wrist"))
    assert observation.instruction == truth("text").tolist()
    difference = np.abs(observation.images["front"].astype(int) - truth("image"))
    assert difference.max() <= 6, "decoders of JPEG round differently"
    assert np.abs(observation.images["front"].astype(int) - np.roll(truth("image"), 1, axis=0)).max() > 6
    assert len(set(dataset.episode_ids)) == dataset.num_episodes == describe_dataset(FIXTURE).num_episodes


def test_rewards_and_ends_are_read_on_request():
    dataset = rlds_dataset.open_dataset(FIXTURE, CAMERAS, "state", outcomes=True)
    last = dataset.last_rows == np.arange(len(dataset))
    assert describe_dataset(FIXTURE).has_rewards and not describe_dataset(FIXTURE).reports_success_per_row
    np.testing.assert_array_equal(dataset.outcomes.rewards, last)
    np.testing.assert_array_equal(dataset.outcomes.terminated, last)
    np.testing.assert_array_equal(dataset.outcomes.executed, dataset.actions)
    assert rlds_dataset.open_dataset(FIXTURE, CAMERAS, "state").outcomes is None
    joints = rlds_dataset.open_dataset(FIXTURE, {}, "joint_state")
    np.testing.assert_allclose(joints.state, truth("joint"), rtol=1e-6)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a message shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def example(**features: bytes) -> bytes:
    entries = b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in features.items())
    return field(1, entries)


def test_packed_and_unpacked_lists_are_read():
    message = example(
        packed=field(2, field(1, struct.pack("<2f", 1.5, -2.0))),
        single=field(2, b"\x0d" + struct.pack("<f", 3.0) + b"\x0d" + struct.pack("<f", 4.0)),
        numbers=field(3, field(1, b"\x05\xac\x02" + b"\xff" * 9 + b"\x01")),
        number=field(3, b"\x08\x07"),
        blobs=field(1, field(1, b"ab") + field(1, b"") + field(1, b"c")),
        empty=b"",
    )
    data = memoryview(message)
    found = parse_example(data, 0, len(data))
    assert found["packed"].tolist() == [1.5, -2.0] and found["single"].tolist() == [3.0, 4.0]
    assert (
        found["numbers"].tolist() == [5, 300, -1] and found["number"].tolist() == [7] and found["empty"].tolist() == []
    )
    assert isinstance(found["blobs"], Blobs)
    assert [bytes(data[a : a + n]) for a, n in zip(*found["blobs"], strict=True)] == [b"ab", b"", b"c"]


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x02]) + data[place + 1 :]


DAMAGES = {
    "cut": (lambda data, action: data[:-10], "ends"),
    "empty": (lambda data, action: b"", "is empty"),
    "header": (lambda data, action: flipped(data, 0), "no record starts at byte 0"),
    "message": (lambda data, action: flipped(data, 13), "its checksum"),
    "one bit of an action": (lambda data, action: flipped(data, data.find(action) + 3), "its checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_records_are_refused(tmp_path, damage):
    folder, (change, words) = Path(shutil.copytree(FIXTURE, tmp_path / "rlds")), DAMAGES[damage]
    (path,) = folder.glob("*-train.tfrecord-*")
    data = path.read_bytes()
    assert len(list(records(memoryview(data)))) == 3
    path.write_bytes(change(data, rlds_dataset.open_dataset(folder, CAMERAS, "state").actions[1].tobytes()))
    with pytest.raises(ConfigError, match=rf"damaged or incomplete.*{words}.*use a different") as caught:
        rlds_dataset.open_dataset(folder, CAMERAS, "state")
    assert path.name in str(caught.value)


def test_a_missing_file_and_missing_parts_are_refused(tmp_path):
    folder = Path(shutil.copytree(FIXTURE, tmp_path / "rlds"))
    about = json.loads((folder / "dataset_info.json").read_text())
    about["splits"][0]["shardLengths"] = ["4"]
    (folder / "dataset_info.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="it has 3 episodes, but its description states 4"):
        rlds_dataset.open_dataset(folder, CAMERAS, "state")
    features = json.loads((folder / "features.json").read_text())
    del features["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"][
        "language_instruction"
    ]
    (folder / "features.json").write_text(json.dumps(features))
    with pytest.raises(ConfigError, match="has no steps/language_instruction; it has .*steps/action"):
        describe_dataset(folder)
    (folder / "dataset_info.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read as an RLDS dataset"):
        describe_dataset(folder)


def test_a_folder_around_a_dataset_names_it_and_the_description_has_the_widths(tmp_path):
    folder = shutil.copytree(FIXTURE, tmp_path / "tiny" / "1.0.0")
    info = describe_dataset(folder)
    assert info.image_shapes == {"image": (16, 16), "wrist_image": (16, 16)}
    assert info.state_dims == {"state": 8, "joint_state": 7} and info.action_dim == 7
    with pytest.raises(ConfigError, match=r"which is not a dataset. Set sft.dataset=.*tiny/1.0.0"):
        describe_dataset(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="is not a folder. Set sft.dataset="):
        describe_dataset(tmp_path / "none")
