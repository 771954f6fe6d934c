"""Read RLDS folders, the format of Open X-Embodiment and LIBERO: TensorFlow datasets with one example per episode.

``features.json`` must list ``steps/action``, images and a state under ``steps/observation``, and the instruction as
``steps/language_instruction`` (or ``steps/observation/natural_language_instruction``). Only the split ``train`` is read,
without TensorFlow, which would be a large dependency.

Each TFRecord record consists of its length (uint64, little-endian), a checksum of these eight bytes, the message and its checksum.
Checksums are CRC-32C, rotated and shifted (tensorflow/core/lib/hash/crc32c.h). Messages are protocol buffers
(https://protobuf.dev/programming-guides/encoding) as in tensorflow/core/example/example.proto and feature.proto.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from crc32c import crc32c

from rlinf.data.frames import EncodedFrames
from rlinf.data.stored import NUMBERS, DatasetInfo, Outcomes, StoredDemonstrations, column_names
from rlinf.errors import ConfigError, damaged
from rlinf.flags import flags_of

HEADER = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


class Blobs(NamedTuple):
    """Positions of a feature's byte strings, int64 ``[N]`` each."""

    offsets: np.ndarray
    lengths: np.ndarray


def records(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each message in a TFRecord file; raise ValueError if a length or checksum is wrong."""
    position = 0
    while position < len(data):
        if position + HEADER.size > len(data):
            raise ValueError(f"the file ends inside the header at byte {position}")
        length, checksum = HEADER.unpack_from(data, position)
        if checksum != masked_crc32c(bytes(data[position : position + 8])):
            raise ValueError(f"no record starts at byte {position}")
        start = position + HEADER.size
        position = start + length + 4
        if position > len(data):
            raise ValueError(f"the record at byte {start - HEADER.size} has {length} bytes, but the file ends earlier")
        if CHECKSUM.unpack_from(data, start + length)[0] != masked_crc32c(data[start : start + length]):
            raise ValueError(f"the record at byte {start - HEADER.size} is damaged: its checksum does not match")
        yield start, start + length


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the masked checksum of ``data``, as in TFRecord files."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(data: memoryview, start: int, end: int) -> dict[str, np.ndarray | Blobs]:
    """Return the features of the ``tf.train.Example`` in ``data[start:end]``: float32 or int64 arrays, or ``Blobs``."""
    features = {}
    for _, _, features_start, features_end in _fields(data, start, end):  # Example.features
        for _, _, entry_start, entry_end in _fields(data, features_start, features_end):  # Features.feature
            name, value = "", (0, 0)
            for number, _, first, last in _fields(data, entry_start, entry_end):
                if number == 1:
                    name = bytes(data[first:last]).decode()
                else:
                    value = (first, last)
            features[name] = _feature(data, *value)
    return features


def _feature(data: memoryview, start: int, end: int) -> np.ndarray | Blobs:
    """Read a ``Feature``: field 1 is a BytesList, 2 a FloatList, 3 an Int64List, each with its values in field 1."""
    for kind, _, first, last in _fields(data, start, end):
        values = [(wire, a, b) for _, wire, a, b in _fields(data, first, last)]
        if kind == 1:
            offsets = np.array([a for _, a, _ in values], dtype=np.int64)
            return Blobs(offsets, np.array([b for _, _, b in values], dtype=np.int64) - offsets)
        if kind == 2:
            return np.concatenate([np.frombuffer(data[a:b], "<f4") for _, a, b in values] or [np.empty(0, "<f4")])
        numbers: list[int] = []
        for wire, a, b in values:
            if wire == VARINT:
                numbers.append(_varint(data, a)[0])
            # Packed encoding: one field contains all numbers.
            while wire == BYTES and a < b:
                number, a = _varint(data, a)
                numbers.append(number)
        return np.array(numbers, dtype=np.uint64).astype(np.int64)
    return np.empty(0, dtype=np.float32)


def _fields(data: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a message as (field number, wire type, start of the value, end of the value)."""
    while position < end:
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == BYTES:
            length, position = _varint(data, position)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        elif wire == VARINT:
            length = _varint(data, position)[1] - position
        else:
            raise ValueError(f"byte {position} has the wire type {wire}, which does not occur in an Example")
        if position + length > end:
            raise ValueError(f"the field at byte {position} is longer than its message")
        yield number, wire, position, position + length
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read a number with seven bits per byte, lowest first; return it and the next position."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7


FEATURES = "features.json"
SPLIT = "train"
OBSERVATION = "steps/observation/"
ACTION = "steps/action"
STATE = f"{OBSERVATION}state"
REWARD, TERMINAL = "steps/reward", "steps/is_terminal"
INSTRUCTIONS = ("steps/language_instruction", f"{OBSERVATION}natural_language_instruction")


def describe(folder: Path) -> DatasetInfo:
    """Read the dataset's description; raise ConfigError if it is incomplete. Variable image sizes (-1) are read from the first image."""
    try:
        features = dict(_leaves(json.loads((folder / FEATURES).read_text(encoding="utf-8"))))
        about = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        splits = {split["name"]: split for split in about["splits"]}
        num_episodes = sum(map(int, splits[SPLIT]["shardLengths"]))
        vectors = {key: math.prod(shape) for key, (kind, shape) in features.items() if NUMBERS.fullmatch(kind)}
        shapes = {key: shape[:2] for key, (kind, shape) in features.items() if kind == "image"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"{folder} cannot be read as an RLDS dataset ({type(error).__name__}: {error}); expected {FEATURES} and "
            f"dataset_info.json with a split '{SPLIT}'. Use a different folder"
        ) from error
    needed = {
        ACTION: ACTION in vectors,
        STATE: STATE not in features or STATE in vectors,
        INSTRUCTIONS[0]: _instruction_of(features),
    }
    if missing := " and no ".join(name for name, there in needed.items() if not there):
        has = ", ".join(f"{name} ({kind})" for name, (kind, _) in features.items())
        raise ConfigError(f"The dataset {folder} has no {missing}; it has {has}. Use a different folder")
    if free := [key for key, shape in shapes.items() if len(shape) < 2 or min(shape) < 1]:
        shapes |= _first_sizes(folder, free)
    return DatasetInfo(
        folder=folder,
        format="RLDS",
        num_episodes=num_episodes,
        image_shapes=_observed(shapes),
        state_dims=_observed(vectors),
        state_key="state",
        action_dim=vectors[ACTION],
        has_rewards=REWARD in features,
    )


def open_dataset(
    folder: Path, cameras: Mapping[str, str], state_key: str | Sequence[str] | None, outcomes: bool = False, *,
    action_key: str | Sequence[str] = "action", skip_unreadable: bool = False,
) -> StoredDemonstrations:  # fmt: skip
    """Read the numeric data of all env steps, and locate the images of ``cameras`` (name in the env to name in the dataset)."""
    info = describe(folder)
    instruction = _instruction_of(dict(_leaves(json.loads((folder / FEATURES).read_text(encoding="utf-8")))))
    paths = sorted(folder.glob(f"*-{SPLIT}.*-?????-of-?????"))
    # The files stay open, because images are read from them by offset, row by row.
    files: list[BinaryIO] = [open(path, "rb") for path in paths]
    widths = {ACTION: info.action_dim} | {f"{OBSERVATION}{key}": width for key, width in info.state_dims.items()}
    action_keys, state_keys = (
        [ACTION if key == "action" else f"{OBSERVATION}{key}" for key in column_names(keys)]
        for keys in (action_key, state_key)
    )
    actions, states, tasks, task_ids = [], [], {}, []
    recorded: dict[str, list[np.ndarray]] = {REWARD: [], TERMINAL: []} if outcomes else {}
    episode_ids: list[np.ndarray] = []
    file_ids: list[np.ndarray] = []
    images: dict[str, list[Blobs]] = {camera: [] for camera in cameras}
    for number, file in enumerate(files):
        if not paths[number].stat().st_size:
            raise damaged(folder, f"{paths[number].name} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            try:
                for start, end in records(data):
                    example = parse_example(data, start, end)
                    offsets, lengths = _blobs(example[instruction], None, instruction)
                    length = len(offsets)
                    for parts, keys in ((actions, action_keys), (states, state_keys)):
                        columns = [_numbers(example[key], length, widths[key], key) for key in keys]
                        parts += [np.concatenate(columns, axis=1)] * bool(columns)
                    for key, parts in recorded.items():
                        if key in example:
                            parts.append(_numbers(example[key], length, 1, key)[:, 0])
                    for camera, key in cameras.items():
                        images[camera].append(_blobs(example[OBSERVATION + key], length, key))
                    texts = [bytes(data[a : a + n]).decode() for a, n in zip(offsets, lengths, strict=True)]
                    task_ids.append(np.array([tasks.setdefault(text, len(tasks)) for text in texts], dtype=np.int64))
                    episode_ids.append(np.full(length, len(episode_ids)))
                    file_ids.append(np.full(length, number))
            except (ValueError, KeyError, IndexError) as error:
                raise damaged(f"Episode {len(episode_ids)} in {paths[number]}", error) from error
    if not actions or len(actions) != info.num_episodes:
        raise damaged(folder, f"it has {len(actions)} episodes, but its description states {info.num_episodes}")
    where, frames = np.concatenate(file_ids), {}
    for camera, blobs in images.items():
        offsets, lengths = map(np.concatenate, zip(*blobs, strict=True))
        faults = {row: f"no image in {paths[where[row]]}" for row in np.flatnonzero(lengths == 0).tolist()}
        frames[camera] = EncodedFrames(
            files, where, offsets, lengths, info.image_shapes[cameras[camera]], paths, faults
        )
    rows, task_ids, episode_ids = map(np.concatenate, (actions, task_ids, episode_ids))
    results = None
    if outcomes:
        rewards, terminal = (np.concatenate(parts) if parts else None for parts in recorded.values())
        ends = np.zeros(len(rows), bool) if terminal is None else flags_of(terminal, f"{TERMINAL} of {folder}")
        results = Outcomes(rows, rewards, None, ends)
    state = np.concatenate(states) if states else None
    dataset = StoredDemonstrations(info, frames, state, rows, task_ids, list(tasks), episode_ids, outcomes=results)
    return dataset.check_images(skip_unreadable)


def _blobs(blobs: Any, length: int | None, name: str) -> Blobs:
    if not len(blobs):
        raise ValueError(f"it has no steps, because {name} is empty")
    if not isinstance(blobs, Blobs) or length not in (None, len(blobs.offsets)):
        raise ValueError(f"an episode of {length} steps has a different number of values for {name}")
    return blobs


def _numbers(values: Any, length: int, width: int, name: str) -> np.ndarray:
    if isinstance(values, Blobs) or values.size != length * width:
        raise ValueError(f"an episode of {length} steps does not have {width} values of {name} per step")
    return values.astype(np.float32).reshape(length, width)


def _first_sizes(folder: Path, keys: Sequence[str]) -> dict[str, tuple[int, int]]:
    first = np.zeros(1, np.int64)
    for path in sorted(folder.glob(f"*-{SPLIT}.*-?????-of-?????"))[:1]:
        with open(path, "rb") as file:
            try:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                example = parse_example(data, *next(records(data)))
                images = {key: EncodedFrames([file], first, *example[key], (), [path]) for key in keys}
            except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
                raise damaged(path, error) from error
            return {key: frames.read(first).shape[1:3] for key, frames in images.items()}
    return {}


def _observed(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(OBSERVATION): value for key, value in columns.items() if key.startswith(OBSERVATION)}


def _instruction_of(features: Mapping[str, Any]) -> str | None:
    return next((key for key in INSTRUCTIONS if key in features), None)


def _leaves(feature: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield ``(path, (kind, shape))`` for each leaf of ``features.json``; the kind of a tensor is its dtype."""
    if "featuresDict" in feature:
        for name, child in feature["featuresDict"]["features"].items():
            yield from _leaves(child, f"{path}/{name}" if path else name)
    elif "sequence" in feature:
        yield from _leaves(feature["sequence"]["feature"], path)
    else:
        for kind in ("image", "tensor", "text"):
            if kind in feature:
                about = feature[kind]
                shape = tuple(int(size) for size in about.get("shape", {}).get("dimensions", ()))
                packed = f" in the encoding '{about['encoding']}'" if about.get("encoding", "none") != "none" else ""
                yield path, (f"{about['dtype']}{packed}" if kind == "tensor" else kind, shape)
