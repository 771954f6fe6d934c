"""Messages of the policy server: the bytes of other projects, and what is rejected before it becomes an array."""

import io
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from PIL import Image

import rlinf.serving
from rlinf.serving import MessageError
from rlinf.serving.codec import MAX_DEPTH, MAX_ITEMS, decode, encode, encode_named
from rlinf.serving.layouts import ROBOTS, layout_of
from rlinf.types import Observation

GOLDEN = bytes.fromhex(
    "84c40b5f5f6e6461727261795f5fc3c40464617461c4080000803f00000040c4056474797065a33c6634c40573686170659102"
)
"""What openpi-client 0.1.2 writes for float32 [1, 2]."""
ARRAYS = [
    np.float32([1, 2]), np.zeros((2, 3, 3), np.uint8), np.arange(6, dtype=np.int64).reshape(2, 3), np.array(True),
    np.float64([np.nan, np.inf]), np.zeros((0, 4), np.float32), np.float16([0.5]), np.array([[True], [False]]),
]  # fmt: skip


def array_of(**changes) -> dict:
    array = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2]} | changes
    return {name.encode(): value for name, value in array.items()}


def png(width: int, height: int) -> bytes:
    """A PNG that says it has this size, with the pixels of a single row."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * (3 * 9 + 1))), (b"IEND", b"")]  # fmt: skip
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def picture_of(**changes) -> dict:
    return {"__image__": True, "format": "png", "data": png(9, 1), "shape": [1, 9, 3], **changes}


def test_an_array_is_the_bytes_of_openpi_both_ways():
    assert encode(np.float32([1, 2])) == GOLDEN
    assert encode({}) == b"\x80", "the metadata of a server without any"
    found = decode(GOLDEN)
    assert found.dtype == np.float32 and found.tolist() == [1, 2] and found.flags.writeable


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_arrays_come_back_in_either_layout(array):
    for message in (encode({"a": [array]}), encode_named({"a": [array]})):
        found = decode(message)["a"][0]
        assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


def test_scalars_lists_and_text_come_back():
    value = {"a": np.int32(3), "b": np.float64(0.5), "c": (1, "x", None, True), "d": {"e": b"raw"}}
    found = decode(encode(value))
    assert found == {"a": 3, "b": 0.5, "c": [1, "x", None, True], "d": {"e": b"raw"}} and found["a"].dtype == np.int32
    assert decode(encode_named(value))["a"] == 3


def test_openpis_own_reader_and_writer_agree_with_ours():
    theirs = pytest.importorskip(
        "openpi_client.msgpack_numpy", reason="pip install --no-deps openpi-client==0.1.2 dm-tree typing_extensions"
    )
    value = {"actions": ARRAYS[2], "infer_ms": np.float32(1.5), "names": ["a", "b"]}
    assert encode(value) == theirs.packb(value)
    for array in ARRAYS:
        assert theirs.unpackb(encode(array)).tobytes() == array.tobytes()
        assert decode(theirs.packb(array)).tobytes() == array.tobytes()


def test_vla_evals_own_reader_and_writer_agree_with_ours():
    theirs = pytest.importorskip("vla_eval.protocol.messages", reason="pip install vla-eval==0.8.0")
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    message = theirs.Message(theirs.MessageType.OBSERVATION, {"images": {"a": pixels}, "states": np.ones(3)}, 4)
    found = decode(theirs.pack_message(message))
    assert found["seq"] == 4 and np.array_equal(found["payload"]["images"]["a"], pixels)
    assert np.array_equal(found["payload"]["states"], np.ones(3))
    ours = {"type": "action", "payload": {"actions": np.float32([1, 2])}, "seq": 5, "timestamp": 0.5}
    assert theirs.unpack_message(encode_named(ours)).payload["actions"].tolist() == [1, 2]


def test_pictures_are_read_as_png_jpeg_and_raw():
    pixels = np.tile(np.arange(0, 240, 10, dtype=np.uint8)[:, None, None], (1, 16, 3))
    for kind, tolerance in (("png", 0), ("jpeg", 8), ("raw", 0)):
        data = io.BytesIO()
        if kind == "raw":
            data.write(pixels.tobytes())
        else:
            Image.fromarray(pixels).save(data, kind)
        found = decode(msgpack.packb(picture_of(format=kind, data=data.getvalue(), shape=list(pixels.shape))))
        assert found.shape == pixels.shape and np.abs(found.astype(int) - pixels).max() <= tolerance


def nested(depth: int):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


BROKEN = {
    "object array": array_of(dtype="|O"), "void": array_of(dtype="|V8", shape=[1]), "bytes": array_of(dtype="|S8", shape=[1]),
    "text": array_of(dtype="<U2", shape=[1]), "complex": array_of(dtype="<c8", shape=[1]), "date": array_of(dtype="<M8[s]", shape=[1]),
    "big endian": array_of(dtype=">f4"), "a structure": array_of(dtype="f4,f4", shape=[1]), "type as a list": array_of(dtype=["<f4"]),
    "too few bytes": array_of(data=b"\0" * 7), "too many bytes": array_of(data=b"\0" * 9), "text as bytes": array_of(data="0" * 8),
    "negative size": array_of(shape=[-1]), "huge size": array_of(shape=[2**40]), "overflow": array_of(shape=[2**31 - 1] * 3),
    "product of the sizes": array_of(data=b"", shape=[0, 2**31 - 1, 2**31 - 1, 2**31 - 1]),
    "size of 2.0": array_of(shape=[2.0]), "size of true": array_of(shape=[True, 2]), "nine axes": array_of(shape=[1] * 8 + [2]),
    "no shape": {b"__ndarray__": True}, "number that is none": {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"},
    "number out of range": {b"__npgeneric__": True, b"data": 2**40, b"dtype": "<i4"},
    "integer keys": {1: 2}, "bytes as keys": {b"a": 2}, "deep maps": nested(MAX_DEPTH + 1), "deeper maps": nested(400), "deepest": nested(2000),
    "long list": [0] * (MAX_ITEMS + 1), "an extension": msgpack.ExtType(5, b"x"),
    "image of another size": picture_of(shape=[2, 9, 3]), "gif": picture_of(format="gif"), "jpeg that is a png": picture_of(format="jpeg"),
    "no image": picture_of(data=b"xx"), "cut image": picture_of(data=png(9, 1)[:40]), "two channels": picture_of(shape=[1, 9, 2]),
    "huge image": picture_of(data=png(50_000, 50_000), shape=[50_000, 50_000, 3]),
    "image that is larger than it says": picture_of(data=png(50_000, 50_000)),
}  # fmt: skip


BYTES = {
    "empty": b"", "cut off": GOLDEN[:-1], "more than one": GOLDEN + b"\0", "list of 4 G": b"\xdd\xff\xff\xff\xff",
    "map of 4 G": b"\xdf\xff\xff\xff\xff", "4 G of bytes": b"\xc6\xff\xff\xff\xffx", "no code": b"\xc1", "text": "text",
}  # fmt: skip


@pytest.mark.parametrize("what", [*BROKEN, *BYTES])
def test_a_broken_message_is_refused_without_memory(what):
    message = BYTES[what] if what in BYTES else packed(BROKEN[what])
    tracemalloc.start()
    try:
        with pytest.raises(MessageError):
            decode(message)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def packed(value) -> bytes:
    """``msgpack.packb``, which itself rejects maps deeper than 511."""
    depth = 0
    while isinstance(value, dict) and set(value) == {"a"}:
        value, depth = value["a"], depth + 1
    return b"\x81\xa1a" * depth + msgpack.packb(value)


def test_pictures_of_a_message_share_one_budget(monkeypatch):
    """Each of ten images would be allowed alone."""
    monkeypatch.setattr("rlinf.serving.codec.MAX_PIXELS", 9 * 100)
    data = io.BytesIO()
    Image.new("RGB", (10, 10)).save(data, "png")
    image = picture_of(data=data.getvalue(), shape=[10, 10, 3])
    assert len(decode(packed({"images": [image] * 9}))["images"]) == 9, "a control"
    with pytest.raises(MessageError, match="too many pixels; expected at most 900"):
        decode(packed({"images": [image] * 10}))


@pytest.mark.parametrize("broken", [[[[0] * 100] * 40] * 40, [[{"a": 0}] * 1000] * 50])
def test_entries_are_counted_over_the_whole_message(broken):
    with pytest.raises(MessageError, match="too many entries; expected at most 65536"):
        decode(packed(broken))
    assert decode(packed(broken[:10])) == broken[:10], "a control"


def test_a_message_at_the_limits_is_read():
    assert decode(packed(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    assert decode(msgpack.packb([0] * MAX_ITEMS)) == [0] * MAX_ITEMS


def test_random_bytes_give_a_value_or_a_message_error():
    generator = np.random.default_rng(0)
    whole = encode({"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(3), "prompt": "go"})
    outcomes = set()
    for _ in range(1000):
        data = bytearray(whole)
        for position in generator.integers(0, len(whole), generator.integers(1, 6)):
            data[position] = generator.integers(256)
        try:
            decode(bytes(data))
            outcomes.add("read")
        except MessageError:
            outcomes.add("rejected")
    assert outcomes == {"read", "rejected"}


@pytest.mark.parametrize("value", [np.array(["x"]), np.array([None]), np.array([1j]), np.zeros(2, ">f4"), object()])
def test_what_nobody_could_read_is_not_written(value):
    for write in (encode, encode_named):
        with pytest.raises(TypeError):
            write({"a": value})


def test_no_module_imports_pickle():
    files = list(Path(rlinf.serving.__file__).parent.glob("*.py"))
    assert len(files) > 5
    loaders = re.compile(
        r"^\s*(import|from) .*\b(pickle|cloudpickle|dill|marshal|shelve|msgpack_numpy)\b", re.MULTILINE
    )
    assert [file.name for file in files if loaders.search(file.read_text(encoding="utf-8"))] == []
    assert loaders.search("x\n    from a import b, pickle as p"), "a control"


@pytest.mark.parametrize("keys", [*ROBOTS, "rlinf"])
def test_an_observation_comes_back_from_each_robots_keys(keys):
    generator = np.random.default_rng(0)
    cameras = ["front", "hand"]
    layout = layout_of(keys, cameras)
    width = layout.state_width or 5
    images = {name: generator.integers(0, 256, (2, 6, 6, 3), dtype=np.uint8) for name in cameras}
    observation = Observation(images, generator.random((2, width), dtype=np.float32), ["go", "stop"])
    for row, sentence in enumerate(observation.instruction):
        found = layout.read(decode(encode(layout.request(observation, row))), cameras, reads_state=True)
        assert found["instruction"] == sentence and np.array_equal(found["state"], observation.state[row])
        assert all(np.array_equal(found["images"][name], images[name][row]) for name in cameras)


def test_the_keys_are_those_of_openpis_examples():
    observation = Observation({"a": np.zeros((1, 8, 8, 3), np.uint8)}, np.arange(8, dtype=np.float32)[None], ["go"])
    droid = layout_of("droid", ["a"]).request(observation, 0)
    assert droid["observation/joint_position"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert droid["observation/gripper_position"].tolist() == [7] and droid["prompt"] == "go"
    assert layout_of("libero", ["a"]).request(observation, 0)["observation/image"].shape == (8, 8, 3)
    assert layout_of("aloha", ["a"]).request(observation, 0)["images"]["cam_high"].shape == (3, 8, 8)


def test_pictures_of_floats_are_those_of_bytes():
    layout = layout_of("rlinf", ["front"])
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    found = layout.read({"images": {"front": pixels / np.float32(255)}, "prompt": b"go"}, ["front"], False)
    assert np.array_equal(found["images"]["front"], pixels) and found["instruction"] == "go" and found["state"] is None


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"images": {}}, "no images['front']; found: no keys"), ({"images": {"side": 1}}, "no images['front']; found: side"),
        ({"images": 3}, "no images['front']; found: a int"), ({"images": {"front": "x"}}, "expected an image"),
        ({"images": {"front": np.zeros((4, 4))}}, "[4, 4]; expected an image"),
        ({"images": {"front": np.full((4, 4, 3), 2.0)}}, "outside 0 to 1"),
        ({"images": {"front": np.full((4, 4, 3), np.nan)}}, "outside 0 to 1"), ({"prompt": None}, "no prompt"), ({}, "no state"),
        ({"state": "far"}, "state is"), ({"state": ["1", "2"]}, "state is a list; expected numbers"), ({"state": [[1], [2, 3]]}, "state is"),
    ],
)  # fmt: skip
def test_an_observation_that_does_not_fit_is_refused_by_name(request_, said):
    whole = {"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "prompt": "x"} | request_
    request = {name: value for name, value in whole.items() if value is not None}
    with pytest.raises(MessageError, match=re.escape(said)):
        layout_of("rlinf", ["front"]).read(request, ["front"], reads_state=True)


def test_widths_are_those_of_each_part_and_sizes_are_compared_before_anything_is_computed():
    image = np.zeros((4, 4, 3), np.uint8)
    request = {"observation/exterior_image_1_left": image, "prompt": "x"}
    request |= {"observation/joint_position": np.zeros(6), "observation/gripper_position": np.zeros(2)}
    with pytest.raises(MessageError, match="observation/joint_position has 6 values; expected 7"):
        layout_of("droid", ["front"]).read(request, ["front"], reads_state=True)
    request |= {"observation/joint_position": np.zeros(7), "observation/gripper_position": 1.0}
    assert layout_of("droid", ["front"]).read(request, ["front"], reads_state=True)["state"].shape == (8,)
    nan = {"images": {"front": np.full((4, 4, 3), np.nan)}, "prompt": "x"}
    with pytest.raises(MessageError, match=r"has the shape \[4, 4, 3\]; expected \[8, 8, 3\]"):
        layout_of("rlinf", ["front"]).read(nan, ["front"], False, image_size=8)
