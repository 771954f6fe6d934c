"""``rlinf why``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlinf.errors import ConfigError
from rlinf.evaluation.finding_rules import explain
from rlinf.evaluation.runs import run_folders

FLAG = "--json"


def why(arguments: Sequence[str]) -> int:
    """Print what the metrics of a run say: what was measured, what it should be, and what to type; the worst first.

    The run may be of `rlinf train`, `rlinf sft` or `rlinf launch`, and may still go on. Rules that its metrics do not allow are
    listed with the reason. With --json, one JSON object. docs/why.md has all rules.
    """
    folders = [word for word in arguments if word != FLAG]
    if len(folders) != 1 or folders[0].startswith("-"):
        given = f"'{' '.join(folders)}'" if folders else "no folder"
        raise ConfigError(f"`rlinf why` got {given}; required: one run folder. Run rlinf why outputs/quickstart/latest")
    places = run_folders(folders)
    found = {str(place): explain(place) for place in places}
    if FLAG in arguments:
        print(json.dumps({place: diagnosis.as_dict() for place, diagnosis in found.items()}, indent=1))
        return 0
    for place, diagnosis in found.items():
        print(f"{place}\n{diagnosis}" if len(found) > 1 else diagnosis)
    return 0
