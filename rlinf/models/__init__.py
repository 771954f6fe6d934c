"""Policies by name: one registration makes a model type known to configuration, loading and training.

Importing this module imports neither torch nor transformers; they come with the first model.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.options import from_mapping, plain_container, public_fields
from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError, did_you_mean
from rlinf.models.config import ModelConfig, TokenizerConfig
from rlinf.registry import Registry

if TYPE_CHECKING:
    import torch

OPTIONAL_ARGUMENTS = ("action_chunks_len", "value_head", "detach_value")
"""Keys of the model section that are passed to a model's constructor only where it names them."""


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
    """

    name: str
    model: Any
    config: Any = None
    processor: Any = None
    image_processor: Any = None
    load_processor: Any = None

    def resolve(self) -> ModelEntry:
        """Import what is given by name, and tell the Auto classes of transformers (again and again does no harm)."""
        values = {f.name: _import(getattr(self, f.name)) for f in fields(self) if f.name != "name"}
        entry = replace(self, **values)
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
            model="rlinf.models.embodiment.openvla_action_model:OpenVLAForRLActionPrediction",
            config="rlinf.models.embodiment.openvla_config:OpenVLAConfig",
            processor="rlinf.models.embodiment.openvla_processing:PrismaticProcessor",
            image_processor="rlinf.models.embodiment.openvla_processing:PrismaticImageProcessor",
            load_processor="rlinf.models.embodiment.openvla_processing:load_processor",
        ),
        "openvla_oft": ModelEntry(
            "openvla_oft",
            model="rlinf.models.embodiment.openvla_oft_action_model:OpenVLAOFTForRLActionPrediction",
            config="rlinf.models.embodiment.openvla_oft_config:OpenVLAOFTConfig",
            processor="rlinf.models.embodiment.openvla_processing:PrismaticProcessor",
            image_processor="rlinf.models.embodiment.openvla_processing:PrismaticImageProcessor",
            load_processor="rlinf.models.embodiment.openvla_processing:load_processor",
        ),
        "pi0": ModelEntry(
            "pi0",
            model="rlinf.models.embodiment.pi0_action_model:Pi0ForRLActionPrediction",
            config="rlinf.models.embodiment.pi0_config:Pi0Config",
            load_processor="rlinf.models.embodiment.pi0_processing:load_processor",
        ),
        "hf_vla": ModelEntry(
            "hf_vla",
            model="rlinf.models.embodiment.hf_vla_action_model:HfVlaForRLActionPrediction",
            config="rlinf.models.embodiment.hf_vla_config:HfVlaConfig",
            load_processor="rlinf.models.embodiment.hf_vla_processing:load_processor",
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
    model, tokenizer = _model_section(_section(cfg, "model")), _tokenizer_section(_section(cfg, "tokenizer"))
    entry = MODELS.get(model.model_type).resolve()
    path = tokenizer.tokenizer_model or model.model_path
    model_config = _load_config(entry, model, model.model_path or path)
    if entry.load_processor is not None:
        return model_config, entry.load_processor(tokenizer, model_config, path)
    if path is None:
        raise ConfigError(
            f"Model type '{entry.name}' needs a folder to load its processor from, but tokenizer.tokenizer_model and "
            "model.model_path are null; set tokenizer.tokenizer_model=<folder>."
        )
    return model_config, _load_standard_processor(entry, path, model.trust_remote_code)


def get_model(cfg: Any, override_config_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Build the policy: load ``cfg.model_path``, or draw random weights from ``cfg.init_config``.

    Args:
        cfg: The model section, as ``ModelConfig`` or mapping (missing keys take the defaults).
        override_config_kwargs: Fields of the model's own configuration to replace.

    Raises:
        ConfigError: Unknown model type or field, or a declared size that the checkpoint does not have.
        MissingDependencyError: ``attn_implementation=flash_attention_2`` without the package.
    """
    cfg = _model_section(cfg)
    entry = MODELS.get(cfg.model_type).resolve()
    dtype = torch_dtype_from_precision(cfg.precision)
    _check_attention(cfg.attn_implementation)
    config = _override(_load_config(entry, cfg, cfg.model_path), plain_container(override_config_kwargs or {}))
    _check_declared_sizes(cfg, config)
    arguments = {"hidden_size": cfg.hidden_size, "unnorm_key": cfg.unnorm_key, "action_dim": cfg.action_token_len}
    arguments |= _optional_arguments(entry.model, cfg)
    if cfg.model_path is None:
        model = _draw_model(entry, config, dtype, cfg, arguments)
    else:
        model = entry.model.from_pretrained(
            cfg.model_path,
            config=config,
            torch_dtype=dtype,
            attn_implementation=cfg.attn_implementation,
            low_cpu_mem_usage=cfg.low_cpu_mem_usage,
            trust_remote_code=cfg.trust_remote_code,
            **arguments,
        )
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if cfg.is_lora:
        from rlinf.models.lora import apply_lora

        model = apply_lora(model, cfg.lora, cfg.lora_path)
    return model


