"""Rows of JSON, JSON-lines and CSV files, and their values as text: what the file says, without guessed types."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import IO, Any

import fsspec

from rlinf.files import TextFileError, decode_text, parse_json
from rlinf.recipes.samples import BadRowError

KINDS = {".csv": ",", ".json": "json", ".jsonl": "json", ".tsv": "\t"}
"""Kinds of files by their suffixes: ``json`` (a list of rows, or one on each line), or what separates the columns of a table."""
METADATA = ("metadata.csv", "metadata.jsonl")
"""What each image of a folder of images is about; ``file_name`` names it."""
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,300})(\.\d+)?([eE][-+]?\d+)?", re.ASCII)


class WrittenNumber(float):
    """A number that is not an integer, made of the text of its file, which it keeps: ``str`` of 1.10 is "1.10"."""

    def __init__(self, text: Any) -> None:
        self.text = str(text)

    def __str__(self) -> str:
        return self.text


class WrittenMap(dict):
    """A JSON object. Its nulls are in the file; nulls of tables may come from the keys of other rows."""


def stream_rows(files: Sequence[str | Path], kind: str) -> Iterator[Any]:
    """Yield the rows of files or addresses of a kind in ``KINDS``.

    Raise TextFileError for a file that is not UTF-8, and for a line without a row.
    """
    for path in files:
        with open(path, "rb") if is_plain(path) else fsspec.open(str(path), "rb", compression="infer") as file:
            rows = _json(file, path) if kind == "json" else _table(file.read(), path, kind)
            is_metadata = Path(path).name in METADATA
            yield from (_with_images(row, Path(path).parent) if is_metadata else row for row in rows)


def _json(file: IO[bytes], path: str | Path) -> Iterator[Any]:
    parse, is_first = partial(parse_json, object_hook=WrittenMap, parse_float=WrittenNumber), True
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        if is_first and text.startswith(b"["):
            yield from parse(line + file.read(), path, number)
        elif text:
            yield parse(line, path, number)
        is_first = is_first and not text


def _with_images(row: Any, folder: Path) -> Any:
    """Return a row about images of a folder with their places, in the columns that ``datasets`` makes of ``file_name`` and the like."""
    if not isinstance(row, Mapping):
        return row
    placed: Any = type(row)()
    for key, value in row.items():
        if match := re.fullmatch("(?:(.+)_)?file_name(s?)", key):
            names = value if isinstance(value, list) else [value]
            images = [{"bytes": None, "path": str(folder / str(name))} for name in names if name]
            key = match[1] or f"image{match[2]}"
            value = images if match[2] else (images or [None])[0]
        placed[key] = value
    return placed


def is_plain(path: str | Path) -> bool:
    """Return whether a path is a file on this machine, and not compressed."""
    return Path(path).is_file() and Path(path).suffix in ("", *KINDS)


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
    """Return ``what``'s value as the text that its file has for it; raise BadRowError for a list, a map or a time stamp."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    is_date = isinstance(value, date) and not isinstance(value, datetime)
    if is_date or (isinstance(value, (int, float, Decimal)) and value == value):
        return str(value)
    raise BadRowError(f"{what} is {repr(value)[:80]}; required: a text or a number.")


def scalar_text(value: Any, what: str) -> Any:
    """Return a list or a map as it is, and any other value ``as_text``."""
    return value if isinstance(value, (list, tuple, Mapping)) else as_text(value, what)


class AnyOf(str):
    """Several right answers, ``answers``, shown as one text; a completion may give any of them."""

    answers: Sequence[str] = ()


def as_answer(value: Any, what: str) -> Any:
    """Return a right answer as text, a list of them as ``AnyOf``, and None as it is; raise BadRowError for others."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and value:
        answers = [as_text(answer, f"an answer of {what}") for answer in value]
        value = AnyOf(" or ".join(answers))
        value.answers = answers
    return None if value is None else as_text(value, what)


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls that tables add, so that all rows have the same keys; nulls of JSON files stay."""
    if isinstance(value, Mapping) and not isinstance(value, WrittenMap):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value
