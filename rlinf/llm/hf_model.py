"""A wrapper for training any Hugging Face language or vision-language model without family-specific code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mxfp4Config, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlinf.distributed.deferred import open_tensors
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.layers import accept_saving
from rlinf.models.loading import check_fit, check_hub, no_lora, read_json, without_load_report
from rlinf.models.weights_in_files import READ_WHOLE, NotDeferredError, defer_weights, without_weights

AUTO_CLASSES = (AutoModelForImageTextToText, AutoModelForCausalLM)
"""Supported classes are registered with one of these; the first match is used if ``architectures`` is empty."""

WANTED_FILES = ("*.json", "*.safetensors", "*.py")
"""Files to download from a hub id whose weights are read in rows."""


class HFModel(nn.Module):
    """A causal or image-text-to-text transformers model with the methods that training, FSDP and weight sync need."""

    trained_in_full: ClassVar[tuple[str, ...]] = ()
    base_model_prefix: ClassVar[str] = "model"  # PEFT looks for the wrapped model under this attribute

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = accept_saving(model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: PreTrainedConfig | None = None,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        deferred: bool = False,
    ) -> HFModel:
        """Load a checkpoint. Weights are read one by one into an empty model, so there is never a second copy in memory.

        Args:
            path: Hub id, or folder with safetensors (one file, or shards and an index).
            config: Configuration to use instead of the folder's.
            dtype: Number format of the weights. Mxfp4 experts (GPT-OSS) are dequantised, which is exact even in 16 bits.
            attn_implementation: Attention kernel; transformers chooses for None, or if the class lacks ``sdpa``.
            deferred: Leave the weights in their files, if possible (``rlinf.models.weights_in_files``).
        """
        config = config or load_config(path, trust_remote_code)
        model_class = model_class_of(config, path, trust_remote_code)
        arguments = {"dtype": dtype, **_attention(model_class, attn_implementation)}
        quantization, because = _dequantization(config), None
        if deferred:
            try:
                return cls(_deferred(model_class, config, path, trust_remote_code, **arguments))
            except NotDeferredError as reason:
                because = str(reason)
        try:
            with without_load_report():
                model, info = model_class.from_pretrained(
                    path,
                    config=config,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported below, together with all other mismatches
                    trust_remote_code=trust_remote_code,
                    **arguments,
                    **quantization,
                )
        except (OSError, SafetensorError) as error:
            message = f"The weights of '{path}' cannot be read: {error}."
            raise CheckpointError(message, path="<complete checkpoint folder>") from error
        check_fit(path, info)
        # If the class is not part of transformers, loading leaves these buffers uninitialised.
        computed = _unsaved_buffers(without_weights(model_class, config, **arguments))
        for key, (buffers, name) in _unsaved_buffers(model).items():
            buffers[name] = computed[key][0][name]
        setattr(model, READ_WHOLE, because)
        if not quantization:
            return cls(model)
        # Reset, because save_pretrained would otherwise write packed weights.
        model._weight_conversions = None
        return cls(model).to(dtype)

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        meta: bool = False,
    ) -> HFModel:
        """Build a model with random weights; with ``meta``, they stay on the meta device until ``materialize`` is called."""
        model_class = model_class_of(config)
        arguments = {"dtype": dtype, **_attention(model_class, attn_implementation)}
        if meta:
            return cls(without_weights(model_class, config, **arguments))
        return cls(model_class._from_config(copy.deepcopy(config), **arguments))

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return type(self.model)

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def fsdp_wrap_modules(self) -> tuple[str, ...]:
        """Names of the layer classes that FSDP shards as units: those that transformers marks as not to be split."""
        present = {type(module).__name__ for module in self.model.modules()}
        return tuple(sorted(set(self.model._no_split_modules or ()) & present))

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Name suffixes of the linear layers inside the units of ``fsdp_wrap_modules``."""
        # Expert routers are excluded: they return more than a matrix product, so an adapter's output cannot be added.
        units = [module for module in self.model.modules() if type(module).__name__ in self.fsdp_wrap_modules]
        layers = [item for unit in units for item in unit.named_modules() if isinstance(item[1], (nn.Linear, Conv1D))]
        names = {name.rpartition(".")[2] for name, layer in layers if "Router" not in type(layer).__name__}
        return tuple(sorted(names))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the wrapped model on ``input_ids [B, S]`` and any further inputs; its output contains ``logits [B, S, V]``."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)

    def materialize(self, device: str | torch.device) -> HFModel:
        self.to_empty(device=device)
        self.model.tie_weights()
        return self

    def public_state_dict(self, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the weights with the names and shapes of a public checkpoint; tied weights appear once.

        These differ from the model's own if transformers renames or joins weights while loading (VLMs, experts).
        ``state_dict`` contains gathered weights under the names in ``self.state_dict()``; None uses the model's own.
        """
        weights = self._inner_names(state_dict)
        tied = getattr(self.model, "all_tied_weights_keys", {})
        return revert_weight_conversion(self.model, {name: weights[name] for name in weights if name not in tied})

    def save_pretrained(
        self, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Write a folder that transformers can load; for ``state_dict`` see ``public_state_dict``."""
        self.model.save_pretrained(folder, state_dict=self._inner_names(state_dict), **kwargs)

    def _inner_names(self, state_dict: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        weights = self.state_dict() if state_dict is None else state_dict
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HFModel:
        """Convert or move weights; buffers outside the state dict change device but keep their dtype."""
        # Rotary frequencies rounded to 16 bits would result in wrong positions.
        buffers_before = [(buffers, name, buffers[name]) for buffers, name in _unsaved_buffers(self).values()]
        super()._apply(fn, recurse)
        for buffers, name, buffer in buffers_before:
            device = buffers[name].device
            buffers[name] = buffer if device.type == "meta" else buffer.to(device)
        return self


def load_config(path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the configuration of a folder or hub id. Raise CheckpointError on failure, ConfigError for an unknown model type."""
    check_hub(path)
    no_lora(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        message = f"'{path}' is neither a checkpoint folder with a config.json nor a reachable hub id ({error})."
        raise CheckpointError(message, path="<folder>") from error
    except ValueError as error:
        message = f"Transformers does not know the model type of '{path}', and the folder's own code is not trusted ({error})."
        raise ConfigError(message, trust_remote_code=True, path="<a different folder>") from error


def model_shapes(path: str | Path, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32) -> HFModel:
    """Return the model that ``HFModel.from_pretrained`` would load, on the meta device and without reading weights."""
    config = load_config(path, trust_remote_code)
    return HFModel(without_weights(model_class_of(config, path, trust_remote_code), config, dtype=dtype))


def model_class_of(
    config: PreTrainedConfig, path: str | Path | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """Return the class named in ``config.architectures``, which must be a single causal or image-text-to-text model."""
    names = list(config.architectures or ())
    owner = path or type(config).__name__
    if len(names) > 1:
        message = f"architectures in config.json of '{owner}' lists {len(names)} ({', '.join(names)}); expected one."
        raise ConfigError(message, architectures=names[:1])
    code = getattr(config, "auto_map", None) or {}
    for auto_class in AUTO_CLASSES:
        model_class = auto_class._model_mapping[type(config)] if type(config) in auto_class._model_mapping else None
        if model_class is None and trust_remote_code and path is not None and auto_class.__name__ in code:
            model_class = get_class_from_dynamic_module(code[auto_class.__name__], str(path))
        if model_class is not None and names in ([], [model_class.__name__]):
            return model_class
    raise ConfigError(
        f"'{owner}' has the model type '{config.model_type}' and architectures {names}; expected a class "
        f"supported by {' or '.join(known.__name__ for known in AUTO_CLASSES)}, from transformers or the folder's trusted code.",
        trust_remote_code=True,
        path="<a different folder>",
    )


def check_tensor_parallel(config: PreTrainedConfig, tp_size: int, key: str) -> None:
    """Check that a rollout engine's tensor-parallel size (setting ``key``) divides the number of attention heads."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads

    # There may be fewer key-value heads than ranks if their number divides the ranks: vLLM then replicates them.
    def rejected(size: int) -> str | None:
        if heads % size:
            return f"num_attention_heads={heads}"
        return f"num_key_value_heads={kv_heads}" if kv_heads % size and size % kv_heads else None

    if rejected(tp_size):
        fitting = max(size for size in range(1, tp_size) if not rejected(size))
        problem = f"{key}={tp_size} does not divide {rejected(tp_size)} of '{config.model_type}'"
        raise ConfigError(f"{problem}. Set {key}={fitting}")


def _deferred(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    path: str | Path,
    trust_remote_code: bool,
    **arguments: Any,
) -> PreTrainedModel:
    """Build the model that transformers' ``from_pretrained`` would load, but leave its weights in their files."""
    if getattr(config, "quantization_config", None) is not None:
        raise NotDeferredError("its weights are quantised")
    try:
        files = weight_files(folder_of(path))
    except (OSError, ValueError) as error:
        raise NotDeferredError(f"'{path}' cannot be downloaded as a folder") from error
    if not files:
        raise NotDeferredError("its safetensors files are missing or incomplete")
    try:
        tensors = open_tensors(files)
    except CheckpointError as error:
        # The regular loader then raises a more specific error.
        raise NotDeferredError("its files cannot be opened") from error
    model = without_weights(model_class, config, **arguments)
    conversions = get_model_conversion_mapping(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    renamings = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]
    if any(rename_source_key(name, renamings, converters) != (name, None) for name in tensors):
        raise NotDeferredError("transformers converts its weights while reading them")
    if model._get_dtype_plan(arguments["dtype"]):
        raise NotDeferredError("parts of it stay in float32")
    defer_weights(model, tensors)
    model.config.name_or_path = str(path)
    if model.can_generate():
        nothing = ("generation_config", "from_auto_class", "from_pipeline", "cache_dir", "proxies", "token", "revision")
        options = {"pretrained_model_name_or_path": path, "trust_remote_code": trust_remote_code, "subfolder": ""}
        options |= dict.fromkeys(nothing) | {"force_download": False, "local_files_only": False}
        model.adjust_generation_fn(**options)
    return model.eval()


def folder_of(path: str | Path, patterns: Sequence[str] = WANTED_FILES) -> Path:
    """Return a model's folder. For a hub id, download the files that match ``patterns`` first."""
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else Path(snapshot_download(str(path), allow_patterns=list(patterns)))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads: a single file, or the shards in the index; empty if any is missing."""
    index, names = folder / SAFE_WEIGHTS_INDEX_NAME, [SAFE_WEIGHTS_NAME]
    if not (folder / SAFE_WEIGHTS_NAME).is_file() and index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    files = [folder / name for name in names]
    return files if all(file.is_file() for file in files) else []


def _unsaved_buffers(model: nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Map the full name of each buffer outside the state dict to its module's buffer dict and its name there."""
    return {
        f"{prefix}.{name}": (module._buffers, name)
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def _attention(model_class: type[PreTrainedModel], implementation: str | None) -> dict[str, str]:
    if implementation is None or (implementation == "sdpa" and not model_class._supports_sdpa):
        return {}
    kernels = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if implementation not in kernels and "/" not in implementation:  # a name with a slash is a kernel on the hub
        message = f"attn_implementation='{implementation}'; expected one of {', '.join(kernels)}."
        raise ConfigError(message, attn_implementation="sdpa")
    if implementation == "flash_attention_2" and not model_class._supports_flash_attn:
        message = f"attn_implementation='flash_attention_2' does not exist for {model_class.__name__}."
        raise ConfigError(message, attn_implementation="sdpa")
    return {"attn_implementation": implementation}


def _dequantization(config: PreTrainedConfig) -> dict[str, Any]:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return {}
    values = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(values.get("quant_method"))
    if method == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    message = f"The checkpoint is quantised with '{method}'; required for training: 16-bit, 32-bit or mxfp4 weights."
    raise ConfigError(message, path="<folder of the unquantised model>")


HFLLMModel = HFModel
"""Former name of ``HFModel``, which used to wrap only language models."""
