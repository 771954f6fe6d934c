"""``rlinf models``: lists registered names, config groups and experiments."""

from collections.abc import Sequence
from itertools import takewhile
from textwrap import shorten

from rlinf.algorithms import ALGORITHMS
from rlinf.commands.hydra_app import parse, split
from rlinf.config.names import GROUP
from rlinf.config.overrides import parse_overrides
from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.config.search import find_experiment, group_options
from rlinf.envs import ENVS
from rlinf.errors import ConfigError
from rlinf.models import MODELS
from rlinf.number_formats import MIN_WIDTH, format_columns, format_table, terminal_width
from rlinf.options import check_arguments, from_mapping

FALLBACK = (
    "Any other model_type of transformers works without a registration, from model.model_path=<folder or hub id>: a text model\n"
    "becomes an HFModel (SFT, GRPO and DPO on text), a vision-language model an hf_vla policy.\n"
    "The algorithms sac and td3 train an actor on a frozen policy (cloned, or from model.model_path), or mlp and cnn from scratch:\n"
    "docs/offpolicy.md."
)
TEMPLATE = "your_"
"""Name prefix of template files."""


def models(arguments: Sequence[str]) -> int:
    """Print registered models, envs and algorithms with their origin, config groups and experiments."""
    check_arguments(split(arguments)[0].overrides, ("plugins",))
    args = parse(arguments)
    if any(not override.startswith("plugins=") for override in args.overrides):
        raise ConfigError("`rlinf models` accepts only plugins=[...] and --config-dir. Run rlinf models")
    load_plugins(
        from_mapping(RunConfig, {item.key_or_group: item.value() for item in parse_overrides(args.overrides)}).plugins
    )
    rows = []
    for registry in (MODELS, ENVS, ALGORITHMS):
        rows += [(registry.kind, name, entry.origin) for name, entry in sorted(registry.entries().items())]
        hidden = [(entry.name, f"{entry.origin}, not used, because the name is taken") for entry in registry.hidden]
        rows += [(registry.kind, *row) for row in hidden]
    print(format_table(("kind", "name", "from"), rows))
    print(f"\n{FALLBACK}\n")
    for group in ("model", "env", "algorithm"):
        names = [name for name in group_options(group) if not name.startswith(TEMPLATE)]
        print(f"{f'{group}=...':<16}{format_columns(names, 16)}")
    names = [name for name in group_options(GROUP) if not name.startswith(TEMPLATE)]
    width = max(map(len, names)) + 2
    print(f"\n{'experiment=...':<{width}}where, how long, what")
    for name in names:
        print(
            f"{name:<{width}}{shorten(_about(name), max(MIN_WIDTH, terminal_width() - width), placeholder=' ...')}".rstrip()
        )
    return 0


def _about(name: str) -> str:
    """Return the description in the leading comment of an experiment's file, or "" for third-party packages."""
    path = find_experiment(name)
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines() if path else ())
    text = " ".join(line.lstrip("# ") for line in lines)
    return text.partition(". ")[0].partition(": rlinf ")[0].rstrip(".")
