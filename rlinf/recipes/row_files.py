"""Rows of JSON, JSON-lines and CSV files, and their values as text: what the file says, without guessed types."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec

from rlinf.files import TextFileError, decode_text, parse_json
from rlinf.recipes.samples import BadRowError

KINDS = {".csv": ",", ".json": "json", ".jsonl": "json", ".tsv": "\t"}
"""Kinds of files by their suffixes: ``json`` (a list of rows, or one on each line), or what separates the columns of a table."""
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,300})(\.\d+)?([eE][-+]?\d+)?", re.ASCII)


class WrittenNumber(float):
    """A number that is not an integer, with the text of its file: 1.10 as text is "1.10"."""

    text: str

    def __new__(cls, text: Any) -> WrittenNumber:
        number = super().__new__(cls, text)
        number.text = str(text)
        return number

    def __str__(self) -> str:
        return self.text


class WrittenMap(dict):
    """A JSON object. Its nulls are in the file; nulls of tables may come from the keys of other rows."""


@dataclass
class FileRows(Sequence):
    """Rows of files. A line of a JSON-lines file is parsed when it is read: parsed rows take several times the memory."""

    entries: list[Any]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        entry = self.entries[index]
        if isinstance(index, slice):
            return FileRows(entry)
        return _parsed(entry) if isinstance(entry, bytes) else entry


def read_rows(files: Sequence[str | Path], kind: str) -> FileRows:
    """Return the rows of files or addresses, all of which are parsed once.

    Raise TextFileError for a file that is not UTF-8, and for a line without a row.

    Args:
        kind: Of all, a value of ``KINDS``.
    """
    return FileRows([entry for file in files for entry, _ in _entries(file, kind)])


def stream_rows(files: Sequence[str | Path], kind: str) -> Iterator[Any]:
    """Yield the rows of files while they are read; see ``read_rows``."""
    return (row for file in files for _, row in _entries(file, kind))


def is_plain(path: str | Path) -> bool:
    """Return whether a path is a file on this machine, and not compressed."""
    return Path(path).is_file() and Path(path).suffix in ("", *KINDS)


def _entries(path: str | Path, kind: str) -> Iterator[tuple[Any, Any]]:
    """Yield each row twice: as it is kept, which is a line where there are lines, and parsed."""
    with open(path, "rb") if is_plain(path) else fsspec.open(str(path), "rb", compression="infer") as file:
        if kind != "json":
            yield from ((row, row) for row in _table(file.read(), path, kind))
            return
        for number, line in enumerate(file, start=1):
            if number == 1 and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                yield from ((row, row) for row in _parsed(line + file.read(), path))
            elif line.removeprefix(codecs.BOM_UTF8).strip():
                yield line, _parsed(line, path, number)


def _parsed(content: bytes, path: str | Path = "", line: int = 1) -> Any:
    return parse_json(content, path, line, object_hook=WrittenMap, parse_float=WrittenNumber)


def _table(content: bytes, path: str | Path, separator: str) -> list[dict[str, Any]]:
    """Return rows by the names of the first line; an empty field is null, and a number as JSON has it is a number."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(decode_text(content, path), newline=""), delimiter=separator, strict=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise TextFileError(f"Line {reader.line_num} of {path} is not a row ({error}). Fix the line") from None
    names = lines[0][1] if lines else []
    for number, fields in lines:
        if len(fields) != len(set(names)):
            raise TextFileError(f"Line {number} of {path} has {len(fields)} fields, and line 1 has {len(set(names))} different names; "
                                f"required: one each. Put texts with {separator!r} in quotes")  # fmt: skip
    return [dict(zip(names, map(_field, fields), strict=True)) for _, fields in lines[1:]]


def _field(text: str) -> Any:
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text or None
    return WrittenNumber(text) if number[2] or number[3] or text == "-0" else int(text)


def as_text(value: Any, what: str) -> str:
    """Return a value as the text that its file has for it; raise BadRowError for a list, a map or a time stamp.

    Args:
        what: Whose value it is, for messages.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float, Decimal)) and value == value:
        return str(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    raise BadRowError(f"{what} is {repr(value)[:80]}; required: a text or a number.")


def scalar_text(value: Any, what: str) -> Any:
    """Return a list or a map as it is, and any other value ``as_text``."""
    return value if isinstance(value, (list, tuple, Mapping)) else as_text(value, what)


class AnyOf(str):
    """Several right answers, ``answers``, shown as one text; a completion may give any of them."""

    answers: list[str]


def any_of(answers: Sequence[str]) -> AnyOf:
    """Return right answers as ``AnyOf``."""
    text = AnyOf(" or ".join(answers))
    text.answers = list(answers)
    return text


def as_answer(value: Any, what: str) -> str:
    """Return a right answer as text, or a list of them as ``AnyOf``; raise BadRowError for others."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and len(value):
        return any_of([as_text(answer, f"an answer of {what}") for answer in value])
    return as_text(value, what)


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls that tables add, so that all rows have the same keys; nulls of JSON files stay."""
    if isinstance(value, Mapping) and not isinstance(value, WrittenMap):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value
