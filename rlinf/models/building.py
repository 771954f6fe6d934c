"""Build a policy: load its configuration, check it, then load its weights, adapters and input processor."""

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.distributed.transfers import check_loaded
from rlinf.errors import CheckpointError, ConfigError, did_you_mean
from rlinf.models import MODELS, ModelEntry, import_target
from rlinf.models.base_weights import check_base
from rlinf.models.config import ModelConfig, TokenizerConfig
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.models.fallback import TEXT, folder_config, generic_kind
from rlinf.models.loading import (
    check_attention,
    check_fit,
    check_hub,
    check_model_type,
    dataset_statistics,
    no_lora,
    read_json,
    without_load_report,
)
from rlinf.models.precision import heads_in_float32, switch_off_dropout, torch_dtype_from_precision
from rlinf.options import fixed_by_settings, from_mapping, override_text, plain_container
from rlinf.run_folder import ADAPTER_FOLDER, MANIFEST_FILE, MODEL_FOLDER, STATISTICS_FILE
from rlinf.types import ClassAndConfig
from rlinf.wings import require_wing

logger = logging.getLogger("rlinf")

OPTIONAL_ARGUMENTS = (
    "action_chunks_len", "value_head", "detach_value", "features", "interpreter", "timeout_s", "connect_timeout_s",
)  # fmt: skip
"""Keys of the config's ``model`` section that are passed only to constructors that accept them."""


def entry_for(cfg: ModelConfig) -> ModelEntry:
    """Return the entry registered for ``cfg.model_type``, or else the generic one; raise ConfigError if neither exists."""
    return MODELS.get(cfg.model_type) if cfg.model_type in MODELS else _generic_entry(cfg)


def _generic_entry(cfg: ModelConfig) -> ModelEntry:
    if generic_kind(cfg, MODELS) != TEXT:
        return MODELS.get("hf_vla")
    require_wing("tokens", cfg.model_type)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    config = CONFIG_MAPPING[cfg.model_type] if cfg.model_type in CONFIG_MAPPING_NAMES else None
    return ModelEntry(cfg.model_type, model="rlinf.models:HFModel", config=config, acts=False)


def get_model_config_and_processor(cfg: Any) -> tuple[Any, Any]:
    """Return the model's configuration and its input processor, whose tokenizer pads on the left.

    ``cfg`` is a run configuration (dataclass or mapping). Both are read from ``tokenizer.tokenizer_model`` or, if unset,
    ``model.model_path``. If neither is set, ``model.init_config`` and a packaged processor are used.
    """
    section = _model_section(_section(cfg, "model"))
    return _load_or_fall_back(section, lambda entry: _config_and_processor(entry.resolve(), cfg))


def get_model(
    cfg: Any,
    override_config_kwargs: Mapping[str, Any] | None = None,
    allow_mismatch: Sequence[str] = (),
    *,
    deferred: bool = False,
) -> Any:
    """Build the policy from ``cfg.model_path``, or with random weights from ``cfg.init_config``.

    Args:
        cfg: The config's ``model`` section, as a ``ModelConfig`` or a mapping.
        override_config_kwargs: New values for fields of the model's own configuration.
        allow_mismatch: ``["lora.base_sha256"]`` accepts adapters that were trained on different base weights.
        deferred: Leave an action policy's weights in their files, if possible, until ``make_parallel`` reads them.
    """
    section = _model_section(cfg)
    return _load_or_fall_back(
        section, lambda entry: _load(entry, section, override_config_kwargs, allow_mismatch, deferred), log=True
    )


def build_policy(cfg: Any, override_config_kwargs: Mapping[str, Any] | None = None, *, deferred: bool = False) -> Any:
    """Return ``get_model(cfg.model)`` with ``model.processor`` set, ready to act on observations."""
    section = _model_section(_section(cfg, "model"))
    evaluation = _section(cfg, "evaluation")
    allowed = evaluation.get("allow_mismatch", ()) if isinstance(evaluation, Mapping) else evaluation.allow_mismatch

    def load(entry: ModelEntry) -> Any:
        _, processor = _config_and_processor(entry.resolve(), cfg)
        model = _load(entry, section, override_config_kwargs, allowed, deferred)
        model.processor = processor
        return model

    return _load_or_fall_back(section, load, log=True)


