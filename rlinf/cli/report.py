"""``rlinf report`` and ``rlinf why``."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import ConfigError, reject
from rlinf.report.run_data import kind_of
from rlinf.report.run_page import write_report
from rlinf.report.runs import RUNS_FILE, group_runs, read_runs, run_folders, runs_table, write_runs_report
from rlinf.report.why.rules import explain

JSON_FLAG = "--json"


def report(arguments: Sequence[str]) -> int:
    """Rewrite the report of a run, or print a table of several runs and write one page with their curves.

    Runs that differ only in their seed form one curve: their mean, with a 95 % interval over seeds. If several runs have the
    same seed, the newest finished one is used. A sweep folder (multirun/...) stands for all of its runs, `latest` for the newest.
    """
    outputs = [argument.partition("=")[2] for argument in arguments if argument.startswith("output=")]
    folders = [argument for argument in arguments if not argument.startswith("output=")]
    wrong = [name for name in folders if name.startswith("-") or ("=" in name and not Path(name).expanduser().exists())]
    if not folders or wrong or len(outputs) > 1:
        actual = f"'{wrong[0]}'" if wrong else "no folder" if not folders else "two outputs"
        required = "run folders, and output=<file.html> at most"
        usage = "rlinf report outputs/quickstart/latest, or rlinf report multirun/quickstart/latest output=seeds.html"
        raise ConfigError(f"`rlinf report` was given {actual}; expected {required}. Run {usage}")
    file = next((path for path in outputs if Path(path).expanduser().exists() and Path(path).suffix != ".html"), None)
    if file is not None:
        reject(f"output='{file}', which exists and is not an .html file", "a new file or a page", f"output={RUNS_FILE}")
    places = run_folders(folders)
    if len(places) == 1 and not outputs:
        print(f"report: {write_report(places[0])}")
        return 0
    for place in places:
        if (kind := kind_of(place)[1]) is not None:
            actual = f"'{place}' is {kind.name}, which the page of several runs does not support"
            raise ConfigError(f"{actual}; expected runs of `rlinf train`, or one folder. Run rlinf report {place}")
    runs = read_runs(folders)
    output = Path(outputs[0] if outputs else RUNS_FILE).expanduser()
    print(runs_table(group_runs(runs)), f"report: {write_runs_report(runs, output)}", sep="\n")
    return 0


def why(arguments: Sequence[str]) -> int:
    """Print whether a run has improved, with an interval of the change, and if not, the cause and the override to set.

    The run may be from `rlinf train`, `rlinf sft` or `rlinf launch`, and may still be in progress. --json prints a JSON object
    instead. docs/why.md lists all rules.
    """
    folders = [argument for argument in arguments if argument != JSON_FLAG]
    if len(folders) != 1 or folders[0].startswith("-"):
        actual = f"'{' '.join(folders)}'" if folders else "no folder"
        raise ConfigError(
            f"`rlinf why` was given {actual}; expected one run folder. Run rlinf why outputs/quickstart/latest"
        )
    diagnoses = {str(place): explain(place) for place in run_folders(folders)}
    if JSON_FLAG in arguments:
        print(json.dumps({place: diagnosis.as_dict() for place, diagnosis in diagnoses.items()}, indent=1))
        return 0
    for place, diagnosis in diagnoses.items():
        print(f"{place}\n{diagnosis}" if len(diagnoses) > 1 else diagnosis)
    return 0
