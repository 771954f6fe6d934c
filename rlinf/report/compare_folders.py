"""Compare two evaluations on disk: check that their conditions agree, and store the comparison."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.answers import AnswerResult, holds_answers
from rlinf.evaluation.compare import EPISODES, QUESTIONS, Comparison, compare, compare_answers
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import follow_latest, write_text
from rlinf.manifest import POLICY_FIELDS, Manifest, check_allowed, reject_mismatches
from rlinf.manifest import compare as compare_manifests
from rlinf.report.episode_player import copy_baseline
from rlinf.report.run_data import closing_tags
from rlinf.report.run_page import write_report
from rlinf.run_folder import COMPARISON_FILE, EVALUATIONS_FOLDER, MANIFEST_FILE, RESULT_FILE
from rlinf.tracking.tracker import read_metrics

logger = logging.getLogger("rlinf")

CONDITIONS = "conditions"
"""Name in ``evaluation.allow_mismatch`` that lets a manifest be missing."""
COMPARISON_NAMES = (EPISODES, QUESTIONS, CONDITIONS, "greedy", "temperature")
"""Names in ``evaluation.allow_mismatch`` that are not fields of a manifest."""


def compare_folders(
    folder_a: str | os.PathLike, folder_b: str | os.PathLike, allow_mismatch: Sequence[str] = ()
) -> Comparison:
    """Compare two evaluations on disk, write ``compare.json`` into the second folder and update its report.

    Raise CheckpointError if a folder holds no result or no manifest, ManifestMismatchError if the simulator, its
    settings or versions, or how actions were drawn, differ, and ConfigError for other lists or one folder twice.

    Args:
        folder_a, folder_b: Evaluation folders, their ``result.json``, or run folders, which stand for their closing
            evaluation. The first is the baseline.
        allow_mismatch: Fields of the manifest in which conditions may differ; fields of the policy always may. Also
            accepted: ``"episodes"`` or ``"questions"`` (different lists), ``"conditions"`` (a missing manifest), and ``"greedy"``,
            ``"temperature"`` and ``"seed"`` (how actions were drawn).
    """
    folders = [evaluation_folder(path) for path in (folder_a, folder_b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ConfigError(
            f"{folder_a} and {folder_b} are one evaluation. Run rlinf evaluate --compare <baseline folder> <other folder>"
        )
    mismatches = check_conditions(*folders, allow_mismatch)
    comparison = _compare(*(folder / RESULT_FILE for folder in folders), allow_mismatch)
    comparison.a, comparison.b = (str(path) for path in folders)
    comparison.mismatches = mismatches + comparison.mismatches
    write_text(folders[1] / COMPARISON_FILE, json.dumps(comparison.as_dict(), indent=1))
    copy_baseline(*folders)  # the page shows both side by side, and may be moved
    write_report(folders[1])
    return comparison


def _compare(file_a: Path, file_b: Path, allow_mismatch: Sequence[str]) -> Comparison:
    is_a, is_b = holds_answers(file_a), holds_answers(file_b)
    if is_a != is_b:
        kinds = [f"{file} holds {'questions' if one else 'episodes'}" for file, one in ((file_a, is_a), (file_b, is_b))]
        raise ConfigError(f"{' and '.join(kinds)}; required: two evaluations of one kind. Name another folder")
    if is_a:
        return compare_answers(AnswerResult.from_json(file_a), AnswerResult.from_json(file_b), allow_mismatch)
    return compare(EvaluationResult.from_json(file_a), EvaluationResult.from_json(file_b), allow_mismatch)


def evaluation_folder(path: str | os.PathLike) -> Path:
    """Return the folder of an evaluation, given itself, its ``result.json``, or the run that it closed."""
    folder = follow_latest(path)
    folder = folder.parent if folder.name == RESULT_FILE else folder
    if (folder / RESULT_FILE).is_file():
        return folder
    below = sorted(str(found.parent) for found in folder.glob(f"{EVALUATIONS_FOLDER}/*/{RESULT_FILE}"))
    for place in (folder / EVALUATIONS_FOLDER / tag for tag in closing_tags(read_metrics(folder) if below else [])):
        if (place / RESULT_FILE).is_file():
            return place
    hint = f"Name one of its evaluations: {', '.join(below)}" if below else "Name a folder that `rlinf evaluate` wrote"
    raise CheckpointError(f"{path} holds no {RESULT_FILE}, so there is nothing to compare. {hint}")


def check_conditions(folder_a: Path | Manifest, folder_b: Path | Manifest, allow_mismatch: Sequence[str]) -> list[str]:
    """Return the accepted differences between the conditions of two evaluations; policies may differ.

    A folder may be the manifest of an evaluation that has not run yet. Raise as ``compare_folders``.
    """
    places = [folder for folder in (folder_a, folder_b) if isinstance(folder, Path)]
    missing = [str(folder) for folder in places if not (folder / MANIFEST_FILE).is_file()]
    if missing:
        if CONDITIONS in allow_mismatch:
            return [f"{folder} has no {MANIFEST_FILE}; its conditions are unknown" for folder in missing]
        fix = f"Evaluate again, or set 'evaluation.allow_mismatch=[{','.join([*allow_mismatch, CONDITIONS])}]'"
        raise CheckpointError(f"{' and '.join(missing)} has no {MANIFEST_FILE}, so conditions are unknown. {fix}")
    first, second = (Manifest.load(one) if isinstance(one, Path) else one for one in (folder_a, folder_b))
    check_allowed(allow_mismatch, first, second, also=COMPARISON_NAMES)
    worlds = [one for one in compare_manifests(first, second) if one.field.partition(".")[0] not in POLICY_FIELDS]
    sentence = "The two evaluations ran under conditions that differ (first: saved, second: present)"
    return [str(one) for one in reject_mismatches(worlds, allow_mismatch, sentence) if one.must_match]