def model_of_folder(folder: str | Path) -> tuple[str | None, dict[str, Any]]:
    """Return a folder's model type and the settings it needs in addition to its path, or (None, {}) if unknown."""
    name = folder_config(str(folder)).get("model_type")
    if name is not None:
        return name, {}
    readers = {entry: import_target(MODELS.get(entry).folder_settings) for entry in MODELS}
    settings = {entry: read(folder) for entry, read in readers.items() if read is not None}
    return next(((entry, values) for entry, values in settings.items() if values is not None), (None, {}))


def local_settings(cfg: ModelConfig, folder: str | Path | None = None) -> ClassAndConfig | None:
    """Return a policy's class and configuration, without loading weights."""
    section = _model_section(cfg if folder is None else replace(cfg, model_path=str(folder), init_config={}))

    def load(entry: ModelEntry) -> ClassAndConfig | None:
        entry, path = entry.resolve(), section.model_path
        is_local = path is None or _has_config(entry, path)
        return (entry.model, load_model_config(entry, section, path)) if entry.acts and is_local else None

    return _load_or_fall_back(section, load)


@fixed_by_settings("model", path="model_path", architectures="override_config.architectures")
def _load_or_fall_back(cfg: ModelConfig, load: Callable[[ModelEntry], Any], log: bool = False) -> Any:
    """Load with the model type's registered class; if that raises and ``strict`` is off, fall back to the generic class."""
    entry, is_registered = entry_for(cfg), cfg.model_type in MODELS
    if log and not is_registered:
        chosen = entry.name if entry.acts else "HFModel"
        logger.warning("Model type '%s' is not registered; falling back to %s.", cfg.model_type, chosen)
    if cfg.strict or not is_registered:
        return load(entry)
    try:
        return load(entry)
    except Exception:
        declared = folder_config(cfg.model_path).get("model_type")
        if declared is None:
            raise
        generic = _generic_entry(replace(cfg, model_type=declared))
        logger.exception(
            "The class of model type '%s' cannot load '%s'; model.strict=false, so falling back to the generic class '%s'.",
            cfg.model_type, cfg.model_path, generic.name,
        )  # fmt: skip
    return load(generic)


def _load(
    entry: ModelEntry,
    cfg: ModelConfig,
    overrides: Mapping[str, Any] | None,
    allow_mismatch: Sequence[str],
    deferred: bool,
) -> Any:
    entry = entry.resolve()
    check_attention(cfg.attn_implementation)
    config = override_fields(load_model_config(entry, cfg, cfg.model_path), plain_container(overrides or {}))
    check_declared_sizes(cfg, config)
    check_prompt_suffix(cfg)
    dtype = torch_dtype_from_precision(cfg.precision)
    arguments = {"dtype": dtype, "attn_implementation": cfg.attn_implementation}
    if entry.acts:
        model = switch_off_dropout(_load_action_model(entry.model, cfg, config, arguments, deferred))
        model.feature_kind, model.prompt_suffix = cfg.features, cfg.prompt_suffix or ""
    elif cfg.model_path is None:
        model = entry.model.from_config(config, **arguments)
    else:
        arguments["trust_remote_code"] = cfg.trust_remote_code
        model = entry.model.from_pretrained(cfg.model_path, config=config, **arguments)
    if cfg.model_path is not None:
        present = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        check_loaded(present, cfg.model_path)
    if entry.acts and cfg.cuda_graph:
        model.check_cuda_graph(config, cfg.attn_implementation)
        model.use_cuda_graph()
    if cfg.gradient_checkpointing is True or cfg.compile:
        from rlinf.models.layers import set_training_options  # imports transformers

        set_training_options(model, recomputed=cfg.gradient_checkpointing is True, compiled=cfg.compile)
    if cfg.is_lora:
        from rlinf.models.lora import apply_lora  # imports peft

        check_base(cfg, allow_mismatch)
        model = apply_lora(model, cfg.lora, cfg.lora_path)
    return model


