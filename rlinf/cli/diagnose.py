"""``rlinf diagnose``."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from rlinf.cli.table import format_table
from rlinf.errors import ConfigError


def diagnose(arguments: Sequence[str]) -> int:
    """Print whether a language model generates within its length and as it scores.

    Args:
        arguments: Folder or hub id, then ``key=value`` of ``CausalLMConfig``.

    Returns:
        0 if every check passed, else 1.
    """
    names = [word for word in arguments if "=" not in word]
    if len(names) != 1:
        raise ConfigError(
            f"`rlinf diagnose` got {names or 'no model'}; required: one. Type rlinf diagnose <folder or hub id>"
        )

    from rlinf.cli.hydra_app import hide_progress_bars
    from rlinf.config.options import from_mapping
    from rlinf.models.causal_lm import CausalLMConfig, load_causal_lm
    from rlinf.models.diagnostics import consistency_checks, length_checks

    pairs = dict(word.split("=", 1) for word in arguments if "=" in word)
    config = from_mapping(CausalLMConfig, {key: yaml.safe_load(value) for key, value in pairs.items()})
    hide_progress_bars()
    model = load_causal_lm(names[0], config)
    checks = [*length_checks(model), *consistency_checks(model)]
    rows = [(check.name, "pass" if check.passed else "FAIL", check.detail) for check in checks]
    print(format_table(("check", "result", "detail"), rows))
    return int(not all(check.passed for check in checks))
