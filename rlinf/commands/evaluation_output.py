"""The output folder of an evaluation: checked before the first episode, and written at the end."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from rlinf import run_folder
from rlinf.commands.open_evaluation import log_warnings
from rlinf.config.schema import RunConfig
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.partial import num_saved, partial_files
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.twins import effect_table
from rlinf.files import write_text
from rlinf.manifest import Manifest
from rlinf.options import to_mapping


def check_output(output: Path, baseline: Path | None) -> None:
    """Raise ConfigError if ``output`` is the baseline or a finished evaluation, or is inside a run, checkpoint or export."""
    place = output.resolve()
    if baseline is not None and baseline.resolve() == place:
        raise ConfigError(
            f"evaluation.compare={baseline} and output_dir={output} are the same folder; expected a different folder, because the "
            "baseline would be overwritten. Set output_dir=<a new folder>"
        )
    for folder in (place, *place.parents):
        if _belongs_to_training(folder):
            raise ConfigError(
                f"output_dir is '{output}', which is inside a run, checkpoint or export ({folder}), whose files an evaluation would "
                "overwrite. Set output_dir=<a new folder>"
            )
    if (place / run_folder.RESULT_FILE).exists() and not partial_files(place):
        raise ConfigError(
            f"output_dir is '{output}', which contains the {run_folder.RESULT_FILE} of a finished evaluation. Delete the folder, or set "
            "output_dir=<a new folder>"
        )


def _belongs_to_training(folder: Path) -> bool:
    if any((folder / name).is_file() for name in (run_folder.METRICS_FILE, run_folder.STATE_FILE)):
        return True
    if any(folder.glob(f"{run_folder.CHECKPOINTS_FOLDER}/*/{run_folder.STATE_FILE}")):
        return True
    try:
        manifest = json.loads((folder / run_folder.MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and bool(manifest.get("files"))  # an evaluation's manifest lists no files


@contextmanager
def report_saved(output: Path, count_saved: Callable[[Path], int] = num_saved, noun: str = "results") -> Iterator[None]:
    """If the block fails, print how many results (``noun``) are saved in ``output``, and how to resume."""
    try:
        yield
    except BaseException as error:
        count = count_saved(output)
        if count and not isinstance(error, (ConfigError, CheckpointError)):  # rerunning would fail the same way
            saved = f"{count} {noun} are saved in {output}"
            print(f"\n{saved}; to continue, run the same command with output_dir={output}", file=sys.stderr, flush=True)
        raise


def write_result(
    config: RunConfig, result: EvaluationResult, earlier_s: float, manifest: Manifest, warnings: list[str]
) -> None:
    """Write and print the result of an evaluation, together with ``warnings`` raised before it started."""
    output = Path(config.output_dir)
    log_warnings(result.warnings)
    result.warnings = warnings + result.warnings
    result.wall_s += earlier_s
    manifest.save(output)
    write_text(output / run_folder.CONFIG_FILE, yaml.safe_dump(to_mapping(config), sort_keys=False))
    # A comparison with an earlier result in this folder is no longer valid.
    (output / run_folder.COMPARISON_FILE).unlink(missing_ok=True)
    result.to_json(output / run_folder.RESULT_FILE)
    effects = f"\n\n{effect_table(result.perturbations)}" if result.perturbations else ""
    print(f"{result.table()}{effects}\nresults: {output / run_folder.RESULT_FILE}", flush=True)