def check_prompt_suffix(cfg: ModelConfig) -> None:
    """Raise ConfigError if the policy's manifest records a prompt suffix and ``cfg`` sets none."""
    given = [path for path in (cfg.model_path, cfg.lora_path) if path is not None]
    for path in given if cfg.prompt_suffix is None else ():
        folder = Path(path).expanduser()
        in_checkpoint = folder.name in (MODEL_FOLDER, ADAPTER_FOLDER) and not (folder / MANIFEST_FILE).is_file()
        if suffix := _trained_suffix(folder.parent if in_checkpoint else folder):
            raise ConfigError(
                f"The policy of {path} was trained with the prompt suffix '{suffix}', but model.prompt_suffix is "
                f"null. Set model.prompt_suffix={suffix}, or model.prompt_suffix='' to use none"
            )


def _trained_suffix(folder: Path) -> str | None:
    """Return a manifest's ``prompt_suffix``, or None if it has none or was not written by rlinf."""
    try:
        return json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["preprocessing"].get("prompt_suffix")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _load_action_model(
    model_class: Any, cfg: ModelConfig, config: Any, arguments: Mapping[str, Any], deferred: bool
) -> Any:
    """Load a policy or initialise it with random weights; its constructor must accept ``ActionModel``'s arguments."""
    accepted = inspect.signature(model_class.__init__).parameters
    if "action_chunks_len" not in accepted and cfg.action_chunks_len != 1:
        raise ConfigError(
            f"model.action_chunks_len is {cfg.action_chunks_len}, but {model_class.__name__} predicts one action. "
            "Set model.action_chunks_len=1"
        )
    check_features(model_class, cfg)
    settings = {"hidden_size": cfg.hidden_size, "unnorm_key": cfg.unnorm_key, "action_dim": cfg.action_token_len}
    settings |= {key: getattr(cfg, key) for key in OPTIONAL_ARGUMENTS if key in accepted}
    if cfg.model_path is not None:
        check_has_statistics(config, Path(cfg.model_path))
        loading = {"torch_dtype": arguments["dtype"], "attn_implementation": cfg.attn_implementation}
        loading |= {"low_cpu_mem_usage": cfg.low_cpu_mem_usage, "trust_remote_code": cfg.trust_remote_code}
        if deferred and "deferred" in inspect.signature(model_class.from_pretrained).parameters:
            loading["deferred"] = True
        return heads_in_float32(_load_exactly(model_class, cfg.model_path, config=config, **loading, **settings))
    if hasattr(config, "norm_stats") and not config.norm_stats:
        config.norm_stats = unit_range_stats(cfg.action_token_len, getattr(config, "state_dim", None))
    return heads_in_float32(model_class._from_config(config, **arguments, **settings))


def check_has_statistics(config: Any, folder: Path) -> None:
    """Reject a folder that has no action statistics or a damaged ``dataset_statistics.json``."""
    dataset_statistics(folder)
    if getattr(config, "norm_stats", None) == {}:
        files = ", ".join(sorted(path.name for path in folder.glob("*.json"))) or "none"
        raise ConfigError(
            f"'{folder}' has no action statistics, neither in a file nor in config.json (JSON files: {files:.200}). Set "
            "model.unnorm_key=<env.name>, e.g. model.unnorm_key=tabletop, to use those of sft.dataset or the env, or add "
            f"the {STATISTICS_FILE} of its training data to the folder"
        )


def check_features(model_class: type, cfg: ModelConfig) -> None:
    """Reject ``model.features=token`` or ``keyframe`` for a policy without a language model, and ``inputs`` for one without an encoder."""
    if cfg.features == "inputs" and not model_class.implements("make_encoder"):
        raise ConfigError(
            f"model.features=inputs (set by algorithm.actor.name=scratch), but {model_class.__name__} has no encoder that an "
            "actor could train; expected model=mlp or model=cnn. Set algorithm.actor.name=residual model.features=hidden"
        )
    if cfg.features in ("token", "keyframe") and "features" not in inspect.signature(model_class.__init__).parameters:
        raise ConfigError(
            f"model.features={cfg.features}, but {model_class.__name__} has no hidden states of images and prompt; "
            "expected a policy with a language model. Set model.features=hidden"
        )


