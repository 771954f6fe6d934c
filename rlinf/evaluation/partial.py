"""Keep the results of a running evaluation on disk, so that an interrupted one continues where it stopped."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import lock, naming
from rlinf.types import EpisodeResult, EpisodeSpec

PARTIAL_FILE = "result.partial.jsonl"


class PartialResults:
    """A file with one line of conditions and one line per finished episode.

    A context manager that deletes the file on success; on failure it keeps it and prints how to continue. An episode's
    result depends only on the conditions and its spec, so results of an earlier process under equal conditions are
    those that this process would compute.

    Attributes:
        conditions: Everything that results depend on, as JSON values.
        known: Results of earlier processes.
        earlier_s: Seconds that these processes took until their last result.

    Raises:
        ConfigError: The file holds results under other conditions, or another process is writing to it.
        CheckpointError: The file is damaged.
    """

    def __init__(self, folder: Path, conditions: dict[str, Any]) -> None:
        self.path = folder / PARTIAL_FILE
        self.conditions = json.loads(json.dumps(conditions, default=str))
        self.known: list[EpisodeResult] = []
        self.earlier_s = 0.0
        self._start = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")
        try:
            busy = f"Another evaluation is writing to {self.path}. Wait until it ends"
            lock(self._file, f"{busy}, or set output_dir=<another folder>")
            self._read()
        except BaseException:
            self._file.close()
            raise
        self.num_results = len(self.known)
        if not self.path.stat().st_size:
            self._write(self.conditions)

    def add(self, result: EpisodeResult) -> None:
        """Append a finished episode."""
        self._write({**asdict(result), "wall_s": self.earlier_s + time.monotonic() - self._start})
        self.num_results += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        with self._file:
            if error_type is None or not self.num_results:
                self.path.unlink()
                return
        kept = f"{self.num_results} results are kept in {self.path}"
        print(f"\n{kept}; the same command with output_dir={self.path.parent} continues", file=sys.stderr, flush=True)

    def _write(self, values: dict[str, Any]) -> None:
        with naming(self.path):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def _read(self) -> None:
        """Read the results of earlier processes; an unfinished last line is cut off."""
        content = self.path.read_bytes()
        num_whole = content.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in content[:num_whole].decode("utf-8").splitlines()]
            saved = lines[0] if lines else self.conditions
            seconds = [line.pop("wall_s") for line in lines[1:]]
            results = [EpisodeResult(**{**line, "spec": EpisodeSpec(**line["spec"])}) for line in lines[1:]]
            differ = sorted(key for key in {**saved, **self.conditions} if saved.get(key) != self.conditions.get(key))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({type(error).__name__}: {error}). Delete it, or set output_dir=<another folder>"
            ) from error
        if differ:
            raise ConfigError(
                f"{self.path} holds {len(results)} results of an interrupted evaluation under other conditions "
                f"({', '.join(differ)}). Restore them to continue, delete the file, or set output_dir=<another folder>"
            )
        if num_whole < len(content):
            os.truncate(self.path, num_whole)
        self.known, self.earlier_s = results, max(seconds, default=0.0)
