"""Policies by name: one registration makes a model type known to configuration, loading and training.

A model type that nobody registered falls back to a generic class: ``HFModel`` for text, ``hf_vla`` for images and text.
Importing this module imports neither torch nor transformers; they come with the first model.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError
from rlinf.imports import lazy_attributes
from rlinf.models.config import ModelConfig, TokenizerConfig
from rlinf.models.fallback import TEXT, folder_config, generic_kind
from rlinf.models.loading import (
    check_attention,
    check_declared_sizes,
    config_file_names,
    import_target,
    load_action_model,
    load_generic_model,
    load_model_config,
    load_standard_processor,
    override_fields,
    read_json,
    values_refused_for_rl,
)
from rlinf.options import cured_by_settings, from_mapping, plain_container
from rlinf.registry import Registry

__all__ = [
    "MODELS", "HFLLMModel", "HFModel", "ModelEntry", "build_policy", "config_file_names", "declared_value", "entry_for",
    "get_model", "get_model_config_and_processor", "register_auto_classes", "register_model", "torch_dtype_from_precision", "values_refused_for_rl",
]  # fmt: skip

logger = logging.getLogger("rlinf")


__getattr__ = lazy_attributes(
    __name__,
    {
        "HFModel": "rlinf.models.hf_model",
        "HFLLMModel": "rlinf.models.hf_model",
        "HuggingFacePolicy": "rlinf.llm.hf_policy",
        "MegatronPolicy": "rlinf.llm.megatron.policy",
        "torch_dtype_from_precision": "rlinf.models.precision",
    },
)


@dataclass(frozen=True)
class ModelEntry:
    """What a model type stands for; each class is given as such or as ``"module:attribute"``.

    Attributes:
        name: ``model.model_type`` in the configuration.
        model: Policy class: ``ActionModel`` and ``PreTrainedModel``.
        config: ``PreTrainedConfig`` class; None: ``model.config_class``.
        processor: Class whose ``from_pretrained(path, tokenizer=..., image_processor=...)`` gives the input processor.
        image_processor: Class with ``from_pretrained(path)``.
        load_processor: Instead of the two: ``(tokenizer_config, model_config, path) -> input processor``, where
            ``path`` is None for a model without a folder.
        acts: False for a language model, which does not act in an environment.
    """

    name: str
    model: Any
    config: Any = None
    processor: Any = None
    image_processor: Any = None
    load_processor: Any = None
    acts: bool = True

    def resolve(self) -> ModelEntry:
        """Import what is given by name, and tell the Auto classes of transformers (again and again does no harm)."""
        parts = ("model", "config", "processor", "image_processor", "load_processor")
        entry = replace(self, **{part: import_target(getattr(self, part)) for part in parts})
        if entry.config is None:
            entry = replace(entry, config=getattr(entry.model, "config_class", None))
        if entry.config is not None:
            _register_auto_classes(entry)
        return entry


MODELS: Registry[ModelEntry] = Registry(
    "model type",
    "rlinf.models",
    {
        "openvla": ModelEntry(
            "openvla",
            model="rlinf.models.embodiment.openvla.policy:OpenVLAForRLActionPrediction",
            config="rlinf.models.embodiment.openvla.config:OpenVLAConfig",
            processor="rlinf.models.embodiment.openvla.processing:PrismaticProcessor",
            image_processor="rlinf.models.embodiment.openvla.processing:PrismaticImageProcessor",
            load_processor="rlinf.models.embodiment.openvla.processing:load_processor",
        ),
        "openvla_oft": ModelEntry(
            "openvla_oft",
            model="rlinf.models.embodiment.openvla_oft.policy:OpenVLAOFTForRLActionPrediction",
            config="rlinf.models.embodiment.openvla_oft.config:OpenVLAOFTConfig",
            processor="rlinf.models.embodiment.openvla.processing:PrismaticProcessor",
            image_processor="rlinf.models.embodiment.openvla.processing:PrismaticImageProcessor",
            load_processor="rlinf.models.embodiment.openvla.processing:load_processor",
        ),
        "pi0": ModelEntry(
            "pi0",
            model="rlinf.models.embodiment.pi0.policy:Pi0ForRLActionPrediction",
            config="rlinf.models.embodiment.pi0.config:Pi0Config",
            load_processor="rlinf.models.embodiment.pi0.processing:load_processor",
        ),
        "hf_vla": ModelEntry(
            "hf_vla",
            model="rlinf.models.embodiment.hf_vla.policy:HfVlaForRLActionPrediction",
            config="rlinf.models.embodiment.hf_vla.config:HfVlaConfig",
            load_processor="rlinf.models.embodiment.hf_vla.processing:load_processor",
        ),
        "cnn": ModelEntry(
            "cnn",
            model="rlinf.models.embodiment.cnn_action_model:CNNForRLActionPrediction",
            load_processor="rlinf.models.embodiment.mlp_action_model:load_processor",
        ),
        "mlp": ModelEntry(
            "mlp",
            model="rlinf.models.embodiment.mlp_action_model:MLPForRLActionPrediction",
            load_processor="rlinf.models.embodiment.mlp_action_model:load_processor",
        ),
    },
)


def register_model(
    name: str,
    *,
    model: Any,
    config: Any = None,
    processor: Any = None,
    image_processor: Any = None,
    load_processor: Callable[..., Any] | str | None = None,
) -> None:
    """Make a model type known: the single registration. The same name twice keeps the last one.

    Args:
        name: ``model.model_type`` in the configuration.
        model: See ``ModelEntry``; classes, or ``"module:attribute"`` strings that are imported at first use.
        config: See ``ModelEntry``.
        processor: See ``ModelEntry``.
        image_processor: See ``ModelEntry``.
        load_processor: See ``ModelEntry``.
    """
    MODELS.register(name, ModelEntry(name, model, config, processor, image_processor, load_processor))


def entry_for(cfg: ModelConfig) -> ModelEntry:
    """Return the registered entry of ``cfg.model_type``, else the generic one that takes it.

    Raises:
        ConfigError: Neither registered nor a language or vision-language model of transformers.
    """
    return MODELS.get(cfg.model_type) if cfg.model_type in MODELS else _generic_entry(cfg)


def get_model_config_and_processor(cfg: Any) -> tuple[Any, Any]:
    """Load the model's configuration and its input processor.

    Args:
        cfg: Run configuration with ``model.model_type`` and ``tokenizer.tokenizer_model``, as dataclass or mapping. The
            folder is ``tokenizer.tokenizer_model``, else ``model.model_path``; without both, the configuration is built
            from ``model.init_config``, and the processor from what the package brings.

    Returns:
        ``(model_config, input_processor)``; the tokenizer of the processor pads on the left.

    Raises:
        ConfigError: The model type is unknown, or there is nothing to load a processor from.
    """
    section = _model_section(_section(cfg, "model"))
    return _or_fall_back(section, lambda entry: _config_and_processor(entry.resolve(), cfg))


def get_model(
    cfg: Any, override_config_kwargs: Mapping[str, Any] | None = None, allow_mismatch: Sequence[str] = ()
) -> Any:
    """Build the policy: load ``cfg.model_path``, or draw random weights from ``cfg.init_config``.

    Args:
        cfg: The model section, as ``ModelConfig`` or mapping (missing keys take the defaults).
        override_config_kwargs: Fields of the model's own configuration to replace.
        allow_mismatch: ``["lora.base_sha256"]`` accepts adapters of other base weights.

    Raises:
        ConfigError: Unknown model type or field, or a declared size that the checkpoint does not have.
        ManifestMismatchError: The adapters of ``lora_path`` belong to other base weights.
        MissingDependencyError: ``attn_implementation=flash_attention_2`` without the package.
    """
    section = _model_section(cfg)
    _say_what_takes_it(section)
    return _or_fall_back(section, lambda entry: _load(entry, section, override_config_kwargs, allow_mismatch))


def build_policy(cfg: Any, override_config_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return ``get_model(cfg.model)`` with ``model.processor`` set, ready to act on observations.

    ``cfg.evaluation.allow_mismatch`` may accept adapters of other base weights.
    """
    section = _model_section(_section(cfg, "model"))
    evaluation = _section(cfg, "evaluation")
    allowed = evaluation.get("allow_mismatch", ()) if isinstance(evaluation, Mapping) else evaluation.allow_mismatch
    _say_what_takes_it(section)

    def load(entry: ModelEntry) -> Any:
        _, processor = _config_and_processor(entry.resolve(), cfg)
        model = _load(entry, section, override_config_kwargs, allowed)
        model.processor = processor
        return model

    return _or_fall_back(section, load)


