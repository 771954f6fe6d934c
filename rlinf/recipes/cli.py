"""``rlinf launch``, and ``rlinf evaluate questions=...``: check their arguments before slow imports."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlinf.commands.hydra_app import with_checkpoint
from rlinf.config.overrides import with_overrides
from rlinf.errors import ConfigError, did_you_mean
from rlinf.models.loading import hide_progress_bars
from rlinf.options import from_mapping
from rlinf.recipes.load import load_recipe, recipe_names

FLAGS = ("--config", "--dry-run")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Run rlinf launch --config <recipe> [dataset script] [key=value ...] [--dry-run]")


def launch(arguments: Sequence[str]) -> int:
    """Train a language or vision-language model from a recipe, a TOML or YAML file.

    Pass --config a file or the name of a packaged recipe. Recipes and dataset scripts that do not exist here are looked up among
    rlinf's files: ./tools/dataset/gsm8k_grpo.py, or tools.dataset.gsm8k_grpo. Override a key of the recipe by its dotted path:
    train.epoch=2. --dry-run only prints the plan of the recipe.
    """
    parser = _Parser(prog="rlinf launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--dry-run", action="store_true")
    flags, rest = parser.parse_known_args(list(arguments))
    for argument in rest:
        if argument.startswith("-"):
            hint = did_you_mean(argument.partition("=")[0], FLAGS)
            raise ConfigError(f"'{argument}' is not a flag of `rlinf launch`.{hint}")
    if flags.config is None:
        known = f"a TOML or YAML file, or one of {', '.join(recipe_names())}"
        raise ConfigError(f"`rlinf launch` needs --config <recipe>: {known}")
    overrides = [argument for argument in rest if "=" in argument]
    scripts = [argument for argument in rest if "=" not in argument]
    if len(scripts) > 1:
        required = "expected one, and overrides as key=value."
        raise ConfigError(f"{' and '.join(scripts)} are several dataset scripts; {required}")
    config, notices = load_recipe(flags.config, overrides)
    for line in notices:
        print(f"note: {line}", file=sys.stderr)
    from rlinf.recipes.launch import launch as launch_recipe

    launch_recipe(config, scripts[0] if scripts else None, flags.dry_run, arguments)
    return 0


def questions(arguments: Sequence[str]) -> int:
    """Evaluate a model on a file of questions."""
    from rlinf.recipes.evaluate_questions import evaluate_questions
    from rlinf.recipes.questions import QuestionsConfig

    config = from_mapping(QuestionsConfig, with_overrides({}, with_checkpoint(arguments)))
    if not config.checkpoint:
        raise ConfigError("checkpoint is not given; expected a model. Set checkpoint=<folder of a model or a run>")
    hide_progress_bars()
    evaluate_questions(config)
    return 0
