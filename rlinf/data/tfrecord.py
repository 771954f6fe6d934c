"""Read TFRecord files of ``tf.train.Example`` messages without TensorFlow, which would be a large dependency.

A record is its length (uint64, little endian), a checksum of these eight bytes, the message and its checksum. Checksums
are CRC-32C, rotated and shifted (tensorflow/core/lib/hash/crc32c.h). Messages are protocol buffers
(https://protobuf.dev/programming-guides/encoding) as in tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

HEADER = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


class Blobs(NamedTuple):
    """Places of the byte strings of a feature, int64 ``[N]`` each."""

    offsets: np.ndarray
    lengths: np.ndarray


def records(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each message in a TFRecord file; raise ValueError if a length or a checksum is wrong."""
    position = 0
    while position < len(data):
        if position + HEADER.size > len(data):
            raise ValueError(f"the file ends inside the header at byte {position}")
        length, checksum = HEADER.unpack_from(data, position)
        if checksum != masked_crc32c(bytes(data[position : position + 8])):
            raise ValueError(f"no record begins at byte {position}")
        begin = position + HEADER.size
        position = begin + length + 4
        if position > len(data):
            raise ValueError(f"the record at byte {begin - HEADER.size} has {length} bytes, but the file ends before")
        if CHECKSUM.unpack_from(data, begin + length)[0] != masked_crc32c(data[begin : begin + length]):
            raise ValueError(f"the record at byte {begin - HEADER.size} is damaged: its checksum does not match")
        yield begin, begin + length


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the checksum of ``data`` in the form of TFRecord files."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(data: memoryview, begin: int, end: int) -> dict[str, np.ndarray | Blobs]:
    """Return the features of the ``tf.train.Example`` in ``data[begin:end]``: float32 or int64 arrays, or ``Blobs``."""
    found = {}
    for _, _, features_begin, features_end in _fields(data, begin, end):  # Example.features
        for _, _, entry_begin, entry_end in _fields(data, features_begin, features_end):  # Features.feature
            name, value = "", (0, 0)
            for number, _, first, last in _fields(data, entry_begin, entry_end):
                if number == 1:
                    name = bytes(data[first:last]).decode()
                else:
                    value = (first, last)
            found[name] = _feature(data, *value)
    return found


def _feature(data: memoryview, begin: int, end: int) -> np.ndarray | Blobs:
    """Read a ``Feature``: field 1 holds a BytesList, 2 a FloatList, 3 an Int64List, each with its values in field 1."""
    for kind, _, first, last in _fields(data, begin, end):
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
            while wire == BYTES and a < b:
                number, a = _varint(data, a)
                numbers.append(number)
        return np.array(numbers, dtype=np.uint64).astype(np.int64)
    return np.empty(0, dtype=np.float32)


def _fields(data: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield field number, wire type, begin and end of the value of each field of a message."""
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
            raise ValueError(f"byte {position} has the wire type {wire}, which no Example has")
        if position + length > end:
            raise ValueError(f"the field at byte {position} is longer than its message")
        yield number, wire, position, position + length
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read a number with seven bits per byte, lowest first; return it and the position after it."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