def _generic_entry(cfg: ModelConfig) -> ModelEntry:
    if generic_kind(cfg, MODELS) != TEXT:
        return MODELS.get("hf_vla")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    config = CONFIG_MAPPING[cfg.model_type] if cfg.model_type in CONFIG_MAPPING_NAMES else None
    return ModelEntry(cfg.model_type, model="rlinf.models.hf_model:HFModel", config=config, acts=False)


def _say_what_takes_it(cfg: ModelConfig) -> None:
    """Log which generic class takes a model type that is not registered."""
    if cfg.model_type not in MODELS:
        entry = entry_for(cfg)
        chosen = entry.name if entry.acts else "HFModel"
        logger.warning("Model type '%s' is not registered; falling back to %s.", cfg.model_type, chosen)


@cured_by_settings("model", path="model_path", architectures="override_config.architectures")
def _or_fall_back(cfg: ModelConfig, load: Callable[[ModelEntry], Any]) -> Any:
    """Load by the model type's own entry; with ``cfg.strict`` off, by the generic one if the own class raises."""
    entry = entry_for(cfg)
    if cfg.strict or cfg.model_type not in MODELS:
        return load(entry)
    try:
        return load(entry)
    except Exception:
        found = folder_config(cfg.model_path).get("model_type")
        if found is None:
            raise
        generic = _generic_entry(replace(cfg, model_type=found))
        logger.exception(
            "The class of model type '%s' cannot load '%s'; model.strict=false: the generic class of '%s' takes it.",
            cfg.model_type, cfg.model_path, generic.name,
        )  # fmt: skip
    return load(generic)