def _load_exactly(model_class: Any, path: str, **arguments: Any) -> Any:
    """Call ``from_pretrained``, but reject weights that do not fit; transformers would initialise those at random."""
    from transformers import PreTrainedModel

    theirs = inspect.getattr_static(PreTrainedModel, "from_pretrained")
    if inspect.getattr_static(model_class, "from_pretrained", None) is not theirs:
        return model_class.from_pretrained(path, **arguments)
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with without_load_report():
        model, info = model_class.from_pretrained(path, **arguments)
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    # A head may be completely absent from the checkpoint or from the model.
    for head in getattr(model_class, "trained_in_full", ("value_head",)):
        head_names = {key for key in model.state_dict() if key.split(".")[0] == head}
        missing -= head_names if head_names <= missing else set()
        unexpected -= {key for key in unexpected if not head_names and key.split(".")[0] == head}
    check_fit(path, {**info, "missing_keys": missing, "unexpected_keys": unexpected})
    return model


def _config_and_processor(entry: ModelEntry, cfg: Any) -> tuple[Any, Any]:
    model, tokenizer = _model_section(_section(cfg, "model")), _section(cfg, "tokenizer")
    if not isinstance(tokenizer, TokenizerConfig):
        tokenizer = from_mapping(TokenizerConfig, tokenizer or {}, "tokenizer")
    folder = tokenizer.tokenizer_model and os.path.expanduser(tokenizer.tokenizer_model)
    tokenizer, path = replace(tokenizer, tokenizer_model=folder), folder or model.model_path
    model_config = load_model_config(entry, model, model.model_path or path)
    if entry.load_processor is not None:
        return model_config, entry.load_processor(tokenizer, model_config, path)
    if path is None:
        raise ConfigError(
            f"Model type '{entry.name}' needs a folder to load its processor from, but tokenizer.tokenizer_model and "
            "model.model_path are null. Set tokenizer.tokenizer_model=<folder>"
        )
    return model_config, _standard_processor(entry, path, model.trust_remote_code)


def _standard_processor(entry: ModelEntry, path: str, trust_remote_code: bool) -> Any:
    """Load a folder's tokenizer and image processor into ``entry.processor``, or use the Auto classes if it is unset."""
    from transformers import AutoProcessor, AutoTokenizer

    remote = {"trust_remote_code": trust_remote_code}
    if entry.processor is None:
        return AutoProcessor.from_pretrained(path, padding_side="left", **remote)
    parts = {"tokenizer": AutoTokenizer.from_pretrained(path, padding_side="left", **remote)}
    if entry.image_processor is not None:
        parts["image_processor"] = entry.image_processor.from_pretrained(path, **remote)
    return entry.processor.from_pretrained(path, **parts, **remote)


def config_file_names(entry: ModelEntry) -> tuple[str, ...]:
    """Return the possible names of the configuration file in a checkpoint folder."""
    return getattr(import_target(entry.config), "config_files", ("config.json",))


def _has_config(entry: ModelEntry, folder: str | Path) -> bool:
    return any((Path(folder) / name).is_file() for name in config_file_names(entry))


def random_weights(model_type: str) -> str:
    """Return the override that gives a model type random weights: its packaged config group, or explicit sizes."""
    for name in (f"{model_type}_tiny", model_type):
        group = Path(__file__).parents[1] / "config" / "model" / f"{name}.yaml"
        if group.is_file() and "init_config:" in group.read_text(encoding="utf-8"):
            return f"model={name}"
    return "model.init_config=<its sizes>"


