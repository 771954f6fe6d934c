"""Save results while an evaluation is running, so that an interrupted evaluation can resume."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Self

from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import Json, lock, naming, parse_json_lines
from rlinf.run_folder import PARTIAL_FILE
from rlinf.types import EpisodeResult, EpisodeSpec


def partial_files(folder: Path) -> list[Path]:
    """Return the files of an unfinished evaluation: ``PARTIAL_FILE``, written by rank 0, and one file for each further rank."""
    return sorted(folder.glob(f"{Path(PARTIAL_FILE).stem}*.jsonl"))


def num_saved(folder: Path) -> int:
    """Return how many results of an unfinished evaluation are saved."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in partial_files(folder))


class PartialResults:
    """A file with one line of conditions and one line per finished episode of this rank.

    As a context manager, rank 0 deletes the files of all ranks on success. Raise ConfigError if a file was written under different
    conditions or is open in a different process, and CheckpointError if it is damaged.

    Attributes:
        conditions: Everything that affects the results, as JSON values.
        known: On rank 0, the results of earlier processes, which may have used any number of ranks.
        earlier_s: Time these processes ran until their last result, in seconds.
    """

    def __init__(self, folder: Path, conditions: Json, rank: int = 0) -> None:
        name = Path(PARTIAL_FILE)
        self.rank, self.path = rank, folder / (f"{name.stem}.{rank}{name.suffix}" if rank else PARTIAL_FILE)
        self.conditions = json.loads(json.dumps(conditions, default=str))
        self.known: list[EpisodeResult] = []
        self.earlier_s = 0.0
        self._start = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")
        try:
            busy = f"A different evaluation is writing to {self.path}. Wait until it has finished"
            lock(self._file, f"{busy}, or set output_dir=<new folder>")
            if rank == 0:
                for path in partial_files(folder):
                    self._read(path)
            content = self.path.read_bytes()
            os.truncate(self.path, content.rfind(b"\n") + 1)  # remove an incomplete line left by a killed process
        except BaseException:
            self._file.close()
            raise
        self.num_results = len(self.known)
        if not self.path.stat().st_size:
            self._write(self.conditions)

    def add(self, result: EpisodeResult) -> None:
        """Append a finished episode's result."""
        self._write({**asdict(result), "wall_s": self.earlier_s + time.monotonic() - self._start})
        self.num_results += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        with self._file:
            if self.rank == 0 and error_type is None:
                for path in partial_files(self.path.parent):
                    path.unlink()
            elif error_type is not None and self.path.read_bytes().count(b"\n") <= 1:  # contains only the conditions
                self.path.unlink()

    def _write(self, values: Json) -> None:
        with naming(self.path):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def _read(self, path: Path) -> None:
        """Read the complete lines from a file written by an earlier process."""
        content = path.read_bytes()
        try:
            # A killed process may have left an incomplete line at the end.
            lines = parse_json_lines(content[: content.rfind(b"\n") + 1], path)
            saved = lines[0] if lines else self.conditions
            seconds = [line.pop("wall_s") for line in lines[1:]]
            results = [EpisodeResult(**{**line, "spec": EpisodeSpec(**line["spec"])}) for line in lines[1:]]
            differ = sorted(key for key in {**saved, **self.conditions} if saved.get(key) != self.conditions.get(key))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error}). Delete it, or set output_dir=<new folder>"
            ) from error
        if differ:
            raise ConfigError(
                f"{path} contains {len(results)} results of an interrupted evaluation under different conditions "
                f"({', '.join(differ)}). Restore them to resume, delete the file, or set output_dir=<new folder>"
            )
        self.known += results
        self.earlier_s = max([self.earlier_s, *seconds])