def build_policy(cfg: Any, override_config_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return ``get_model(cfg.model)`` with ``model.processor`` set, ready to act on observations."""
    section = _model_section(_section(cfg, "model"))
    _, processor = get_model_config_and_processor(cfg)
    model = get_model(section, override_config_kwargs)
    model.processor = processor
    return model


def torch_dtype_from_precision(precision: str | int | None) -> torch.dtype:
    """Return the dtype of the weights: ``bf16``, ``fp16``, ``fp32``; ``bf16-mixed`` keeps float32 weights.

    Raises:
        ConfigError: Not a precision, in this spelling. ``bf16-mixed`` is the only one that runs under autocast.
    """
    import torch

    names = {
        torch.float32: ("fp32", "float32", "32", "32-true", "bf16-mixed"),
        torch.bfloat16: ("bf16", "bfloat16", "bf16-true"),
        torch.float16: ("fp16", "float16", "16", "16-true", "half"),
    }
    for dtype, known in names.items():
        if str(precision) in known:
            return dtype
    close = "bf16-mixed" if str(precision).lower().endswith("mixed") else "bf16"
    raise ConfigError(
        f"model.precision is '{precision}'; required: fp32, bf16, fp16, or bf16-mixed. Type e.g. model.precision={close}"
    )


def declared_value(cfg: ModelConfig, name: str, folder: str | Path | None = None) -> Any:
    """Return a field of the model's own configuration, without loading weights.

    Args:
        cfg: The model section.
        name: Field, e.g. ``num_images_in_input``.
        folder: Checkpoint whose ``config.json`` is read; None: ``cfg.model_path``, else ``cfg.init_config``.

    Returns:
        The value, which may be the default of the config class; None if the model has no such field, or its
        configuration is not on this machine.
    """
    entry = MODELS.get(cfg.model_type)
    config_class = _import(entry.config) or getattr(_import(entry.model), "config_class", None)
    if config_class is None:
        return None
    values, folder = plain_container(cfg.init_config), folder or cfg.model_path
    if folder is not None:
        path = Path(folder).expanduser() / "config.json"
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8")) | plain_container(cfg.override_config)
    parameter = inspect.signature(config_class.__init__).parameters.get(name)
    default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return values.get(name, default)


def config_file_names(entry: ModelEntry) -> tuple[str, ...]:
    """Return the files of which a checkpoint folder holds one: ``config_files`` of the config class, else config.json."""
    return getattr(_import(entry.config), "config_files", ("config.json",))


def _import(target: Any) -> Any:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _register_auto_classes(entry: ModelEntry) -> None:
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor

    AutoConfig.register(entry.config.model_type or entry.name, entry.config, exist_ok=True)
    if entry.image_processor is not None:
        AutoImageProcessor.register(entry.config, slow_image_processor_class=entry.image_processor, exist_ok=True)
    if entry.processor is not None:
        AutoProcessor.register(entry.config, entry.processor, exist_ok=True)


def _section(cfg: Any, name: str) -> Any:
    if isinstance(cfg, Mapping) or not hasattr(cfg, name):
        return cfg.get(name, {}) if hasattr(cfg, "get") else {}
    return getattr(cfg, name)


def _model_section(cfg: Any) -> ModelConfig:
    return cfg if isinstance(cfg, ModelConfig) else from_mapping(ModelConfig, cfg, "model")


def _tokenizer_section(cfg: Any) -> TokenizerConfig:
    return cfg if isinstance(cfg, TokenizerConfig) else from_mapping(TokenizerConfig, cfg or {}, "tokenizer")


def _load_config(entry: ModelEntry, cfg: ModelConfig, path: str | None) -> Any:
    from transformers import AutoConfig

    if cfg.model_path is None and (cfg.init_config or path is None):
        if not cfg.init_config:
            raise ConfigError(
                f"model.model_path is null and model.init_config is empty: nothing to build '{entry.name}' from. "
                "Type model.model_path=<checkpoint folder>, or take a model that is drawn at random: model=openvla_tiny"
            )
        if entry.config is None:
            raise ConfigError(f"Model type '{entry.name}' has no config class; set model.model_path=<folder>.")
        _check_names(entry.config(), cfg.init_config, "model.init_config")
        return entry.config(**plain_container(cfg.init_config))
    if cfg.model_path is not None and cfg.init_config:
        raise ConfigError(
            f"model.init_config describes random weights, but model.model_path={cfg.model_path} names weights to load. "
            "Type model.model_path=null or '~model.init_config'"
        )
    loader = AutoConfig if entry.config is None else entry.config
    files = config_file_names(entry)
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in files):
        raise CheckpointError(
            f"model.model_path is '{path}', a folder without a {' or '.join(files)}. Type model.model_path=<checkpoint folder>"
        )
    try:
        config = loader.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
        return _override(config, plain_container(cfg.override_config), "model.override_config")
    except OSError as error:
        raise CheckpointError(
            f"model.model_path is '{path}', which is neither a checkpoint folder with a config.json nor a reachable "
            f"hub id ({error}). Type model.model_path=<folder>"
        ) from error


def _override(config: Any, overrides: dict[str, Any], where: str = "override_config_kwargs") -> Any:
    if not overrides:
        return config
    _check_names(config, overrides, where)
    values = config.to_dict()
    for name, value in overrides.items():
        merge = isinstance(value, Mapping) and name in type(config).sub_configs
        values[name] = {**values[name], **value} if merge else value
    return type(config).from_dict(values)


def _check_names(config: Any, values: Mapping[str, Any], where: str) -> None:
    known = set(vars(config)) | set(inspect.signature(type(config).__init__).parameters) - {"self", "kwargs"}
    for name in values:
        if name not in known:
            names = [each for each in known if not each.startswith("_")]
            raise ConfigError(f"{where} has the unknown key '{name}'.{did_you_mean(name, names)}")


def _check_declared_sizes(cfg: ModelConfig, config: Any) -> None:
    text = getattr(config, "text_config", config)
    vocab = getattr(config, "action_vocab_size", getattr(text, "vocab_size", None))
    images = [[size, size] for size in getattr(config, "image_sizes", [])]
    for key, declared, found in (
        ("hidden_size", cfg.hidden_size, getattr(text, "hidden_size", None)),
        ("vocab_size", cfg.vocab_size, vocab),
        ("image_size", cfg.image_size, images[0] if images else None),
    ):
        if declared is not None and found is not None and declared != found:
            raise ConfigError(
                f"model.{key} is {declared}, but the model has {found}. Type model.{key}={found} or model.{key}=null"
            )


def _check_attention(implementation: str) -> None:
    if implementation == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise MissingDependencyError(
                "model.attn_implementation is flash_attention_2, but the package flash-attn (or a GPU) is missing. "
                "Type model.attn_implementation=sdpa, or install it: pip install flash-attn"
            )


def _optional_arguments(model_class: type, cfg: ModelConfig) -> dict[str, Any]:
    accepted = inspect.signature(model_class.__init__).parameters
    if (
        "action_chunks_len" not in accepted
        and cfg.action_chunks_len != public_fields(ModelConfig)["action_chunks_len"].default
    ):
        raise ConfigError(
            f"model.action_chunks_len is {cfg.action_chunks_len}, but {model_class.__name__} takes none "
            "and predicts one action. Type model.action_chunks_len=1"
        )
    return {key: getattr(cfg, key) for key in OPTIONAL_ARGUMENTS if key in accepted}


def _draw_model(entry: ModelEntry, config: Any, dtype: torch.dtype, cfg: ModelConfig, arguments: dict[str, Any]) -> Any:
    if getattr(config, "norm_stats", None) == {}:
        from rlinf.models.embodiment.modules.normalizer import unit_range_stats

        config.norm_stats = unit_range_stats(cfg.action_token_len)
    return entry.model._from_config(config, dtype=dtype, attn_implementation=cfg.attn_implementation, **arguments)


def _load_standard_processor(entry: ModelEntry, path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    remote = {"trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **remote)
    parts = {"tokenizer": tokenizer}
    if entry.image_processor is not None:
        parts["image_processor"] = entry.image_processor.from_pretrained(path, **remote)
    if entry.processor is None:
        return AutoProcessor.from_pretrained(path, padding_side="left", **remote)
    return entry.processor.from_pretrained(path, **parts, **remote)


_EXPORTS = {"HuggingFacePolicy": "rlinf.models.hf_policy", "MegatronPolicy": "rlinf.models.megatron_policy"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