def _load(
    entry: ModelEntry, cfg: ModelConfig, overrides: Mapping[str, Any] | None, allow_mismatch: Sequence[str]
) -> Any:
    from rlinf.models.precision import torch_dtype_from_precision

    entry = entry.resolve()
    torch_dtype_from_precision(cfg.precision)
    check_attention(cfg.attn_implementation)
    config = override_fields(load_model_config(entry, cfg, cfg.model_path), plain_container(overrides or {}))
    check_declared_sizes(cfg, config)
    if entry.acts:
        from rlinf.models.dropout import switch_off_dropout

        model = switch_off_dropout(load_action_model(entry, cfg, config))
    else:
        model = load_generic_model(entry, cfg, config)
    if cfg.model_path is not None:
        from rlinf.optim.finite import check_loaded

        check_loaded(model.state_dict(), cfg.model_path)
    if cfg.gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable()
        except ValueError as error:
            raise ConfigError(f"{error} Set model.gradient_checkpointing=false") from error
    if cfg.is_lora:
        from rlinf.models.base_weights import check_base
        from rlinf.models.lora import apply_lora

        check_base(cfg, allow_mismatch)
        model = apply_lora(model, cfg.lora, cfg.lora_path)
    return model


def _config_and_processor(entry: ModelEntry, cfg: Any) -> tuple[Any, Any]:
    model, tokenizer = _model_section(_section(cfg, "model")), _tokenizer_section(_section(cfg, "tokenizer"))
    path = tokenizer.tokenizer_model or model.model_path
    model_config = load_model_config(entry, model, model.model_path or path)
    if entry.load_processor is not None:
        return model_config, entry.load_processor(tokenizer, model_config, path)
    if path is None:
        raise ConfigError(
            f"Model type '{entry.name}' needs a folder to load its processor from, but tokenizer.tokenizer_model and "
            "model.model_path are null; set tokenizer.tokenizer_model=<folder>."
        )
    return model_config, load_standard_processor(entry, path, model.trust_remote_code)


