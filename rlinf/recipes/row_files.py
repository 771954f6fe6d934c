"""Read rows from JSON, JSON Lines and CSV files without type inference, and convert values to their text in the file."""

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
from rlinf.recipes.samples import BadRowError, Row

KINDS = {".csv": ",", ".json": "json", ".jsonl": "json", ".tsv": "\t"}
"""File kinds by suffix: ``json`` (a list of rows, or one row per line), or a table's column separator."""
METADATA = ("metadata.csv", "metadata.jsonl")
"""Metadata files in an image folder, whose column ``file_name`` refers to the image."""
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,300})(\.\d+)?([eE][-+]?\d+)?", re.ASCII)


class WrittenNumber(float):
    """Float that remembers its text in the file, so that ``str`` of 1.10 is "1.10"."""

    def __init__(self, text: Any) -> None:
        self.text = str(text)

    def __str__(self) -> str:
        return self.text


class WrittenMap(dict):
    """JSON object whose nulls are actual values in the file, whereas tables fill in missing keys with nulls."""


def stream_rows(files: Sequence[str | Path], kind: str) -> Iterator[Any]:
    """Yield rows from files or URLs of a kind in ``KINDS``; raise TextFileError for invalid UTF-8 or an invalid line."""
    for path in files:
        with open(path, "rb") if is_plain(path) else fsspec.open(str(path), "rb", compression="infer") as file:
            rows = _json(file, path) if kind == "json" else _table(file.read(), path, kind)
            is_metadata = Path(path).name in METADATA
            yield from (_with_images(row, Path(path).parent) if is_metadata else row for row in rows)


def _json(file: IO[bytes], path: str | Path) -> Iterator[Any]:
    parse, is_first = partial(parse_json, object_hook=WrittenMap, parse_float=WrittenNumber), True
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        # A file that starts with a list is a single JSON document instead of one row per line.
        if is_first and text.startswith(b"["):
            yield from parse(line + file.read(), path, number)
        elif text:
            yield parse(line, path, number)
        is_first = is_first and not text


def _with_images(row: Any, folder: Path) -> Any:
    """Replace ``file_name`` columns in an image folder's metadata with images, using the column names of ``datasets``."""
    if not isinstance(row, Mapping):
        return row
    result: Any = type(row)()
    for key, value in row.items():
        if match := re.fullmatch("(?:(.+)_)?file_name(s?)", key):
            names = value if isinstance(value, list) else [value]
            images = [{"bytes": None, "path": str(folder / str(name))} for name in names if name]
            key = match[1] or f"image{match[2]}"
            value = images if match[2] else (images or [None])[0]
        result[key] = value
    return result


def is_plain(path: str | Path) -> bool:
    """Return whether a path is an uncompressed local file."""
    return Path(path).is_file() and Path(path).suffix in ("", *KINDS)


def _table(content: bytes, path: str | Path, separator: str) -> list[Row]:
    """Parse a table with a header line. Empty fields become null, and fields in JSON number syntax become numbers."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(decode_text(content, path), newline=""), delimiter=separator, strict=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise TextFileError(f"Line {reader.line_num} of {path} is not a valid row ({error}). Fix the line") from None
    names = lines[0][1] if lines else []
    for number, fields in lines:
        if len(fields) != len(set(names)):
            raise TextFileError(f"Line {number} of {path} has {len(fields)} fields, but line 1 has {len(set(names))} distinct names; "
                                f"expected one field per name. Quote texts that contain {separator!r}")  # fmt: skip
    return [dict(zip(names, map(_field, fields), strict=True)) for _, fields in lines[1:]]


def _field(text: str) -> Any:
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text or None
    return WrittenNumber(text) if number[2] or number[3] or text == "-0" else int(text)


def as_text(value: object, what: str) -> str:
    """Return a value as its text in the file; raise BadRowError for a list, map or timestamp. ``what`` names the value in messages."""
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy scalar or array
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    is_date = isinstance(value, date) and not isinstance(value, datetime)
    if is_date or (isinstance(value, (int, float, Decimal)) and value == value):
        return str(value)
    raise BadRowError(f"{what} is {repr(value)[:80]}; expected a text or a number.")


def scalar_text(value: object, what: str) -> Any:
    """Return a list or map unchanged, and a scalar converted by ``as_text``."""
    return value if isinstance(value, (list, tuple, Mapping)) else as_text(value, what)


class AnyOf(str):
    """Several accepted ``references``, printed as a single text; a completion may match any of them."""

    references: Sequence[str] = ()


def as_reference(value: object, what: str) -> Any:
    """Return a reference as text, a list of references as ``AnyOf``, and None unchanged; otherwise raise BadRowError."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and value:
        references = [as_text(item, f"an item of {what}") for item in value]
        value = AnyOf(" or ".join(references))
        value.references = references
    return None if value is None else as_text(value, what)


def without_nulls(value: object) -> Any:
    """Remove nulls that tables fill in for missing keys, but leave nulls from JSON files."""
    if isinstance(value, Mapping) and not isinstance(value, WrittenMap):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value
