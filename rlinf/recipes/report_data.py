"""Data for the report on a recipe's run or an evaluation on questions."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rlinf.errors import CheckpointError
from rlinf.evaluation.compare import Pairs
from rlinf.evaluation.result import Success
from rlinf.files import Json, parse_json_lines
from rlinf.recipes.questions_result import QuestionsResult, holds_questions
from rlinf.report.run_data import FolderData, results_of, saved_texts, traces_of
from rlinf.run_folder import COMPARISON_FILE, EVALUATIONS_FOLDER, RESULT_FILE, SAMPLES_FOLDER, SUMMARY_FILE
from rlinf.tracking.tracker import read_metrics

TOKEN_METRICS = ("throughput/tokens_per_s", "eval/loss", "eval/reward_mean")
"""Metrics that are only logged by recipes."""


@dataclass
class Samples:
    """Completions from one validation.

    Attributes:
        rows: For each completion, ``prompt``, ``completion``, ``reference``, ``reward``, ``rewards`` (by part), ``num_tokens``, and the
            prompt's ``images`` as paths relative to the folder.
    """

    step: int
    rows: list[Json]

    @property
    def name(self) -> str:
        """When the validation took place, as text."""
        return f"after step {self.step}" if self.step else "before training"

    def parts(self) -> dict[str, list[float]]:
        """Map each reward's name to its values."""
        return {name: [row["rewards"][name] for row in self.rows] for name in self.rows[0]["rewards"]}

    def successes(self) -> dict[str, Success]:
        """Map each binary reward's name to its success counts."""
        counted = {name: values for name, values in self.parts().items() if set(values) <= {0, 1}}
        return {name: Success(int(sum(values)), len(values)) for name, values in counted.items()}


@dataclass
class TokenRun(FolderData):
    """Content of a recipe's run folder; each of its ``lines`` has ``steps``, the number of optimiser steps so far.

    Attributes:
        samples: Completions from the validations, oldest first.
        results: Results on questions by name, from ``result.json`` or from the files below ``eval/``.
        checkpoints: Maps each checkpoint folder, relative to the run, to its size in bytes.
        best: The best checkpoint of a finished run, see ``best_text``.
    """

    samples: list[Samples] = field(default_factory=list)
    results: dict[str, QuestionsResult] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    best: str | None = None

    @cached_property
    def before_and_after(self) -> tuple[Samples, Samples] | None:
        """The first and the last validation if they have the same prompts, otherwise None."""
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0], self.samples[-1]
        same = [row["prompt"] for row in first.rows] == [row["prompt"] for row in last.rows]
        return (first, last) if same else None

    def paired(self, part: str) -> Pairs | None:
        """Return the pairs of a binary reward before (a) and after (b) training; None unless both exist."""
        if self.before_and_after is None:
            return None
        columns = [samples.parts().get(part, []) for samples in self.before_and_after]
        if not all(column and set(column) <= {0, 1} for column in columns):
            return None
        pairs = list(zip(*columns, strict=True))
        return Pairs(*(pairs.count(cell) for cell in ((1, 1), (1, 0), (0, 1), (0, 0))))


def is_token_folder(folder: str | os.PathLike) -> bool:
    """Return whether a folder belongs to a recipe's run or an evaluation on questions."""
    folder = Path(folder)
    if (folder / RESULT_FILE).is_file():
        return holds_questions(folder / RESULT_FILE)
    if (folder / SAMPLES_FOLDER).is_dir():
        return True
    return any(name in line for line in read_metrics(folder) for name in TOKEN_METRICS)


def read_token_run(folder: str | os.PathLike) -> TokenRun:
    """Read a folder; raise CheckpointError if it has neither metrics nor a result."""
    folder = Path(folder)
    run = TokenRun(folder, lines=_with_steps(read_metrics(folder)), traces=traces_of(folder))
    for path in sorted(folder.glob(f"{SAMPLES_FOLDER}/step_*.jsonl"), key=_step_of):
        rows = parse_json_lines(path.read_bytes(), path)
        if rows:
            run.samples.append(Samples(_step_of(path), rows))
    for path in results_of(folder):
        if holds_questions(path):
            name = path.parent.name if path.parent != folder else ""
            run.results[name] = QuestionsResult.from_json(path)
    if not run.lines and not run.results:
        raise CheckpointError(f"{folder} is not a run folder: it has neither metrics.jsonl nor result.json.")
    compared = [folder / COMPARISON_FILE, *folder.glob(f"{EVALUATIONS_FOLDER}/*/{COMPARISON_FILE}")]
    compared = [path for path in compared if path.is_file()]
    if compared:  # the newest evaluation that was compared with a different model
        newest = max(compared, key=lambda path: path.stat().st_mtime)
        run.comparison = json.loads(newest.read_text(encoding="utf-8"))
    if (folder / SUMMARY_FILE).is_file():
        best = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")).get("best_validation")
        run.best = None if best is None else best_text(best)
    run.config, run.manifest = saved_texts(folder, sorted(folder.glob("safetensors/*")))
    saved = [*folder.glob("checkpoints/*/"), *folder.glob("safetensors/*/")]
    saved = [path for path in saved if not path.name.startswith(".") and not path.is_symlink()]
    for path in sorted(saved, key=lambda path: (path.parent.name, _step_of(path))):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        run.checkpoints[path.relative_to(folder).as_posix()] = size
    return run


def best_text(best: Json) -> str:
    """Return the name of a run's best checkpoint (``best_validation``) and, if several competed, a note on its score."""
    count = best.get("num_candidates", 1)
    note = f" (its score {best['score']:.4g} chose it among {count}, so on average it is too high)" if count > 1 else ""
    return f"{best['checkpoint']}{note}"


def _step_of(path: Path) -> int:
    """Return the number in ``step_<number>``; for any other name, return a very large number, so that it is sorted last."""
    match = re.fullmatch(r"step_(\d+)", path.name.removesuffix(".jsonl"))
    return int(match[1]) if match else 2**63


def _with_steps(lines: Sequence[Json]) -> list[Json]:
    """Add ``steps`` to the lines; a validation has the value from the update before it, or 0."""
    extended, steps = [], 0
    for line in lines:
        steps = line["step"] + 1 if "time/update_s" in line else steps
        extended.append({**line, "steps": steps})
    return extended