def declared_value(cfg: ModelConfig, name: str, folder: str | Path | None = None) -> Any:
    """Return a field of the model's own configuration, without loading weights.

    Args:
        cfg: The model section.
        name: Field, e.g. ``num_images_in_input``, or a property of the config class, which follows from several fields.
        folder: Checkpoint whose configuration is read; None: ``cfg.model_path``, else ``cfg.init_config``.

    Returns:
        The value, which may be the default or a constant of the config class; None if the model has no such field, or
        its configuration is not on this machine.
    """
    entry = entry_for(cfg)
    config_class = import_target(entry.config) or getattr(import_target(entry.model), "config_class", None)
    if config_class is None:
        return None
    values, folder = plain_container(cfg.init_config), folder or cfg.model_path
    if folder is not None:
        paths = [Path(folder).expanduser() / file for file in config_file_names(entry)]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        values = read_json(path) | plain_container(cfg.override_config)
    if isinstance(getattr(config_class, name, None), property):
        source = {} if folder is None else {"model_path": str(path.parent), "init_config": {}}
        settings = load_model_config(entry.resolve(), replace(cfg, **source), source.get("model_path"))
        return getattr(settings, name)
    parameter = inspect.signature(config_class.__init__).parameters.get(name)
    default = getattr(config_class, name, None) if parameter is None else parameter.default
    default = None if default is inspect.Parameter.empty else default
    return values.get(name, default)


def register_auto_classes() -> None:
    """Make the Auto classes of transformers load every registered policy: ``AutoModel.from_pretrained("my_policy")``.

    An import alone does not, because it would cost the import of torch and of all models. Loading a policy with rlinf makes
    those of its type known, too. What the Auto classes return does not act until it has its input processor; for a policy that
    acts, use ``rlinf.load_policy``.

    Raises:
        MissingDependencyError: A registered model needs a package that is not installed.
    """
    for name in MODELS:
        MODELS.get(name).resolve()


def _register_auto_classes(entry: ModelEntry) -> None:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoProcessor, PreTrainedConfig

    AutoConfig.register(entry.config.model_type or entry.name, entry.config, exist_ok=True)
    is_own = isinstance(entry.config, type) and issubclass(entry.config, PreTrainedConfig)
    # A type of transformers itself keeps its class, because other models build their parts by it.
    if is_own and entry.acts and not entry.config.__module__.startswith("transformers."):
        AutoModel.register(entry.config, entry.model, exist_ok=True)
    if entry.image_processor is not None:
        AutoImageProcessor.register(entry.config, slow_image_processor_class=entry.image_processor, exist_ok=True)
    if entry.processor is not None:
        AutoProcessor.register(entry.config, entry.processor, exist_ok=True)


def _section(cfg: Any, name: str) -> Any:
    if isinstance(cfg, Mapping) or not hasattr(cfg, name):
        return cfg.get(name, {}) if hasattr(cfg, "get") else {}
    return getattr(cfg, name)


def _model_section(cfg: Any) -> ModelConfig:
    section = cfg if isinstance(cfg, ModelConfig) else from_mapping(ModelConfig, cfg, "model")
    paths = {name: getattr(section, name) for name in ("model_path", "lora_path")}
    return replace(section, **{name: path and os.path.expanduser(path) for name, path in paths.items()})


def _tokenizer_section(cfg: Any) -> TokenizerConfig:
    section = cfg if isinstance(cfg, TokenizerConfig) else from_mapping(TokenizerConfig, cfg or {}, "tokenizer")
    return replace(section, tokenizer_model=section.tokenizer_model and os.path.expanduser(section.tokenizer_model))
