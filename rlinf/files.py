"""Atomic writes, locks, hashes, and the ``latest`` link to the newest run."""

import codecs
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlinf.errors import ConfigError
from rlinf.run_folder import LATEST, LOCK_FILE

Json = dict[str, Any]
"""A JSON object; values are numbers, texts, flags, null, lists and further objects."""

logger = logging.getLogger("rlinf")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
FULL_BELOW = 2**20
"""Free space in bytes below which an unexplained write error is attributed to a full disk."""


class TextFileError(ConfigError):
    """A text file is not valid UTF-8 or JSON. The message names the file and the line."""


def decode_text(content: bytes, path: str | os.PathLike, line: int = 1) -> str:
    """Decode a UTF-8 file, or its part starting at ``line``, and remove any byte order mark; raise TextFileError if invalid."""
    try:
        return (content.removeprefix(codecs.BOM_UTF8) if line == 1 else content).decode("utf-8")
    except UnicodeDecodeError as error:
        line, wrong = line + content.count(b"\n", 0, error.start), error.object[error.start]
        raise TextFileError(
            f"Line {line} of {path} is not UTF-8 (byte 0x{wrong:02x}). Save the file as UTF-8"
        ) from None


def parse_json(content: bytes, path: str | os.PathLike, line: int = 1, **options: Any) -> Any:
    """Parse a JSON file, or its part starting at ``line``; raise TextFileError if it is invalid."""
    text = decode_text(content, path, line).rstrip()
    try:
        value = json.loads(text, **options)
        if _SURROGATE.search(text):
            # Half a surrogate pair cannot be written as UTF-8 or tokenised. Fail here, where the line number is known.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        line, reason = line + getattr(error, "lineno", 1) - 1, getattr(error, "msg", error)
        raise TextFileError(f"Line {line} of {path} is not JSON ({reason}). Fix or delete the line") from None


def parse_json_lines(content: bytes, path: str | os.PathLike) -> list[Any]:
    """Parse the values in a JSON-lines file; raise TextFileError like ``parse_json``."""
    # Do not use `splitlines`, which also splits at other characters such as carriage returns.
    return [parse_json(line, path, n) for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]


def write_text(path: str | os.PathLike, text: str) -> Path:
    """Write a UTF-8 text file atomically (see ``write_bytes``), with half surrogate pairs as JSON escapes."""
    return write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | os.PathLike, content: bytes) -> Path:
    """Write ``content`` to a temporary file next to ``path``, then rename it. Errors are raised as by ``naming``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    with naming(path):
        partial.write_bytes(content)
    os.replace(partial, path)
    return path


def replace_folder(partial: Path, folder: Path) -> None:
    """Replace a folder with a completed one."""
    # Rename twice instead of deleting first, so that a process killed here leaves at least one complete folder.
    former = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        os.rename(folder, former)
    os.rename(partial, folder)
    shutil.rmtree(former, ignore_errors=True)


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Convert write errors (``OSError`` or torch's ``RuntimeError``) to an ``OSError`` with the path and free space."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        named = write_error(error, path)
        if named is None:
            raise
        raise named from error


def write_error(error: BaseException, path: str | os.PathLike) -> OSError | None:
    """Return a write error with the path and free space, or None if ``error`` is not a write error."""
    path = getattr(error, "filename", None) or path
    existing = next(place for place in (Path(path).absolute(), *Path(path).absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    by_torch = "inline_container" in str(error) or "PytorchStreamWriter" in str(error)
    if isinstance(error, OSError) and error.errno is not None:
        number = error.errno
    elif isinstance(error, OSError) or by_torch:
        full = free < FULL_BELOW or "No space left" in str(error)
        number = errno.ENOSPC if full else errno.EIO
    else:
        return None
    return OSError(number, f"{os.strerror(number)} ({free / 2**20:,.1f} MiB free)", str(path))


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder until the block or this process ends; raise ConfigError if a different run is writing there.

    If the folder is created here and the block does not add files to it, it is removed again.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "a+", encoding="utf-8") as file:
        file.seek(0)
        busy = f"A different run is writing to {folder} ({file.read().strip() or 'it has just started'})"
        lock(file, f"{busy}. Wait until it ends, or set output_dir=<another folder>")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            # Failure to remove the folder must not hide an error raised in the block.
            with suppress(OSError):
                if made and os.listdir(folder) == [LOCK_FILE]:
                    (folder / LOCK_FILE).unlink()
                    # Remove the innermost folder first. The first folder that is not empty raises an error, which ends the loop.
                    for place in made:
                        place.rmdir()


def lock(file: IO[str], busy: str | None) -> None:
    """Lock an open file until it is closed. If it is already locked, raise ``ConfigError(busy)``, or wait if ``busy`` is None."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise ConfigError(busy) from error
    except OSError as error:
        # Some cluster file systems do not support locks. Log a warning instead of preventing runs there.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        logger.warning(
            "%s cannot be locked (%s). Do not start a second run that writes there", file.name, error.strerror
        )


def sha256_of(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file as a hexadecimal string."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mark_latest(folder: str | os.PathLike) -> None:
    """Atomically make the adjacent ``latest`` link point to ``folder``; where links are unsupported, it is a text file.

    A failure, for example because ``latest`` is a folder, is logged as a warning.
    """
    folder = Path(folder)
    latest, partial = folder.with_name(LATEST), folder.with_name(f".{LATEST}.{os.getpid()}.tmp")
    try:
        partial.unlink(missing_ok=True)
        try:
            os.symlink(folder.name, partial)
        except (OSError, NotImplementedError):
            partial.write_text(folder.name, encoding="utf-8")
        os.replace(partial, latest)
    except OSError as error:
        logger.warning("%s does not point to the newest run, %s: %s", latest, folder.name, error)
    finally:
        partial.unlink(missing_ok=True)


def follow_latest(path: str | os.PathLike) -> Path:
    """Resolve ``~`` and each ``latest`` (a link, or a text file from ``mark_latest``) in ``path``."""
    resolved = Path()
    for part in Path(path).expanduser().parts:
        place = resolved / part
        if part == LATEST and place.is_symlink():
            place = resolved / os.readlink(place)
        elif part == LATEST and place.is_file():
            place = resolved / place.read_text(encoding="utf-8").strip()
        resolved = place
    return resolved
