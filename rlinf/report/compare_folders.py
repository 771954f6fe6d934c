"""Compare two evaluations on disk: check that they ran under the same conditions, and store the comparison."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.compare import EPISODES, Comparison, compare
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import follow_latest, write_text
from rlinf.manifest import POLICY_FIELDS, Manifest, check_allowed, reject_mismatches
from rlinf.manifest import compare as compare_manifests
from rlinf.report.episode_player import copy_baseline
from rlinf.report.run_data import closing_tags, kind_of
from rlinf.report.run_page import write_report
from rlinf.run_folder import COMPARISON_FILE, EVALUATIONS_FOLDER, MANIFEST_FILE, RESULT_FILE
from rlinf.tracking.tracker import read_metrics
from rlinf.wings import added

logger = logging.getLogger("rlinf")

CONDITIONS = "conditions"
"""Value of ``evaluation.allow_mismatch`` that allows a missing manifest."""
COMPARISON_NAMES = (EPISODES, *added("run_folders"), CONDITIONS, "greedy", "temperature")
"""Values of ``evaluation.allow_mismatch`` that are not manifest fields."""


def compare_folders(
    folder_a: str | os.PathLike, folder_b: str | os.PathLike, allow_mismatch: Sequence[str] = ()
) -> Comparison:
    """Compare two evaluations on disk, write ``compare.json`` into the second folder and update its report.

    Raise CheckpointError if a folder has no result or no manifest, ManifestMismatchError if the simulator, its settings or versions, or
    the sampling differ, and ConfigError if the episodes differ or the folders are the same.

    Args:
        folder_a, folder_b: Evaluation folders, their ``result.json`` files, or run folders, for which the closing evaluation is used. The
            first is the baseline.
        allow_mismatch: Manifest fields that may differ, or ``COMPARISON_NAMES``; policy fields may always differ.
    """
    folders = [evaluation_folder(path) for path in (folder_a, folder_b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ConfigError(
            f"{folder_a} and {folder_b} are the same evaluation. Run rlinf evaluate --compare <baseline folder> <other folder>"
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
    (units_a, kind), (units_b, _) = kind_of(file_a.parent), kind_of(file_b.parent)
    if units_a != units_b:
        actual = f"{file_a} contains {units_a} and {file_b} contains {units_b}"
        raise ConfigError(f"{actual}; expected two evaluations of the same kind. Pass a different folder")
    if kind is not None:
        return kind.compare(file_a, file_b, allow_mismatch)
    return compare(EvaluationResult.from_json(file_a), EvaluationResult.from_json(file_b), allow_mismatch)


def evaluation_folder(path: str | os.PathLike) -> Path:
    """Return the evaluation folder for an evaluation, its ``result.json``, or a run."""
    folder = follow_latest(path)
    folder = folder.parent if folder.name == RESULT_FILE else folder
    if (folder / RESULT_FILE).is_file():
        return folder
    below = sorted(str(path.parent) for path in folder.glob(f"{EVALUATIONS_FOLDER}/*/{RESULT_FILE}"))
    for place in (folder / EVALUATIONS_FOLDER / tag for tag in closing_tags(read_metrics(folder) if below else [])):
        if (place / RESULT_FILE).is_file():
            return place
    hint = f"Pass one of its evaluations: {', '.join(below)}" if below else "Pass a folder written by `rlinf evaluate`"
    raise CheckpointError(f"{path} contains no {RESULT_FILE} to compare. {hint}")


def check_conditions(folder_a: Path | Manifest, folder_b: Path | Manifest, allow_mismatch: Sequence[str]) -> list[str]:
    """Return the accepted differences between two evaluations' conditions; raise the same errors as ``compare_folders``.

    For an evaluation that has not run yet, pass its manifest instead of a folder.
    """
    places = [folder for folder in (folder_a, folder_b) if isinstance(folder, Path)]
    missing = [str(folder) for folder in places if not (folder / MANIFEST_FILE).is_file()]
    if missing:
        if CONDITIONS in allow_mismatch:
            return [f"{folder} has no {MANIFEST_FILE}; its conditions are unknown" for folder in missing]
        fix = f"Evaluate again, or set 'evaluation.allow_mismatch=[{','.join([*allow_mismatch, CONDITIONS])}]'"
        raise CheckpointError(f"{' and '.join(missing)} has no {MANIFEST_FILE}, so conditions are unknown. {fix}")
    first, second = (Manifest.load(folder) if isinstance(folder, Path) else folder for folder in (folder_a, folder_b))
    check_allowed(allow_mismatch, first, second, also=COMPARISON_NAMES)
    differences = compare_manifests(first, second)
    # The two evaluations may be of different policies, so only the env fields must be equal.
    env_fields = [mismatch for mismatch in differences if mismatch.field.partition(".")[0] not in POLICY_FIELDS]
    message = "The two evaluations ran under different conditions (first: saved, second: present)"
    accepted = reject_mismatches(env_fields, allow_mismatch, message)
    return [str(mismatch) for mismatch in accepted if mismatch.must_match]
