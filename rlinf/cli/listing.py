"""``rlinf models``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.algorithms import ALGORITHMS
from rlinf.cli.table import format_columns, format_table
from rlinf.commands.hydra_app import parse, split
from rlinf.config.compose import parse_overrides
from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.config.search import group_options
from rlinf.envs import ENVS
from rlinf.errors import ConfigError
from rlinf.models import MODELS
from rlinf.options import check_words, from_mapping

FALLBACK = (
    "Any other model_type of transformers works without a registration, from model.model_path=<folder or hub id>: a text model\n"
    "becomes an HFModel (SFT, GRPO and DPO on text), a vision-language model a policy of the type hf_vla.\n"
    "The algorithms sac and td3 train a head on a frozen policy, from a clone or model.model_path, or mlp and cnn from scratch:\n"
    "docs/offpolicy.md."
)


def models(arguments: Sequence[str]) -> int:
    """Print registered models, envs and algorithms with their origin, config groups and experiments."""
    check_words(split(arguments)[0].overrides, ("plugins",))
    args = parse(arguments)
    if any(not override.startswith("plugins=") for override in args.overrides):
        raise ConfigError("`rlinf models` takes plugins=[...] and --config-dir only. Run rlinf models")
    load_plugins(
        from_mapping(RunConfig, {item.key_or_group: item.value() for item in parse_overrides(args.overrides)}).plugins
    )
    rows = []
    for registry in (MODELS, ENVS, ALGORITHMS):
        rows += [(registry.kind, name, entry.origin) for name, entry in sorted(registry.entries().items())]
        hidden = [(entry.name, f"{entry.origin}, not used: the name is taken") for entry in registry.hidden]
        rows += [(registry.kind, *row) for row in hidden]
    print(format_table(("kind", "name", "from"), rows))
    print(f"\n{FALLBACK}\n")
    for group in ("model", "env", "algorithm", "experiment"):
        print(f"{f'{group}=...':<16}{format_columns(group_options(group), 16)}")
    return 0
