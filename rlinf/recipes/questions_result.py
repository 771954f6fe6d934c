"""Results of evaluating a language model on a file of questions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlinf.errors import CheckpointError
from rlinf.evaluation.compare import Comparison, pair_outcomes
from rlinf.evaluation.result import Success, success_table
from rlinf.files import Json, write_text


@dataclass(frozen=True)
class QuestionResult:
    """A model's reply to a question.

    Attributes:
        category: Subset that the question belongs to; accuracies are listed per category.
        extracted: The final answer extracted from the completion, or None.
        is_truncated: Whether the completion was truncated at the maximum length.
        images: Thumbnails of the question's first images, relative to the folder of the result.
    """

    id: str
    category: str
    prompt: str
    completion: str
    expected: str
    extracted: str | None
    is_correct: bool
    num_tokens: int
    is_truncated: bool
    images: list[str] = field(default_factory=list)


@dataclass
class QuestionsResult:
    """Results for the questions in a file, in file order.

    Attributes:
        answer_type: How the final answer is extracted.
        temperature: Sampling temperature; 0: always take the most likely token.
    """

    results: list[QuestionResult]
    file: str = ""
    answer_type: str = ""
    temperature: float = 0.0
    seed: int = 0
    wall_s: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def total(self) -> Success:
        """Number of correct completions over all categories."""
        return _count(self.results)

    @property
    def per_category(self) -> dict[str, Success]:
        """Number of correct completions per category, in order of first appearance."""
        categories: dict[str, list[QuestionResult]] = {}
        for result in self.results:
            categories.setdefault(result.category, []).append(result)
        return {category: _count(results) for category, results in categories.items()}

    def as_dict(self) -> Json:
        """Return everything as JSON values."""
        values = asdict(self)
        results = values.pop("results")
        per_category = {category: _as_dict(count) for category, count in self.per_category.items()}
        return {**_as_dict(self.total), "per_category": per_category, **values, "results": results}

    def to_json(self, path: str | os.PathLike) -> Path:
        """Write ``as_dict()`` to ``path``, atomically."""
        return write_text(path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False))

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> QuestionsResult:
        """Read a file written by ``to_json``; raise CheckpointError for any other file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            results = [QuestionResult(**row) for row in data["results"]]
            names = ("file", "answer_type", "temperature", "seed", "wall_s", "warnings")
            return cls(results, **{name: data[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not a valid result of an evaluation on questions ({type(error).__name__}: {error})."
            ) from error

    def table(self) -> str:
        """Return a text table with one line per category and for the total, including intervals."""
        return success_table([*self.per_category.items(), ("total", self.total)], "category", "correct")


def holds_questions(path: str | os.PathLike) -> bool:
    """Return whether a ``result.json`` contains results of questions, not episodes."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "answer_type" in data


def _count(results: Sequence[QuestionResult]) -> Success:
    return Success(sum(result.is_correct for result in results), len(results))


def _as_dict(count: Success) -> Json:
    accuracy = count.success_rate if count.episodes else None
    counts = {"correct": count.successes, "questions": count.episodes}
    return {"accuracy": accuracy, **counts, "interval": list(count.interval)}


def compare_questions(
    result_a: QuestionsResult, result_b: QuestionsResult, allow_mismatch: Sequence[str] = ()
) -> Comparison:
    """Pair two results by question, in any order; with ``allow_mismatch=["questions"]``, compare only the common questions."""
    first, second = (
        {(scored.id, scored.prompt, scored.expected): (scored.category, scored.is_correct) for scored in result.results}
        for result in (result_a, result_b)
    )
    return pair_outcomes(first, second, "questions", "Evaluate both with the same questions=<file>", allow_mismatch)
