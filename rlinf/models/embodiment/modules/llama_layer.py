"""A Llama layer that can be asked for its last positions only, and with attention in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, eager_attention_forward


class LlamaActionLayer(LlamaDecoderLayer):
    """``LlamaDecoderLayer`` with the same parameters and numbers, and two more arguments.

    ``num_queries`` returns the last positions only: keys and values are computed for all of them, queries, output
    projection and MLP are not. In the last layer nothing else is read, so most of its work is left out.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        num_queries: int | None = None,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Transform ``[B, S, H]`` into ``[B, num_queries or S, H]``.

        Args:
            hidden_states: Input.
            attention_mask: ``[B or 1, 1, queries, keys]``, bool (sdpa) or additive (eager); ``[B, keys]`` for flash
                attention; None: all keys (up to the query if causal).
            position_ids: Unused (part of the signature of transformers).
            past_key_values: Cache, extended in place.
            use_cache: Unused (part of the signature of transformers).
            position_embeddings: Cosines and sines ``[B or 1, S, head_dim]``.
            num_queries: Positions to return, counted from the end; None: all.
            is_causal: Used where ``attention_mask`` is None.
            **kwargs: Passed to the attention kernel.
        """
        attention, residual = self.self_attn, hidden_states
        keys_from = queries_from = self.input_layernorm(hidden_states)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        query_cos, query_sin = cos, sin
        if num_queries is not None:
            residual, queries_from = residual[:, -num_queries:], queries_from[:, -num_queries:]
            query_cos, query_sin = cos[:, :, -num_queries:], sin[:, :, -num_queries:]

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        query = heads(attention.q_proj(queries_from))
        key = heads(attention.k_proj(keys_from))
        value = heads(attention.v_proj(keys_from))
        query = _rotate(query, query_cos, query_sin)
        key = _rotate(key, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_attention_forward)
        attended, _ = kernel(
            attention,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=attention.scaling,
            is_causal=is_causal,
            **kwargs,
        )
        hidden_states = residual + attention.o_proj(attended.flatten(2))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def use_action_layers(language_model: LlamaForCausalLM) -> None:
    """Turn the layers of a freshly built model into ``LlamaActionLayer`` (same parameters)."""
    for layer in language_model.model.layers:
        layer.__class__ = LlamaActionLayer


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of ``[B, heads, S, head_dim]``, halves of a head being the pairs."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def run_layers(
    decoder: LlamaModel,
    embeddings: Tensor,
    key_mask: Tensor | None,
    num_queries: int | None,
    is_causal: bool,
    cache: DynamicCache | None = None,
) -> Tensor:
    """Run a model of ``LlamaActionLayer`` on embeddings and return the last positions after the final norm.

    Args:
        decoder: Layers, rotary embedding and norm.
        embeddings: ``[B, S, H]``, the last ``S`` positions of the sequence; those before it are in the cache.
        key_mask: bool ``[B, keys]``, false on padding; None: no padding. Positions count what is not padding.
        num_queries: Positions to return, counted from the end; None: all.
        is_causal: No position sees one behind itself.
        cache: Keys and values of earlier positions, extended in place.

    Returns:
        ``[B, num_queries or S, H]``.
    """
    past = 0 if cache is None else cache.get_seq_length()
    length, num_keys = embeddings.shape[1], past + embeddings.shape[1]
    if key_mask is None:
        positions = torch.arange(past, num_keys, device=embeddings.device)[None]
    else:
        positions = key_mask.long().cumsum(1)[:, past:] - 1
    rotary = decoder.rotary_emb(embeddings, position_ids=positions)
    implementation = decoder.config._attn_implementation

    def mask(queries: int) -> Tensor | None:
        if implementation.startswith("flash"):
            return key_mask
        if implementation == "sdpa" and key_mask is None and queries == num_keys:
            return None  # the kernel knows this case without a mask
        allowed = attention_mask(key_mask, queries, num_keys, is_causal, embeddings.device)
        return additive(allowed, embeddings.dtype) if implementation == "eager" else allowed

    full_mask = mask(length) if len(decoder.layers) > 1 or num_queries is None else None
    hidden_states = embeddings
    for layer in decoder.layers:
        last = num_queries is not None and layer is decoder.layers[-1]
        hidden_states = layer(
            hidden_states,
            attention_mask=mask(num_queries) if last else full_mask,
            position_embeddings=rotary,
            past_key_values=cache,
            num_queries=num_queries if last else None,
            is_causal=is_causal,
        )
    return decoder.norm(hidden_states)


def attention_mask(
    key_mask: Tensor | None, num_queries: int, num_keys: int, is_causal: bool, device: torch.device
) -> Tensor | None:
    """Say which keys a query sees, for queries that are the last of the keys.

    Args:
        key_mask: bool ``[B, num_keys]``, false on padding; None: no padding.
        num_queries: Number of queries.
        num_keys: Number of keys.
        is_causal: A query sees no key behind itself.
        device: Of the result.

    Returns:
        bool ``[B or 1, 1, num_queries, num_keys]``; None where nothing is forbidden.
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
