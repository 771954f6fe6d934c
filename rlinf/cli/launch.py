"""``rlinf launch``: its words are checked before the imports of ``rlinf.commands.launch``, which take seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlinf.errors import ConfigError, did_you_mean
from rlinf.recipes.load import load_recipe, recipe_names

FLAGS = ("--config", "--dry-run")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Run rlinf launch --config <recipe> [dataset script] [key=value ...] [--dry-run]")


def launch(arguments: Sequence[str]) -> int:
    """Train a language or vision-language model from a recipe, a TOML or YAML file.

    --config takes a file, or the name of a recipe that comes with rlinf. A path that does not exist here is looked up among
    the files that come with rlinf, a dataset script too: ./tools/dataset/gsm8k_grpo.py, or tools.dataset.gsm8k_grpo.
    key=value changes a key of the recipe by its dotted path: train.epoch=2. --dry-run prints what the recipe needs and does.
    """
    parser = _Parser(prog="rlinf launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--dry-run", action="store_true")
    given, words = parser.parse_known_args(list(arguments))
    for word in words:
        if word.startswith("-"):
            found = f"'{word}' is not a flag of `rlinf launch`"
            raise ConfigError(f"{found}.{did_you_mean(word.partition('=')[0], FLAGS)}")
    if given.config is None:
        known = f"a TOML or YAML file, or one of {', '.join(recipe_names())}"
        raise ConfigError(f"`rlinf launch` needs --config <recipe>: {known}")
    overrides = [word for word in words if "=" in word]
    scripts = [word for word in words if "=" not in word]
    if len(scripts) > 1:
        required = "required: one, and overrides as key=value."
        raise ConfigError(f"{' and '.join(scripts)} are several dataset scripts; {required}")
    config, notices = load_recipe(given.config, overrides)
    for line in notices:
        print(f"note: {line}", file=sys.stderr)
    from rlinf.commands.launch import launch as launch_recipe

    launch_recipe(config, scripts[0] if scripts else None, given.dry_run, arguments)
    return 0