def load_model_config(entry: ModelEntry, cfg: ModelConfig, path: str | None) -> Any:
    """Build the model's configuration from ``init_config``, or read it from the folder and merge in ``override_config``."""
    if entry.is_remote:
        return entry.config.from_section(cfg)
    if cfg.model_path is None and (cfg.init_config or path is None):
        if not cfg.init_config:
            raise ConfigError(
                f"model.model_path is null and model.init_config is empty, so '{entry.name}' cannot be built. "
                f"Set model.model_path=<checkpoint folder>, or {random_weights(entry.name)} for random weights"
            )
        if entry.config is None:
            raise ConfigError(f"Model type '{entry.name}' has no config class; set model.model_path=<folder>.")
        values = plain_container(cfg.init_config)
        if getattr(entry.config, "is_plain", False):
            return from_mapping(entry.config, values, "model.init_config")
        _check_names(entry.config(), values, "model.init_config")
        return entry.config(**values)
    if cfg.model_path is not None and cfg.init_config:
        raise ConfigError(
            f"model.init_config describes random weights, but model.model_path={cfg.model_path} loads existing ones. "
            "Set model.model_path=null or '~model.init_config'"
        )
    from transformers import AutoConfig, PreTrainedConfig

    loader = AutoConfig if entry.config is None else entry.config
    if Path(path).is_dir() and not _has_config(entry, path):
        no_lora(path)
        files = config_file_names(entry)
        raise CheckpointError(
            f"model.model_path is '{path}', a folder without a {' or '.join(files)}. Set model.model_path=<checkpoint folder>"
        )
    check_hub(path)
    try:
        if (Path(path) / "config.json").is_file():
            check_model_type(entry.config, read_json(Path(path) / "config.json"), path)
        elif hasattr(entry.config, "accepted_model_types") and not Path(path).is_dir():
            check_model_type(entry.config, PreTrainedConfig.get_config_dict(path)[0], path)
        config = loader.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
        return override_fields(config, plain_container(cfg.override_config), "model.override_config")
    except OSError as error:
        raise CheckpointError(
            f"model.model_path is '{path}', which is neither a checkpoint folder with a config.json nor a reachable "
            f"hub id ({error}). Set model.model_path=<folder>"
        ) from error


def override_fields(config: Any, overrides: dict[str, Any], where: str = "override_config_kwargs") -> Any:
    """Return ``config`` with the fields in ``overrides`` replaced; error messages call the option ``where``."""
    if not overrides:
        return config
    _check_names(config, overrides, where)
    merged = _merged(config.to_dict(), overrides)
    if "norm_stats" in overrides:
        # Replaced, not merged: statistics of previous data sets must not remain.
        merged["norm_stats"] = overrides["norm_stats"]
    return type(config).from_dict(merged)


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both else value
    return result


def _check_names(config: Any, values: Mapping[str, Any], where: str) -> None:
    known = set(vars(config)) | set(inspect.signature(type(config).__init__).parameters) - {"self", "kwargs"}
    for name in values:
        if name not in known:
            public = [key for key in known if not key.startswith("_")]
            raise ConfigError(f"{where} has the unknown key '{name}'.{did_you_mean(name, public)}")


def check_declared_sizes(cfg: ModelConfig, config: Any) -> None:
    """Reject sizes in the config's ``model`` section that contradict the model's own configuration."""
    text = getattr(config, "text_config", config)
    vocab = getattr(config, "action_vocab_size", getattr(text, "vocab_size", None))
    images = [[size, size] for size in getattr(config, "image_sizes", [])]
    for key, declared, actual in (
        ("hidden_size", cfg.hidden_size, getattr(text, "hidden_size", None)),
        ("vocab_size", cfg.vocab_size, vocab),
        ("image_size", cfg.image_size, images[0] if images else None),
    ):
        if declared is not None and actual is not None and declared != actual:
            raise ConfigError(
                f"model.{key} is {override_text(declared)}, but the model has {override_text(actual)}. "
                f"Set model.{key}={override_text(actual)} or model.{key}=null"
            )


def _section(cfg: Any, name: str) -> Any:
    if isinstance(cfg, Mapping) or not hasattr(cfg, name):
        return cfg.get(name, {}) if hasattr(cfg, "get") else {}
    return getattr(cfg, name)


def _model_section(cfg: Any) -> ModelConfig:
    section = cfg if isinstance(cfg, ModelConfig) else from_mapping(ModelConfig, cfg, "model")
    paths = {name: getattr(section, name) for name in ("model_path", "lora_path")}
    return replace(section, **{name: path and os.path.expanduser(path) for name, path in paths.items()})
