"""``rlinf report`` and ``rlinf why``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import ConfigError
from rlinf.preflight.reject import reject
from rlinf.report.recipe_data import is_token_folder
from rlinf.report.run_page import write_report
from rlinf.report.runs import group_runs, read_runs, repeated_seeds, run_folders, write_runs_report
from rlinf.report.why.rules import explain

OUTPUT = "runs.html"
JSON_FLAG = "--json"


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
        reject(f"output='{taken}', which exists and is not an .html file", "a new file or a page", f"output={OUTPUT}")
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


def why(arguments: Sequence[str]) -> int:
    """Print whether a run learnt, with the interval of the change, and if not, the cause and the override to type.

    The run may be of `rlinf train`, `rlinf sft` or `rlinf launch`, and may still continue. With --json, one JSON object. docs/why.md
    has all rules.
    """
    folders = [word for word in arguments if word != JSON_FLAG]
    if len(folders) != 1 or folders[0].startswith("-"):
        given = f"'{' '.join(folders)}'" if folders else "no folder"
        raise ConfigError(f"`rlinf why` got {given}; required: one run folder. Run rlinf why outputs/quickstart/latest")
    places = run_folders(folders)
    found = {str(place): explain(place) for place in places}
    if JSON_FLAG in arguments:
        print(json.dumps({place: diagnosis.as_dict() for place, diagnosis in found.items()}, indent=1))
        return 0
    for place, diagnosis in found.items():
        print(f"{place}\n{diagnosis}" if len(found) > 1 else diagnosis)
    return 0
