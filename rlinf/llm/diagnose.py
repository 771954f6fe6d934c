"""``rlinf diagnose <folder or hub id>``: checks whether a language model's samples and scores agree, in torch and vLLM."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from rlinf.contracts.report import Check, print_checks, rejected_by_vllm
from rlinf.engines.vllm_engine import require_vllm
from rlinf.errors import ConfigError, MissingDependencyError, RLinfError
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.llm.validation import Generate, consistency_checks, length_checks, torch_engine, vllm_engine
from rlinf.models import MODELS
from rlinf.models.loading import hide_progress_bars, read_json
from rlinf.options import from_mapping


def diagnose(arguments: Sequence[str]) -> int:
    """Print the checks of a language model: its folder or hub id, and ``key=value`` for fields of ``CausalLMConfig``."""
    name = next(argument for argument in arguments if "=" not in argument)
    about = Path(name).expanduser() / "config.json"
    model_type = read_json(about).get("model_type") if about.is_file() else None
    if model_type in MODELS.entries() and MODELS.get(model_type).acts:
        usage = f"rlinf diagnose model.model_type={model_type} model.model_path={name} env=<its env>"
        raise ConfigError(f"'{name}' contains a '{model_type}', a policy; expected a language model. Run {usage}")
    values = dict(pair.partition("=")[::2] for pair in arguments if pair != name)
    config = from_mapping(CausalLMConfig, {key: yaml.safe_load(value) for key, value in values.items()})
    hide_progress_bars()
    model = load_causal_lm(name, config)

    def run(generate: Generate, engine: str) -> list[Check]:
        return [*length_checks(model, generate, engine), *consistency_checks(model, generate, engine)]

    checks, note = run(torch_engine(model), "torch"), None
    try:
        require_vllm()
        with vllm_engine(name, model, config) as generate:
            checks += run(generate, "vllm")
    except MissingDependencyError as error:
        note = f"vllm: not checked. {error}"
    except RLinfError as error:
        note = rejected_by_vllm(checks, error)
    return print_checks(checks, note)
