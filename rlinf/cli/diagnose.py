"""``rlinf diagnose``."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from rlinf.cli.table import format_table
from rlinf.errors import ConfigError, MissingDependencyError


def diagnose(arguments: Sequence[str]) -> int:
    """Print whether a language model generates within its length and as it scores, in torch and in vLLM where that is installed.

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
    from rlinf.models.diagnostics import consistency_checks, length_checks, torch_engine, vllm_engine
    from rlinf.models.generation.vllm_engine import require_vllm

    pairs = dict(word.split("=", 1) for word in arguments if "=" in word)
    config = from_mapping(CausalLMConfig, {key: yaml.safe_load(value) for key, value in pairs.items()})
    hide_progress_bars()
    model = load_causal_lm(names[0], config)
    generate = torch_engine(model)
    checks = [*length_checks(model, generate, "torch"), *consistency_checks(model, generate, "torch")]
    missing = None
    try:
        require_vllm()
    except MissingDependencyError as error:
        missing = error
    else:
        with vllm_engine(names[0], model, config) as generate:
            checks += [*length_checks(model, generate, "vllm"), *consistency_checks(model, generate, "vllm")]
    rows = [(check.name, "pass" if check.passed else "FAIL", check.detail) for check in checks]
    print(format_table(("check", "result", "detail"), rows))
    if missing is not None:
        print(f"vllm: not checked. {missing}")
    return int(not all(check.passed for check in checks))
