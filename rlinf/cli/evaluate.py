"""``rlinf evaluate``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.evaluation.result import EvaluationResult

COMPARE_FLAG = "--compare"


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint under its own configuration, or (without ``checkpoint=``) the configured model as it is.

    Model and env come from the configuration that the checkpoint was trained with; overrides change single keys, whole
    groups (``env=tabletop``) replace a section. With ``--compare A B`` nothing is run: two evaluations (or the closing ones
    of two runs) are compared episode by episode; ``evaluation.compare=A`` does so after an evaluation.
    """
    if not arguments:
        raise ConfigError(
            "`rlinf evaluate` needs a checkpoint or run folder. Run rlinf evaluate checkpoint=outputs/quickstart/latest"
        )
    if COMPARE_FLAG in arguments:
        return _compare(list(arguments))
    run(arguments)
    return 0


def run(arguments: Sequence[str]) -> EvaluationResult | None:
    """Evaluate, for the command and for ``rlinf.evaluate``; None where the arguments only ask to be told something."""
    from rlinf.commands.hydra_app import configure, parse

    args = parse(arguments)
    if args.help:
        usage = f"usage: rlinf evaluate checkpoint=<folder> [key=value ...]\n       rlinf evaluate {COMPARE_FLAG} A B"
        print(f"{usage}\n\n{inspect.cleandoc(evaluate.__doc__)}")
        return None
    config = configure(args, "evaluate")
    if config is None:
        return None
    from rlinf.commands.evaluate import evaluate as start

    return start(config)


def _compare(words: list[str]) -> int:
    """Print the comparison of the two evaluations that follow the flag."""
    from rlinf.config.compose import parse_overrides
    from rlinf.evaluation.compare_folders import compare_folders, evaluation_folder
    from rlinf.evaluation.config import EvaluationConfig
    from rlinf.evaluation.report_data import COMPARISON_FILE
    from rlinf.options import from_mapping

    position = words.index(COMPARE_FLAG)
    folders, rest = words[position + 1 : position + 3], words[:position] + words[position + 3 :]
    key = "evaluation.allow_mismatch"
    if len(folders) < 2 or any(not word.startswith(f"{key}=") for word in rest):
        raise ConfigError(
            f"`rlinf evaluate {COMPARE_FLAG}` got '{' '.join([*folders, *rest])}'; required: two folders of "
            f"evaluations, and nothing else but {key}. Run rlinf evaluate {COMPARE_FLAG} <baseline folder> <other folder>"
        )
    given = [item.value() for item in parse_overrides(rest)]
    settings = from_mapping(EvaluationConfig, {"allow_mismatch": given[-1]} if given else {}, "evaluation")
    print(compare_folders(*folders, settings.allow_mismatch).table())
    written = evaluation_folder(folders[1])
    print(f"comparison: {written / COMPARISON_FILE}\nreport: {written / 'report.html'}")
    return 0
