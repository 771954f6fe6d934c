"""Any Hugging Face language or vision-language model, wrapped for training without code for its family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
from transformers.generation import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlinf.distributed.deferred import open_tensors
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.loading import check_fit, check_hub, no_lora, read_json, without_load_report
from rlinf.models.weights_in_files import READ_WHOLE, NotDeferredError, defer_weights, without_weights

AUTO_CLASSES = (AutoModelForImageTextToText, AutoModelForCausalLM)
"""A class is usable if one of these knows it; the first one wins if ``architectures`` is empty."""

WANTED_FILES = ("*.json", "*.safetensors", "*.py")
"""Files of a hub id to download when its weights are read in rows."""


class HFModel(nn.Module):
    """A causal or image-text-to-text model of transformers with what training, FSDP and weight sync need."""

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
        """Load a checkpoint. Weights are read one by one into an empty model, so memory never holds a second copy.

        Args:
            path: Folder with safetensors (one file, or shards and an index), or hub id.
            config: Replaces the folder's configuration.
            dtype: Number format of the weights. Mxfp4 experts (GPT-OSS) are dequantised, which is exact in 16 bits too.
            attn_implementation: Attention kernel; None, or ``sdpa`` for a class without it: transformers' choice.
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
                    ignore_mismatched_sizes=True,  # reported below, with everything else that does not fit
                    trust_remote_code=trust_remote_code,
                    **arguments,
                    **quantization,
                )
        except (OSError, SafetensorError) as error:
            message = f"The weights of '{path}' cannot be read: {error}."
            raise CheckpointError(message, path="<complete checkpoint folder>") from error
        check_fit(path, info)
        # For classes outside transformers, loading leaves these buffers uninitialised.
        computed = _unsaved_buffers(without_weights(model_class, config, **arguments))
        for key, (buffers, name) in _unsaved_buffers(model).items():
            buffers[name] = computed[key][0][name]
        setattr(model, READ_WHOLE, because)
        if not quantization:
            return cls(model)
        # Otherwise save_pretrained would write packed weights.
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
        """Build a model with random weights; with ``meta``, weights stay on the meta device for ``materialize``."""
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
        """Names of the layer classes that FSDP shards as units, because transformers must not split them."""
        present = {type(module).__name__ for module in self.model.modules()}
        return tuple(sorted(set(self.model._no_split_modules or ()) & present))

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Name suffixes of the linear layers inside the units of ``fsdp_wrap_modules``."""
        # Expert routers are left out: they return more than a product, so an adapter cannot add to it.
        units = [module for module in self.model.modules() if type(module).__name__ in self.fsdp_wrap_modules]
        layers = [item for unit in units for item in unit.named_modules() if isinstance(item[1], (nn.Linear, Conv1D))]
        names = {name.rpartition(".")[2] for name, layer in layers if "Router" not in type(layer).__name__}
        return tuple(sorted(names))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the wrapped model on ``input_ids [B, S]`` and its other arguments; its output has ``logits [B, S, V]``."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)

    def materialize(self, device: str | torch.device) -> HFModel:
        self.to_empty(device=device)
        self.model.tie_weights()
        return self

    def public_state_dict(self, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the weights with the names and shapes of a public checkpoint; tied weights appear once.

        They differ from the model's if transformers renames or joins weights while loading (VLMs, experts).
        ``state_dict``: gathered weights under the names of ``self.state_dict()``; None: the model's own.
        """
        weights = self._inner_names(state_dict)
        tied = getattr(self.model, "all_tied_weights_keys", {})
        return revert_weight_conversion(self.model, {name: weights[name] for name in weights if name not in tied})

    def save_pretrained(
        self, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Write a folder that transformers can load; ``state_dict`` as in ``public_state_dict``."""
        self.model.save_pretrained(folder, state_dict=self._inner_names(state_dict), **kwargs)

    def _inner_names(self, state_dict: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        weights = self.state_dict() if state_dict is None else state_dict
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HFModel:
        """Convert or move weights; buffers outside the state dict only change their device."""
        # Rotary frequencies in 16 bits would give wrong positions.
        buffers_before = [(buffers, name, buffers[name]) for buffers, name in _unsaved_buffers(self).values()]
        super()._apply(fn, recurse)
        for buffers, name, buffer in buffers_before:
            device = buffers[name].device
            buffers[name] = buffer if device.type == "meta" else buffer.to(device)
        return self


class _AsRead(GenerationConfig):
    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Accept settings that transformers reads and does not write, e.g. a temperature without ``do_sample``."""


def accept_saving(model: Any) -> Any:
    """Let transformers save a model (nested ones too) with the ``generation_config.json`` that it was loaded with; return it."""
    for module in model.modules():
        if isinstance(getattr(module, "generation_config", None), GenerationConfig):
            module.generation_config.__class__ = _AsRead
    return model


def load_config(path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the configuration of a folder or hub id; raise CheckpointError or, for an unknown model type, ConfigError."""
    check_hub(path)
    no_lora(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        message = f"'{path}' is neither a checkpoint folder with a config.json nor a reachable hub id ({error})."
        raise CheckpointError(message, path="<folder>") from error
    except ValueError as error:
        message = f"Transformers does not know the model type of '{path}', whose own code is not trusted ({error})."
        raise ConfigError(message, trust_remote_code=True, path="<a different folder>") from error


def model_shapes(path: str | Path, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32) -> HFModel:
    """Return the model of ``HFModel.from_pretrained`` on the meta device, without reading weights."""
    config = load_config(path, trust_remote_code)
    return HFModel(without_weights(model_class_of(config, path, trust_remote_code), config, dtype=dtype))


def model_class_of(
    config: PreTrainedConfig, path: str | Path | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """Return the class that ``config.architectures`` names: one causal or image-text-to-text model."""
    names = list(config.architectures or ())
    owner = path or type(config).__name__
    if len(names) > 1:
        message = f"architectures in config.json of '{owner}' name {len(names)} ({', '.join(names)}); required: one."
        raise ConfigError(message, architectures=names[:1])
    code = getattr(config, "auto_map", None) or {}
    for auto_class in AUTO_CLASSES:
        model_class = auto_class._model_mapping[type(config)] if type(config) in auto_class._model_mapping else None
        if model_class is None and trust_remote_code and path is not None and auto_class.__name__ in code:
            model_class = get_class_from_dynamic_module(code[auto_class.__name__], str(path))
        if model_class is not None and names in ([], [model_class.__name__]):
            return model_class
    raise ConfigError(
        f"'{owner}' has the model type '{config.model_type}' and architectures {names}; required: a "
        f"class of {' or '.join(known.__name__ for known in AUTO_CLASSES)}, in transformers or in trusted code of the folder.",
        trust_remote_code=True,
        path="<a different folder>",
    )


def check_tensor_parallel(config: PreTrainedConfig, tp_size: int, key: str) -> None:
    """Check that the tensor-parallel size of a rollout engine (setting ``key``) divides the attention heads."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads

    # Key-value heads may also be fewer than the ranks and divide them: vLLM copies them.
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
    """Build the model of transformers' ``from_pretrained`` with its weights still in their files."""
    if getattr(config, "quantization_config", None) is not None:
        raise NotDeferredError("its weights are quantised")
    try:
        tensors = open_tensors(_weight_files(path))
    except CheckpointError as error:
        # Reading them completely raises a specific error.
        raise NotDeferredError("its files cannot be opened") from error
    model = without_weights(model_class, config, **arguments)
    conversions = get_model_conversion_mapping(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    renamings = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]
    if any(rename_source_key(name, renamings, converters) != (name, None) for name in tensors):
        raise NotDeferredError("transformers converts its weights while it reads them")
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


def _weight_files(path: str | Path) -> list[Path]:
    """Return the safetensors files of a folder or hub id: one, or the shards in its index."""
    try:
        folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), allow_patterns=WANTED_FILES))
    except (OSError, ValueError) as error:
        raise NotDeferredError(f"'{path}' cannot be downloaded as a folder") from error
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if not (folder / SAFE_WEIGHTS_NAME).is_file() and index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    files = [folder / name for name in names]
    if not all(file.is_file() for file in files):
        raise NotDeferredError("it has no complete safetensors")
    return files


def _unsaved_buffers(model: nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Find the buffers outside the state dict: full name to the module's buffer dict and the name in it."""
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
    if implementation not in kernels and "/" not in implementation:  # with a slash: a kernel of the hub
        message = f"attn_implementation='{implementation}'; required: one of {', '.join(kernels)}."
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
    message = f"The checkpoint is quantised by '{method}'; required for training: weights in 16 or 32 bits, or mxfp4."
    raise ConfigError(message, path="<folder of the unquantised model>")


HFLLMModel = HFModel
"""Former name of ``HFModel``, from when it wrapped language models only."""
