"""Results of a language model's evaluation on a file of questions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.evaluation.result import Success, success_table
from rlinf.files import write_text


@dataclass(frozen=True)
class Answer:
    """A model's answer to one question.

    Attributes:
        category: Subset, by which accuracies are listed.
        found: The answer extracted from the completion, or None.
        is_cut: The completion was truncated at the maximum length.
        images: Thumbnails of the question's first images, relative to the folder of the result.
    """

    id: str
    category: str
    prompt: str
    completion: str
    expected: str
    found: str | None
    is_correct: bool
    num_tokens: int
    is_cut: bool
    images: list[str] = field(default_factory=list)


@dataclass
class AnswerResult:
    """Answers to the questions of a file, in its order.

    Attributes:
        answer_type: How answers are extracted.
        temperature: Of the sampling; 0: the most likely tokens.
    """

    answers: list[Answer]
    file: str = ""
    answer_type: str = ""
    temperature: float = 0.0
    seed: int = 0
    wall_s: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def total(self) -> Success:
        """Correct answers of all categories."""
        return _count(self.answers)

    @property
    def per_category(self) -> dict[str, Success]:
        """Correct answers by category, in order of first appearance."""
        categories: dict[str, list[Answer]] = {}
        for answer in self.answers:
            categories.setdefault(answer.category, []).append(answer)
        return {category: _count(answers) for category, answers in categories.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = asdict(self)
        answers = values.pop("answers")
        per_category = {category: _as_dict(count) for category, count in self.per_category.items()}
        return {**_as_dict(self.total), "per_category": per_category, **values, "answers": answers}

    def to_json(self, path: str | os.PathLike) -> Path:
        """Write ``as_dict()`` to ``path``, atomically."""
        return write_text(path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False))

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> AnswerResult:
        """Read a file of ``to_json``; raise CheckpointError if it is not one."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            answers = [Answer(**row) for row in data["answers"]]
            names = ("file", "answer_type", "temperature", "seed", "wall_s", "warnings")
            return cls(answers, **{name: data[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a result on questions ({type(error).__name__}: {error}).") from error

    def table(self) -> str:
        """Return a text table: one line for each category and the total, with intervals."""
        return success_table([*self.per_category.items(), ("total", self.total)], "category", "correct")


def holds_answers(path: str | os.PathLike) -> bool:
    """Return whether a ``result.json`` contains answers, not episodes."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "answers" in data


def _count(answers: Sequence[Answer]) -> Success:
    return Success(sum(answer.is_correct for answer in answers), len(answers))


def _as_dict(count: Success) -> dict[str, Any]:
    accuracy = count.success_rate if count.episodes else None
    counts = {"correct": count.successes, "questions": count.episodes}
    return {"accuracy": accuracy, **counts, "interval": list(count.interval)}
