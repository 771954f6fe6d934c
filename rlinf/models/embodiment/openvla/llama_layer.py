"""A Llama layer that can return its last positions only, and with attention in both directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, eager_attention_forward

from rlinf.models.embodiment.modules.lean import LeanMLP, LeanRMSNorm
from rlinf.models.embodiment.openvla.kv_cache import KVCache


class LlamaActionLayer(LlamaDecoderLayer):
    """``LlamaDecoderLayer`` with the same parameters and numbers, for calls by ``run_layers``.

    ``num_queries`` returns the last positions only: keys and values are computed for all of them, queries, output
    projection and MLP are not. In the last layer nothing else is read, so most of its work is left out.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        num_queries: int | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Transform ``[B, S, H]`` into ``[B, num_queries or S, H]``.

        Args:
            hidden_states: Input.
            attention_mask: ``[B or 1, 1, queries, keys]``, bool (sdpa on a CPU) or additive; ``[B, keys]`` for flash
                attention; None: all keys (up to the query if causal).
            rotary: Of ``rotary_tables``, for these positions.
            cache: Keys and values of earlier positions, extended in place. (Under transformers' name of this argument,
                gradient checkpointing would leave the cache out.)
            num_queries: Positions to return, counted from the end; None: all.
            is_causal: Used where ``attention_mask`` is None.
        """
        attention, residual = self.self_attn, hidden_states
        keys_from = queries_from = self.input_layernorm(hidden_states)
        query_rotary = rotary
        if num_queries is not None:
            residual, queries_from = residual[:, -num_queries:], queries_from[:, -num_queries:]
            query_rotary = tuple(table[:, -num_queries:] for table in rotary)

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim))

        query = _rotate(heads(attention.q_proj(queries_from)), *query_rotary).transpose(1, 2)
        key = _rotate(heads(attention.k_proj(keys_from)), *rotary).transpose(1, 2)
        value = heads(attention.v_proj(keys_from)).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        implementation = attention.config._attn_implementation
        if implementation == "sdpa" and query.shape[2] == 1:
            attended = _attend_once(query, key, value, attention_mask, attention.scaling)
        else:
            kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
            options = {"dropout": 0.0, "scaling": attention.scaling, "is_causal": is_causal}
            attended, _ = kernel(attention, query, key, value, attention_mask, **options)
        hidden_states = residual + attention.o_proj(attended.flatten(2))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def use_action_layers(language_model: LlamaForCausalLM) -> None:
    """Turn the layers of a freshly built model into ``LlamaActionLayer`` (same parameters), and their parts into lean ones."""
    for layer in language_model.model.layers:
        layer.__class__ = LlamaActionLayer
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = LeanRMSNorm
        if language_model.config.hidden_act == "silu":
            layer.mlp.__class__ = LeanMLP


def _rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of ``[B, S, heads, head_dim]``, halves of a head being the pairs."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def _attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend with one query per head, ``[B, heads, 1, head_dim]``, and return ``[B, 1, heads, head_dim]``.

    Heads that share keys ``[B, key_heads, keys, head_dim]`` are the queries of one, so that no key is repeated.
    """
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    attended = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return attended.flatten(1, 2).unsqueeze(1)


def rotary_tables(
    decoder: LlamaModel, embeddings: Tensor, key_mask: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the first half of a head negated, of all positions: ``[B or 1, length, 1, head_dim]``.

    Positions count all but padding (``key_mask`` bool ``[B, length]``; None: no padding).
    """
    if key_mask is None:
        positions = torch.arange(length, device=embeddings.device)[None]
    else:
        positions = key_mask.long().cumsum(1) - 1
    cos, sin = (table.unsqueeze(2) for table in decoder.rotary_emb(embeddings, position_ids=positions))
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat((-first, second), dim=-1)


def run_layers(
    decoder: LlamaModel,
    embeddings: Tensor,
    key_mask: Tensor | None,
    num_queries: int | None,
    is_causal: bool,
    cache: KVCache | None = None,
    last_inputs: list[Tensor] | None = None,
) -> Tensor:
    """Run a model of ``LlamaActionLayer`` on ``embeddings [B, S, H]``; return the last ``num_queries`` positions, normed.

    The embeddings are the last ``S`` positions of the sequence; earlier positions are in ``cache``, which grows in place.
    ``key_mask`` is bool ``[B, keys]``, false on padding; with a cache ``[B, cache.max_len]``, future positions included.
    ``last_inputs``, if given, receives the input of the last layer, ``[B, S, H]``: the last states that all positions have.
    """
    length = num_keys = embeddings.shape[1]
    if cache is None:
        rotary = rotary_tables(decoder, embeddings, key_mask, num_keys)
    else:
        num_keys += cache.length
        if cache.rotary is None:
            cache.rotary = rotary_tables(decoder, embeddings, key_mask, cache.max_len)
        rotary = tuple(table[:, cache.length : num_keys] for table in cache.rotary)
        key_mask = None if key_mask is None else key_mask[:, :num_keys]
    implementation = decoder.config._attn_implementation

    def mask(queries: int) -> Tensor | None:
        if implementation.startswith("flash"):
            return key_mask
        if implementation == "sdpa" and key_mask is None and queries == num_keys:
            return None  # the kernel knows this case without a mask
        allowed = attention_mask(key_mask, queries, num_keys, is_causal, embeddings.device)
        if implementation == "eager":
            return additive(allowed, embeddings.dtype)
        return allowed if allowed is None or allowed.device.type == "cpu" else aligned(allowed, embeddings.dtype)

    full_mask = mask(length) if len(decoder.layers) > 1 or num_queries is None else None
    hidden_states = embeddings
    for layer in decoder.layers:
        if last_inputs is not None and layer is decoder.layers[-1]:
            last_inputs.append(hidden_states)
        last = num_queries is not None and layer is decoder.layers[-1]
        hidden_states = layer(
            hidden_states,
            attention_mask=mask(num_queries) if last else full_mask,
            rotary=rotary,
            cache=cache,
            num_queries=num_queries if last else None,
            is_causal=is_causal,
        )
    if cache is not None:
        cache.length = num_keys
    return decoder.norm(hidden_states)


def attention_mask(
    key_mask: Tensor | None, num_queries: int, num_keys: int, is_causal: bool, device: torch.device
) -> Tensor | None:
    """Return which of the keys each query sees, the queries being the last of them; None: all.

    The result is bool ``[B or 1, 1, num_queries, num_keys]``; ``key_mask`` ``[B, num_keys]`` is false on padding.
    """
    allowed = None
    if is_causal and num_queries > 1:
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        allowed = ones.tril(num_keys - num_queries)[None, None]
    if key_mask is not None:
        keys = key_mask[:, None, None, :].expand(-1, -1, num_queries, -1)
        allowed = keys if allowed is None else allowed & keys
    return allowed


def additive(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a bool mask into what eager attention adds to its scores."""
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def aligned(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask into the numbers that GPU kernels of sdpa add to their scores.

    sdpa would do so in every layer. Its kernels take rows that start at a multiple of 8 numbers as they are, and copy others.
    """
    *shape, num_keys = allowed.shape
    whole = torch.zeros(*shape, -(-num_keys // 8) * 8, dtype=dtype, device=allowed.device)
    return whole[..., :num_keys].masked_fill_(~allowed, float("-inf"))
