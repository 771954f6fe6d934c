"""Choose the generic class for an unregistered model type, by transformers' own tables."""

from collections.abc import Iterable
from pathlib import Path

from rlinf.errors import ConfigError, did_you_mean
from rlinf.files import Json
from rlinf.models.config import ModelConfig
from rlinf.models.loading import read_json
from rlinf.options import closest
from rlinf.wings import missing

TEXT, IMAGE_TEXT = "text", "image-text"


def generic_kind(cfg: ModelConfig, registered: Iterable[str]) -> str:
    """Return ``TEXT`` or ``IMAGE_TEXT``, based on a local folder's ``config.json`` or, without one, on the model type."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    by_kind = {
        IMAGE_TEXT: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        TEXT: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    name, values = cfg.model_type, folder_config(cfg.model_path)
    declared = values.get("model_type", name)
    code = values.get("auto_map") or {} if declared == name else {}
    if declared != name and any(declared in types for types in by_kind.values()):
        raise ConfigError(
            f"model.model_type is '{name}', but the config.json in '{cfg.model_path}' is of type '{declared}'. "
            f"Set model.model_type={declared}"
        )
    if code and name not in CONFIG_MAPPING_NAMES and not cfg.trust_remote_code:
        raise ConfigError(
            f"model.model_type '{name}' is known only to the Python code in '{cfg.model_path}', and "
            "model.trust_remote_code=false. Read that code, then set model.trust_remote_code=true"
        )
    architectures = values.get("architectures") or []
    if len(architectures) == 1:
        for kind, types in by_kind.items():
            if architectures[0] in types.values():
                return kind
    for kind, auto_class in ((IMAGE_TEXT, "AutoModelForImageTextToText"), (TEXT, "AutoModelForCausalLM")):
        if name in by_kind[kind] or auto_class in code:
            return kind
    if name in CONFIG_MAPPING_NAMES:
        raise ConfigError(
            f"model.model_type '{name}' exists in transformers, but is neither a causal nor an image-text-to-text model. "
            "Set model.model_type=<a supported type>, or register it: plugins=[module]"
        )
    if (reason := missing("models", name)) is not None:
        raise ConfigError(reason)
    alike = closest(name, [*registered, *by_kind[TEXT], *by_kind[IMAGE_TEXT]])
    raise ConfigError(
        f"model.model_type is '{name}', which is neither registered nor a causal or image-text-to-text type of "
        f"transformers.{did_you_mean(name, registered)} Set model.model_type={alike or 'openvla'}"
        ", or register it in a plugin (docs/adding_a_model.md): plugins=[module]"
    )


def folder_config(path: str | None) -> Json:
    """Return the contents of a local folder's ``config.json``, or an empty dict without one."""
    file = Path(path or "").expanduser() / "config.json"
    return read_json(file) if path is not None and file.is_file() else {}
