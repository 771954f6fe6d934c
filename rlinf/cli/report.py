"""``rlinf report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import ConfigError
from rlinf.evaluation.report import write_report
from rlinf.evaluation.runs import group_runs, read_runs, repeated_seeds, run_folders
from rlinf.evaluation.runs_report import write_runs_report
from rlinf.evaluation.token_data import is_token_folder
from rlinf.preflight.refuse import refuse

OUTPUT = "runs.html"


def report(arguments: Sequence[str]) -> int:
    """Write the report of a run again, or one page with the curves of several runs.

    Runs that differ only in their seed share one curve: their mean, with a 95 % interval over seeds. Of several runs with the
    same seed, the newest finished one counts. A sweep folder (multirun/...) means all of its runs; `latest` the newest run.
    """
    outputs = [word.partition("=")[2] for word in arguments if word.startswith("output=")]
    folders = [word for word in arguments if not word.startswith("output=")]
    wrong = [word for word in folders if word.startswith("-") or ("=" in word and not Path(word).expanduser().exists())]
    if not folders or wrong or len(outputs) > 1:
        given = f"'{wrong[0]}'" if wrong else "no folder" if not folders else "two outputs"
        required = "run folders, and output=<file.html> at most"
        usage = "rlinf report outputs/quickstart/latest, or rlinf report multirun/quickstart/latest output=seeds.html"
        raise ConfigError(f"`rlinf report` got {given}; required: {required}. Run {usage}")
    taken = next((word for word in outputs if Path(word).expanduser().exists() and Path(word).suffix != ".html"), None)
    if taken is not None:
        refuse(f"output='{taken}', which exists and is not an .html file", "a new file or a page", f"output={OUTPUT}")
    places = run_folders(folders)
    if len(places) == 1 and not outputs:
        print(f"report: {write_report(places[0])}")
        return 0
    of_tokens = next((place for place in places if is_token_folder(place)), None)
    if of_tokens is not None:
        found = f"'{of_tokens}' is a run of a recipe, which the page of several runs does not show"
        raise ConfigError(f"{found}; required: runs of `rlinf train`, or one folder. Run rlinf report {of_tokens}")
    runs = read_runs(folders)
    output = Path(outputs[0] if outputs else OUTPUT).expanduser()
    for sentence in repeated_seeds(group_runs(runs)):
        print(sentence)
    print(f"report: {write_runs_report(runs, output)}")
    return 0
