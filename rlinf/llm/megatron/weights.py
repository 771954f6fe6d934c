"""Load llama-like checkpoints into Megatron-core: configuration, layers, and weight conversion in both directions.

Megatron-core is needed only to call the functions.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlinf.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types supported by ``build_gpt``."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Types of rotary embeddings whose frequencies do not depend on the row length."""

_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_AROUND = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def check_family(config: Any, tp_size: int, pp_size: int) -> None:
    """Raise ConfigError for unsupported checkpoints, and for parallel sizes that do not divide the model evenly."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    for name, value, accepted in (
        ("model_type", config.model_type, FAMILIES),
        ("hidden_act", getattr(config, "hidden_act", None), ("silu",)),
        ("rope_type", rope_type, ROPE_TYPES),
        ("sliding_window", getattr(config, "sliding_window", None), (None,)),
    ):
        if value not in accepted:
            required = " or ".join(map(str, accepted))
            raise ConfigError(f"MegatronPolicy has {name}={value}; expected {required}. Use HuggingFacePolicy")
    for size, key, names in (
        (tp_size, "tensor_model_parallel_size", ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")),
        (pp_size, "pipeline_model_parallel_size", ("num_hidden_layers",)),
    ):  # fmt: skip
        for name in names:
            if getattr(config, name) % size:
                raise ConfigError(f"{key}={size} does not divide {name}={getattr(config, name)}. Pass a divisor")
    if config.tie_word_embeddings and pp_size > 1:
        raise ConfigError(
            f"pipeline_model_parallel_size={pp_size} puts the embedding and the output layer on different ranks, but the checkpoint "
            "ties them. Pass pipeline_model_parallel_size=1"
        )


def build_gpt(hf_config: Any, names: set[str], rotary: nn.Module, dtype: torch.dtype, parallel: Any) -> nn.Module:
    """Build this rank's part of a Megatron-core ``GPTModel`` with uninitialised weights.

    ``names`` are the checkpoint's weight names, ``rotary`` is transformers' rotary embedding, ``parallel`` is a ``MegatronPolicyConfig``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    qk_norm = "model.layers.0.self_attn.q_norm.weight" in names
    config = TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        ffn_hidden_size=hf_config.intermediate_size,
        layernorm_epsilon=hf_config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        qk_layernorm=qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = FlashAttention if parallel.use_flash_attention else CausalAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RMSNorm),
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = RotaryFrequencies(rotary.inv_freq, parallel)
    return model


class RMSNorm(nn.RMSNorm):
    """Root mean square norm, needed because Megatron-core's torch version does not support sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class CausalAttention(nn.Module):
    """Torch's scaled dot-product attention, used because Megatron-core's torch version needs CUDA.

    Rows are right-padded, so the causal mask hides the padding from every token.
    """

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """Map query, key and value ``[S, B, heads, D]`` (grouped key-value heads) to ``[S, B, heads * D]``."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with sdpa_kernel(list(self.backends)):
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2).contiguous()


class FlashAttention(CausalAttention):
    """``CausalAttention`` restricted to the flash kernel."""

    backends = (SDPBackend.FLASH_ATTENTION,)


class RotaryFrequencies(nn.Module):
    """Rotary angles computed from transformers' frequencies, including their scaling."""

    def __init__(self, inv_freq: Tensor, parallel: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.clone().float(), persistent=False)
        self._shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Tensor | None, *_: object) -> int:
        """Return the full row length; with sequence parallelism, each rank has only a part of the row."""
        return (block.input_tensor if hidden is None else hidden).shape[0] * self._shards

    def forward(self, length: int, **_: object) -> Tensor:
        """Return angles float32 ``[S, 1, 1, D]``."""
        angles = torch.outer(torch.arange(length, device=self.inv_freq.device).float(), self.inv_freq)
        return torch.cat((angles, angles), -1)[:, None, None, :]


def source_names(name: str, first_layer: int) -> tuple[str, ...]:
    """Return the names of the checkpoint tensors that form ``name`` in a ``GPTModel`` starting at ``first_layer``."""
    if name in _AROUND:
        return (_AROUND[name],)
    _, _, layer, rest = name.split(".", 3)
    return tuple(f"model.layers.{int(layer) + first_layer}.{source}" for source in _LAYER[rest])


def shard(name: str, tensors: list[Tensor], config: Any, tp_size: int) -> list[Tensor]:
    """Convert the checkpoint tensors that form ``name`` into one tensor per tensor-parallel rank."""
    # Query, key and value rows are interleaved by key-value head; the gate projection precedes the up projection.
    if is_replicated(name):
        return tensors * tp_size
    if len(tensors) == 3:
        groups = [tensor.unflatten(0, (config.num_key_value_heads, -1)) for tensor in tensors]
        return list(torch.cat(groups, 1).flatten(0, 1).chunk(tp_size))
    axis = _split_axis(name)
    return [torch.cat(parts) for parts in zip(*(tensor.chunk(tp_size, axis) for tensor in tensors), strict=True)]


def unshard(name: str, shards: list[Tensor], config: Any) -> list[Tensor]:
    """Convert shards back to checkpoint tensors, the inverse of ``shard``."""
    if is_replicated(name):
        return shards[:1]
    if "linear_qkv" in name:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        width = head_dim(config)
        rows = torch.cat(shards).unflatten(0, (groups, -1))
        return [part.flatten(0, 1) for part in rows.split([heads // groups * width, width, width], 1)]
    parts = [part.chunk(2) if "linear_fc1" in name else (part,) for part in shards]
    return [torch.cat(pieces, _split_axis(name)) for pieces in zip(*parts, strict=True)]


def is_replicated(name: str) -> bool:
    """Return whether every tensor-parallel rank has the full tensor, as is the case for norms."""
    return "layernorm" in name


def needs_tensor_parallel_sum(name: str, sequence_parallel: bool) -> bool:
    """Return whether each tensor-parallel rank computes only a partial gradient, from its heads or its part of the sequence."""
    return ".q_layernorm." in name or ".k_layernorm." in name or (sequence_parallel and is_replicated(name))


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], config: Any, first_layer: int, rank: int, tp_size: int
) -> None:
    """Load this rank's part of a ``GPTModel``, starting at ``first_layer``, from all weights in a checkpoint."""
    placed = set(_AROUND.values())
    for name, parameter in model.named_parameters():
        sources = [weights[source] for source in source_names(name, first_layer)]
        parameter.copy_(shard(name, sources, config, tp_size)[rank])
        if name.startswith("decoder.layers.0."):
            for layer in range(config.num_hidden_layers):
                placed |= set(source_names(name, layer))
    unplaced = sorted(set(weights) - placed)
    if unplaced:
        some = ", ".join(unplaced[:4])
        raise ConfigError(f"MegatronPolicy does not support {len(unplaced)} weights: {some}. Use HuggingFacePolicy")


def head_dim(config: Any) -> int:
    """Return the width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _split_axis(name: str) -> int:
    """Return the axis to split: the input axis for layers that sum over ranks, otherwise the output axis."""
    return 1 if "linear_proj" in name or "linear_fc2" in name else 0
