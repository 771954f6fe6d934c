"""``rlinf models``: what is registered, by whom, and which groups and experiments there are."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.cli.table import format_columns, format_table
from rlinf.errors import ConfigError
from rlinf.registry import Registry

FALLBACK = (
    "Any other model_type of transformers works without a registration, from model.model_path=<folder or hub id>: a text model\n"
    "becomes an HFModel (SFT, GRPO and DPO on text), a vision-language model a policy of the type hf_vla."
)


def models(arguments: Sequence[str]) -> int:
    """Print registered models, envs and algorithms with their origin, config groups and experiments."""
    from rlinf.commands.hydra_app import parse
    from rlinf.config.compose import compose_config
    from rlinf.config.plugins import load_plugins
    from rlinf.config.search import group_options

    args = parse(arguments)
    if any(not override.startswith("plugins=") for override in args.overrides):
        raise ConfigError("`rlinf models` takes plugins=[...] and --config-dir only. Run rlinf models")
    load_plugins(compose_config(args.overrides, args.config_dir).plugins)
    rows = []
    for registry in registries():
        rows += [(registry.kind, name, entry.origin) for name, entry in sorted(registry.entries().items())]
        rows += [
            (registry.kind, entry.name, f"{entry.origin}, not used: the name is taken") for entry in registry.hidden
        ]
    print(format_table(("kind", "name", "from"), rows))
    print(f"\n{FALLBACK}\n")
    for group in ("model", "env", "algorithm", "experiment"):
        label = f"{group}=..."
        print(f"{label:<16}{format_columns(group_options(group), 16)}")
    return 0


def registries() -> list[Registry]:
    """Return the registries of models, envs and algorithms."""
    from rlinf.algorithms import ALGORITHMS
    from rlinf.envs import ENVS
    from rlinf.models import MODELS

    return [MODELS, ENVS, ALGORITHMS]
