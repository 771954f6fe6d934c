"""Load a causal language model from a folder or hub id, for policies and generation backends."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerBase

from rlinf.distributed.deferred import is_deferred
from rlinf.distributed.devices import take_own_device
from rlinf.distributed.transfers import check_loaded
from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError
from rlinf.llm.end_tokens import settle_end_tokens
from rlinf.llm.hf_model import HFModel
from rlinf.models.loading import check_attention, without_load_report
from rlinf.models.precision import switch_off_dropout, torch_dtype_of
from rlinf.options import option


@dataclass
class CausalLMConfig:
    """Settings for loading a model."""

    torch_dtype: Any = option("float32", "Dtype for the weights: float32, bfloat16, float16 or a torch.dtype.")
    device_map: Any = option("auto", "Placement; auto: this rank's GPU, all accelerators, or the CPU; null: CPU.")
    trust_remote_code: bool = option(False, "Allow Python code in the checkpoint folder to run.")
    load_in_8bit: bool = option(False, "Quantise to 8 bits with bitsandbytes (CUDA only).")
    load_in_4bit: bool = option(False, "Quantise to 4 bits with bitsandbytes (CUDA only).")
    attn_implementation: str = option("sdpa", "Attention kernel: sdpa, eager or flash_attention_2.")
    tokenizer: Any = option(None, "Tokenizer or processor to supply padding and end tokens that the model lacks.")


def load_causal_lm(model_name: str, config: CausalLMConfig, *, deferred: bool = False) -> Any:
    """Load a model in evaluation mode without dropout; ``deferred`` leaves weights in their files if possible."""
    model = _load(model_name, config, deferred)
    settle_end_tokens(model, config.tokenizer)
    return switch_off_dropout(model).eval()


def _load(model_name: str, config: CausalLMConfig, deferred: bool) -> Any:
    check_attention(config.attn_implementation)
    quantization = _quantization(config)
    num_accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    with_ranks = config.device_map == "auto" and torch.cuda.is_available() and dist.is_initialized()
    # Use only this rank's GPU, because the remaining GPUs belong to different ranks.
    device_map = {"": take_own_device()} if with_ranks else config.device_map
    arguments = {
        "dtype": torch_dtype_of(config.torch_dtype),
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": config.trust_remote_code,
    }
    is_spread = device_map not in (None, "auto") or (device_map == "auto" and num_accelerators > 1)
    if quantization or (is_spread and not with_ranks):
        return _load_spread(model_name, device_map=device_map, **arguments, **quantization)
    model = HFModel.from_pretrained(model_name, deferred=deferred, **arguments).model
    check_loaded({name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}, model_name)
    if is_deferred(model):
        return model
    if with_ranks:
        model.to(device_map[""])
    elif device_map == "auto" and num_accelerators:
        model.to(torch.accelerator.current_accelerator())
    return model


def padding_token(model: nn.Module, tokenizer: PreTrainedTokenizerBase, given: int | None, ends: list[int]) -> int:
    """Return the first padding id available: the given one, the model's, the tokenizer's, the first end token, or 0."""
    # Skip ids without an embedding (-1), which some published models have.
    vocab_size, tokenizer = model.config.get_text_config().vocab_size, getattr(tokenizer, "tokenizer", tokenizer)
    candidates = (given, model.generation_config.pad_token_id, getattr(tokenizer, "pad_token_id", None), *ends[:1], 0)
    return next(value for value in candidates if value is not None and 0 <= value < vocab_size)


def _load_spread(model_name: str, **arguments: Any) -> Any:
    """Load a model while transformers distributes it over several devices or quantises it."""
    try:
        with without_load_report():
            model, report = AutoModelForCausalLM.from_pretrained(model_name, output_loading_info=True, **arguments)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # AssertionError: torch has no such device
        raise CheckpointError(
            f"'{model_name}' cannot be loaded with device_map={arguments['device_map']} ({error}).", device_map="auto"
        ) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise CheckpointError(f"'{model_name}' lacks {len(missing)} weights of {type(model).__name__}: {missing[:4]}.")
    # Tensors on the meta device are offloaded to disk.
    check_loaded({name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}, model_name)
    return HFModel(model).model


def _quantization(config: CausalLMConfig) -> dict[str, Any]:
    if config.load_in_8bit and config.load_in_4bit:
        raise ConfigError("load_in_8bit and load_in_4bit are both True; expected one.", load_in_8bit=False)
    if not (config.load_in_8bit or config.load_in_4bit):
        return {}
    key = "load_in_8bit" if config.load_in_8bit else "load_in_4bit"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError(
            f"{key}=True needs the bitsandbytes package. Install it with pip install bitsandbytes, or disable {key}.",
            **{key: False},
        )
    return {"quantization_config": BitsAndBytesConfig(**{key: True})}
