"""``rlinf diagnose``."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from rlinf.cli.table import format_table
from rlinf.errors import ConfigError, MissingDependencyError, RLinfError


def diagnose(arguments: Sequence[str]) -> int:
    """Print whether a language model generates within its length and as it scores, in torch and in vLLM where that is installed.

    A model that vLLM does not run is a failed check. Of an action model the parity gate of ``rlinf train`` is the diagnosis.

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
    from rlinf.models.diagnostics import DiagnosticCheck, consistency_checks, length_checks, torch_engine, vllm_engine
    from rlinf.models.generation.vllm_engine import require_vllm

    pairs = dict(word.split("=", 1) for word in arguments if "=" in word)
    config = from_mapping(CausalLMConfig, {key: yaml.safe_load(value) for key, value in pairs.items()})
    hide_progress_bars()
    model = load_causal_lm(names[0], config)
    generate = torch_engine(model)
    checks = [*length_checks(model, generate, "torch"), *consistency_checks(model, generate, "torch")]
    note = None
    try:
        require_vllm()
        with vllm_engine(names[0], model, config) as generate:
            checks += length_checks(model, generate, "vllm")
            checks += consistency_checks(model, generate, "vllm")
    except MissingDependencyError as error:
        note = f"vllm: not checked. {error}"
    except RLinfError as error:
        checks.append(DiagnosticCheck("vllm: runs the model", False, f"{type(error).__name__}, see below"))
        note = f"vllm: {error}"
    rows = [(check.name, "pass" if check.passed else "FAIL", check.detail) for check in checks]
    print(format_table(("check", "result", "detail"), rows))
    if note is not None:
        print(note)
    return int(not all(check.passed for check in checks))
