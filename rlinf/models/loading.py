"""The steps of loading a model: its configuration, the checks before its weights, and the standard processor."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError, did_you_mean
from rlinf.imports import import_string
from rlinf.models.config import ModelConfig
from rlinf.options import override_text, plain_container, public_fields

if TYPE_CHECKING:
    from rlinf.models import ModelEntry

OPTIONAL_ARGUMENTS = ("action_chunks_len", "value_head", "detach_value")
"""Keys of the model section that are passed to a model's constructor only where it names them."""

REPLACED_WHOLE = ("norm_stats",)
"""Fields of which an override leaves nothing: the data sets of other robots must not stay next to those given."""


def typed(override: str) -> str:
    """Return the sentence that ends an error about a field of a model's own configuration."""
    return f"Set model.override_config.{override}, or model.init_config.{override} for random weights"


def import_target(target: Any) -> Any:
    """Return what ``"module:attribute"`` names; anything else as it is."""
    if not isinstance(target, str):
        return target
    return import_string(target)


def config_file_names(entry: ModelEntry) -> tuple[str, ...]:
    """Return the files of which a checkpoint folder holds one: ``config_files`` of the config class, else config.json."""
    return getattr(import_target(entry.config), "config_files", ("config.json",))


def values_refused_for_rl(entry: ModelEntry) -> Mapping[str, Mapping[str, str]]:
    """Return ``refused_for_rl`` of the config class: field, its values without log-probabilities, what to take instead."""
    return getattr(import_target(entry.config), "refused_for_rl", {})


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint folder.

    Raises:
        CheckpointError: The file holds none.
    """
    found = ""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        found = f"it holds a {type(values).__name__}"
    except ValueError as error:  # of the JSON, or of its encoding
        found = str(error)
    raise CheckpointError(f"'{path}' is not a JSON object ({found}). Set model.model_path=<another folder>")


def checkpoint_folder(path: str | Path) -> Path:
    """Return a checkpoint's folder; a hub id (``owner/name``) is downloaded.

    Raises:
        CheckpointError: Neither a folder nor a hub id that can be reached.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    reason = "there is no such folder"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(str(path)))
        except (OSError, ValueError) as error:
            reason = f"there is no such folder, and as a hub id it cannot be downloaded: {error}"
    raise CheckpointError(f"model.model_path is '{path}': {reason}. Set model.model_path=<checkpoint folder>")


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers' table of weights that do not fit off the terminal, of which ``check_fit`` tells in one sentence."""
    theirs = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return " LOAD REPORT" not in record.getMessage()

    theirs.addFilter(is_other)
    try:
        yield
    finally:
        theirs.removeFilter(is_other)


def check_fit(folder: str | Path, loading_info: Mapping[str, Any], **cure: Any) -> None:
    """Refuse weights that are not exactly those of the model.

    Args:
        folder: Where they came from.
        loading_info: ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys``, as transformers reports them.
        **cure: What mends it, besides another folder.

    Raises:
        CheckpointError: One of the three is not empty.
    """
    missing, unexpected = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
    mismatched = [str(key) for key in loading_info["mismatched_keys"]]
    if missing or unexpected or mismatched:
        raise CheckpointError(
            f"The weights in '{folder}' do not fit its config.json: missing {missing[:5]} ({len(missing)}), "
            f"unexpected {unexpected[:5]} ({len(unexpected)}), of another shape {mismatched[:5]} "
            f"({len(mismatched)}).",
            path="<another folder>",
            **cure,
        )


