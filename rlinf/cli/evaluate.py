"""``rlinf evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf.commands.hydra_app import configure, hide_progress_bars, parse
from rlinf.config.compose import parse_overrides
from rlinf.errors import ConfigError
from rlinf.evaluation.config import EvaluationConfig
from rlinf.options import from_mapping
from rlinf.recipes.load import with_overrides

COMPARE_FLAG = "--compare"


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint under its own configuration, or the configured model if ``checkpoint=`` is not given.

    Model and env come from the checkpoint's configuration. Overrides change single keys; a whole group (``env=tabletop``)
    replaces a section. ``--compare A B`` runs nothing: it compares two evaluations (or those that closed two runs) episode
    by episode. ``evaluation.compare=A`` does so after an evaluation.

    With ``questions=<file>``, a language or vision-language model answers questions: multiple choice, or exact answers by
    ``answer_type=<reward>``. docs/recipes.md lists the keys.
    """
    if not arguments:
        usage = "rlinf evaluate checkpoint=outputs/quickstart/latest"
        raise ConfigError(f"`rlinf evaluate` needs a checkpoint or run folder. Run {usage}")
    if COMPARE_FLAG in arguments:
        return _compare(list(arguments))
    if any(word.startswith("questions=") for word in arguments):
        return _questions(arguments)
    first, *others = arguments
    folder = [f"checkpoint={first}"] if "=" not in first and Path(first).is_dir() else [first]
    config = configure(parse([*folder, *others]), "evaluate")
    if config is not None:
        from rlinf.commands import evaluate as command

        command.evaluate(config)
    return 0


def _questions(arguments: Sequence[str]) -> int:
    """Evaluate on a file of questions, whose keys are not those of a run."""
    from rlinf.commands.evaluate_questions import evaluate_questions
    from rlinf.recipes.questions import QuestionsConfig

    config = from_mapping(QuestionsConfig, with_overrides({}, arguments))
    if not config.checkpoint:
        raise ConfigError("checkpoint is not given; required: a model. Set checkpoint=<folder of a model or a run>")
    hide_progress_bars()
    evaluate_questions(config)
    return 0


def _compare(words: list[str]) -> int:
    """Print the comparison of the two evaluations after the flag."""
    from rlinf.evaluation.compare_folders import compare_folders, evaluation_folder
    from rlinf.evaluation.report_data import COMPARISON_FILE, REPORT_FILE

    position = words.index(COMPARE_FLAG)
    folders, rest = words[position + 1 : position + 3], words[:position] + words[position + 3 :]
    key = "evaluation.allow_mismatch"
    if len(folders) < 2 or any(not word.startswith(f"{key}=") for word in rest):
        command, required = f"rlinf evaluate {COMPARE_FLAG}", f"two folders of evaluations, and nothing else but {key}"
        found = f"`{command}` got '{' '.join([*folders, *rest])}'"
        raise ConfigError(f"{found}; required: {required}. Run {command} <baseline folder> <other folder>")
    given = [item.value() for item in parse_overrides(rest)]
    settings = from_mapping(EvaluationConfig, {"allow_mismatch": given[-1]} if given else {}, "evaluation")
    print(compare_folders(*folders, settings.allow_mismatch).table())
    written = evaluation_folder(folders[1])
    print(f"comparison: {written / COMPARISON_FILE}\nreport: {written / REPORT_FILE}")
    return 0
