"""``rlinf models``: what is registered, and by whom."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.cli.table import format_table
from rlinf.errors import ConfigError
from rlinf.registry import Registry


def models(arguments: Sequence[str]) -> int:
    """Print registered models, envs and algorithms with their origin, and the experiments."""
    from rlinf.config.plugins import load_plugins
    from rlinf.config.search import experiment_folders, experiment_names

    plugins = [word.removeprefix("plugins=").strip("[]") for word in arguments if word.startswith("plugins=")]
    if len(plugins) < len(arguments):
        raise ConfigError("`rlinf models` takes plugins=[...] only. Type rlinf models")
    load_plugins([plugin for text in plugins for plugin in text.split(",") if plugin])
    rows = [(registry.kind, name, entry.origin) for registry in registries() for name, entry in sorted(registry.entries().items())]
    print(format_table(("kind", "name", "from"), rows))
    print(f"\nexperiments: {', '.join(experiment_names())}\n  in {', '.join(map(str, experiment_folders()))}")
    return 0


def registries() -> list[Registry]:
    """Return the registries of models, envs and algorithms."""
    from rlinf.algorithms import ALGORITHMS
    from rlinf.envs import ENVS
    from rlinf.models import MODELS

    return [MODELS, ENVS, ALGORITHMS]