def check_model_type(config_class: Any, values: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint of another model than the one asked for.

    Args:
        config_class: May declare ``accepted_model_types``, the ``model_type`` (or ``type``) of the checkpoints that it
            reads; None among them: a checkpoint that names none. Without the declaration, nothing is checked.
        values: ``config.json``.
        path: Where it came from.

    Raises:
        CheckpointError: With the type that was found.
    """
    accepted = getattr(config_class, "accepted_model_types", None)
    found = values.get("model_type", values.get("type"))
    if accepted is None or found in accepted:
        return
    from rlinf.models import MODELS

    override = f"model.model_type={found}" if found in MODELS else "model.model_path=<another folder>"
    raise CheckpointError(
        f"The config.json in '{path}' is of model type '{found}', but the model that was asked for reads "
        f"{' and '.join(repr(name) for name in accepted if name is not None)}. Set {override}"
    )


def load_model_config(entry: ModelEntry, cfg: ModelConfig, path: str | None) -> Any:
    """Build the model's own configuration: from ``init_config``, or from the folder with ``override_config`` laid over.

    Args:
        entry: What ``cfg.model_type`` stands for.
        cfg: The model section.
        path: Folder or hub id; None: ``init_config`` only.

    Raises:
        ConfigError: There is nothing to build it from, or a field is unknown.
        CheckpointError: The folder has no configuration, or that of another model.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if cfg.model_path is None and (cfg.init_config or path is None):
        if not cfg.init_config:
            raise ConfigError(
                f"model.model_path is null and model.init_config is empty: nothing to build '{entry.name}' from. "
                "Set model.model_path=<checkpoint folder>, or take a model that is drawn at random: model=openvla_tiny"
            )
        if entry.config is None:
            raise ConfigError(f"Model type '{entry.name}' has no config class; set model.model_path=<folder>.")
        _check_names(entry.config(), cfg.init_config, "model.init_config")
        return entry.config(**plain_container(cfg.init_config))
    if cfg.model_path is not None and cfg.init_config:
        raise ConfigError(
            f"model.init_config describes random weights, but model.model_path={cfg.model_path} names weights to load. "
            "Set model.model_path=null or '~model.init_config'"
        )
    loader = AutoConfig if entry.config is None else entry.config
    files = config_file_names(entry)
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in files):
        raise CheckpointError(
            f"model.model_path is '{path}', a folder without a {' or '.join(files)}. Set model.model_path=<checkpoint folder>"
        )
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
    """Return ``config`` with fields replaced; ``where`` names the option in messages.

    Raises:
        ConfigError: A field is unknown.
    """
    if not overrides:
        return config
    _check_names(config, overrides, where)
    values = config.to_dict()
    whole = {name: value for name, value in overrides.items() if name in REPLACED_WHOLE}
    return type(config).from_dict(_merged(values, overrides) | whole)


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ``overrides`` over ``values``, mapping by mapping, so that what is not named stays."""
    result = dict(values)
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both else value
    return result


def _check_names(config: Any, values: Mapping[str, Any], where: str) -> None:
    known = set(vars(config)) | set(inspect.signature(type(config).__init__).parameters) - {"self", "kwargs"}
    for name in values:
        if name not in known:
            names = [each for each in known if not each.startswith("_")]
            raise ConfigError(f"{where} has the unknown key '{name}'.{did_you_mean(name, names)}")


def check_declared_sizes(cfg: ModelConfig, config: Any) -> None:
    """Refuse sizes of the model section that the model's own configuration does not have.

    Raises:
        ConfigError: With both values.
    """
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
                f"model.{key} is {override_text(declared)}, but the model has {override_text(found)}. "
                f"Set model.{key}={override_text(found)} or model.{key}=null"
            )


def check_attention(implementation: str) -> None:
    """Raise MissingDependencyError if FlashAttention is asked for and not installed."""
    if implementation == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise MissingDependencyError(
                "attn_implementation='flash_attention_2', but the package flash-attn (or a GPU) is missing. Install it with "
                "pip install flash-attn, or do without.",
                attn_implementation="sdpa",
            )


def _optional_arguments(model_class: type, cfg: ModelConfig) -> dict[str, Any]:
    accepted = inspect.signature(model_class.__init__).parameters
    if (
        "action_chunks_len" not in accepted
        and cfg.action_chunks_len != public_fields(ModelConfig)["action_chunks_len"].default
    ):
        raise ConfigError(
            f"model.action_chunks_len is {cfg.action_chunks_len}, but {model_class.__name__} takes none "
            "and predicts one action. Set model.action_chunks_len=1"
        )
    return {key: getattr(cfg, key) for key in OPTIONAL_ARGUMENTS if key in accepted}


def load_action_model(entry: ModelEntry, cfg: ModelConfig, config: Any) -> Any:
    """Load or draw a registered model, which takes the arguments of action models."""
    from rlinf.models.precision import torch_dtype_from_precision

    dtype = torch_dtype_from_precision(cfg.precision)
    arguments = {"hidden_size": cfg.hidden_size, "unnorm_key": cfg.unnorm_key, "action_dim": cfg.action_token_len}
    arguments |= _optional_arguments(entry.model, cfg)
    if cfg.model_path is not None:
        model = _load_exactly(
            entry.model,
            cfg.model_path,
            config=config,
            torch_dtype=dtype,
            attn_implementation=cfg.attn_implementation,
            low_cpu_mem_usage=cfg.low_cpu_mem_usage,
            trust_remote_code=cfg.trust_remote_code,
            **arguments,
        )
        return heads_in_float32(model)
    if hasattr(config, "norm_stats") and not config.norm_stats:
        from rlinf.models.embodiment.modules.normalizer import unit_range_stats

        config.norm_stats = unit_range_stats(cfg.action_token_len, getattr(config, "state_dim", None))
    return heads_in_float32(
        entry.model._from_config(config, dtype=dtype, attn_implementation=cfg.attn_implementation, **arguments)
    )


def heads_in_float32(model: Any) -> Any:
    """Turn what ``model.float32_modules`` names into float32, in place; ``from_pretrained`` has kept the digits of files."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.split(".")[0] in getattr(model, "float32_modules", ()) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def _load_exactly(model_class: Any, path: str, **arguments: Any) -> Any:
    """Call ``from_pretrained``; where that is transformers' own, which draws what does not fit at random, refuse the folder."""
    from transformers import PreTrainedModel

    own, theirs = (inspect.getattr_static(each, "from_pretrained", None) for each in (model_class, PreTrainedModel))
    if own is not theirs:
        return model_class.from_pretrained(path, **arguments)
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with without_load_report():
        model, info = model_class.from_pretrained(path, **arguments)
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    for head in getattr(model_class, "trained_in_full", ("value_head",)):  # may be absent as a whole, on either side
        own = {key for key in model.state_dict() if key.split(".")[0] == head}
        missing -= own if own <= missing else set()
        unexpected -= {key for key in unexpected if not own and key.split(".")[0] == head}
    check_fit(path, {**info, "missing_keys": missing, "unexpected_keys": unexpected})
    return model


