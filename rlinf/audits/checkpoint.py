"""Save the finished conditions of a running audit, so that an interrupted audit can resume."""

import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rlinf.checkpoints.folders import flat
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.disturbed_env import EpisodeRecord
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import write_bytes, write_text
from rlinf.manifest import Mismatch
from rlinf.run_folder import CONDITIONS_FILE, PARTIAL_AUDIT, RECORDS_FILE
from rlinf.types import EpisodeSpec

SHOWN = 5
"""Maximum number of differences listed in an error."""


def num_saved(folder: Path) -> int:
    """Return how many conditions of an unfinished audit are saved."""
    return sum(path.name != CONDITIONS_FILE for path in (folder / PARTIAL_AUDIT).glob("*.json"))


class AuditCheckpoint:
    """The folder ``audit.partial``, with every setting that affects the results, the finished conditions and the records of ``clean``.

    Raise ConfigError if the folder's policy or settings differ, and CheckpointError if it is damaged.
    """

    def __init__(self, folder: Path, policy: str, conditions: Mapping[str, Any]) -> None:
        self.folder = folder / PARTIAL_AUDIT
        self.present = json.loads(json.dumps({"policy": policy, "conditions": flat(conditions)}, default=str))
        self.num_known = num_saved(folder)
        self.path = self.folder / CONDITIONS_FILE
        if self.path.exists():
            self._check()

    def result(self, key: str, specs: Sequence[EpisodeSpec]) -> EvaluationResult | None:
        """Return a condition's saved result, or None; raise CheckpointError if it is damaged or contains different episodes."""
        path = self._file(key)
        if not path.exists():
            return None
        try:
            evaluation = EvaluationResult.from_json(path)
        except CheckpointError as error:
            raise self._damaged(path, str(error)) from error
        if [result.spec for result in evaluation.results] != list(specs):
            raise self._damaged(path, "its episodes differ from this audit's")
        return evaluation

    def add(self, key: str, result: EvaluationResult) -> None:
        """Save a condition's result."""
        if not self.path.exists():
            write_text(self.path, json.dumps(self.present, indent=1))
        result.to_json(self._file(key))

    def add_records(self, records: Mapping[EpisodeSpec, EpisodeRecord], specs: Sequence[EpisodeSpec]) -> None:
        """Save the episode records, ordered as in ``specs``."""
        rows = [records[spec] for spec in specs]
        arrays: dict[str, np.ndarray] = {
            f"image {name}": np.stack([row.images[name] for row in rows]) for name in rows[0].images
        }
        if rows[0].state is not None:
            arrays["state"] = np.stack([row.state for row in rows])
        arrays["instruction"] = np.array([row.instruction for row in rows])
        arrays["num_actions"] = np.array([len(row.actions) for row in rows])
        arrays["actions"] = np.array([action for row in rows for action in row.actions])
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_bytes(self.folder / RECORDS_FILE, content.getvalue())

    def records(self, specs: Sequence[EpisodeSpec]) -> dict[EpisodeSpec, EpisodeRecord]:
        """Read the records saved by ``add_records``; raise CheckpointError if the file is missing or damaged."""
        path = self.folder / RECORDS_FILE
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            images = {name.removeprefix("image "): arrays[name] for name in arrays if name.startswith("image ")}
            actions = np.split(arrays["actions"], np.cumsum(arrays["num_actions"])[:-1])
            return {
                spec: EpisodeRecord(
                    {name: image[row] for name, image in images.items()},
                    arrays["state"][row] if "state" in arrays else None,
                    str(arrays["instruction"][row]),
                    list(actions[row]),
                )
                for row, spec in enumerate(specs)
            }
        except (OSError, ValueError, KeyError, IndexError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise self._damaged(path, f"{type(error).__name__}: {error}") from error

    def remove(self) -> None:
        """Delete the folder; called once the audit has been written."""
        shutil.rmtree(self.folder)

    def _file(self, key: str) -> Path:
        return self.folder / f"{quote(key, safe='')}.json"  # a camera may have any name

    def _check(self) -> None:
        """Raise ConfigError if the folder belongs to a different audit."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            before, now = dict(saved["conditions"]), self.present["conditions"]
            policy = saved["policy"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(self.path, f"{type(error).__name__}: {error}") from error
        names = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
        if names:
            content = f"{self.folder} contains {self.num_known} conditions of an interrupted audit of {policy}"
            differences = "; ".join(
                str(Mismatch(name, before.get(name), now.get(name), True)) for name in names[:SHOWN]
            )
            more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ConfigError(
                f"{content}, but this audit is of {self.present['policy']} and differs: {differences}{more}. Restore these to resume, "
                "delete the folder, or set output_dir=<new folder>"
            )

    def _damaged(self, path: Path, why: str) -> CheckpointError:
        return CheckpointError(
            f"{path}, saved by an interrupted audit, cannot be read ({why}). Delete {self.folder}, or set output_dir=<new folder>"
        )