def load_generic_model(entry: ModelEntry, cfg: ModelConfig, config: Any) -> Any:
    """Load or draw an ``HFModel``."""
    from rlinf.models.precision import torch_dtype_from_precision

    arguments = {
        "dtype": torch_dtype_from_precision(cfg.precision), "attn_implementation": cfg.attn_implementation
    }  # fmt: skip
    if cfg.model_path is None:
        return entry.model.from_config(config, **arguments)
    return entry.model.from_pretrained(
        cfg.model_path, config=config, trust_remote_code=cfg.trust_remote_code, **arguments
    )


def load_standard_processor(entry: ModelEntry, path: str, trust_remote_code: bool) -> Any:
    """Load tokenizer and image processor of a folder into the processor class of ``entry``, else by the Auto classes."""
    from transformers import AutoProcessor, AutoTokenizer

    remote = {"trust_remote_code": trust_remote_code}
    if entry.processor is None:
        return AutoProcessor.from_pretrained(path, padding_side="left", **remote)
    parts = {"tokenizer": AutoTokenizer.from_pretrained(path, padding_side="left", **remote)}
    if entry.image_processor is not None:
        parts["image_processor"] = entry.image_processor.from_pretrained(path, **remote)
    return entry.processor.from_pretrained(path, **parts, **remote)
