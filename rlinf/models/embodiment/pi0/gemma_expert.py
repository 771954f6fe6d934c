"""pi0's two transformers: a Gemma that reads images and text, and an action expert."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GemmaConfig, SiglipVisionConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import (
    GemmaDecoderLayer,
    GemmaRMSNorm,
    eager_attention_forward,
    rotate_half,
)
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0


class AdaRMSNorm(nn.Module):
    """RMS norm with scale, shift and residual gate computed from a condition (adaLN-zero, Peebles and Xie 2023)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``norm(x) (1 + scale) + shift`` and the gate ``[B, 1, W]``, for ``x [B, S, W]`` and ``condition [B, W]``."""
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + NORM_EPS)
        return (normed * (1.0 + scale.float()) + shift.float()).type_as(x), gate.type_as(x)


def _normed(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (norm(x), None) if condition is None else norm(x, condition)


def _gated_sum(residual: Tensor, x: Tensor, gate: Tensor | None) -> Tensor:
    return residual + x if gate is None else residual + x * gate


class GemmaActionLayer(GemmaDecoderLayer):
    """``GemmaDecoderLayer`` with bidirectional attention, optionally to a second stack's keys, and optional ``AdaRMSNorm``."""

    def __init__(self, config: GemmaConfig, layer_idx: int, adaptive: bool) -> None:
        super().__init__(config, layer_idx)
        if adaptive:
            self.input_layernorm = AdaRMSNorm(config.hidden_size)
            self.post_attention_layernorm = AdaRMSNorm(config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        rotation: tuple[Tensor, Tensor],
        prefix: Tensor | None = None,
        condition: Tensor | None = None,
        keys_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Transform ``[B, S, W]``; return the result and the layer's keys and values ``[2, B, kv_heads, S, head_dim]``.

        Args:
            attention_mask: bool, broadcastable to ``[B, 1, S, prefix + S]``, true for visible keys.
            rotation: Cosines and sines ``[B, S, head_dim]``.
            prefix: Preceding keys and values ``[2, B, kv_heads, P, head_dim]``.
            condition: Condition ``[B, W]`` for the adaptive norms.
            keys_only: Compute only keys and values, and return the hidden states unchanged.
        """
        attention = self.self_attn

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        normed, gate = _normed(self.input_layernorm, hidden_states, condition)
        key = _rotate(heads(attention.k_proj(normed)), *rotation)
        keys_values = torch.stack([key, heads(attention.v_proj(normed))])
        if keys_only:
            return hidden_states, keys_values
        query = _rotate(heads(attention.q_proj(normed)), *rotation)
        keys, values = keys_values if prefix is None else torch.cat([prefix, keys_values], dim=3)
        implementation = attention.config._attn_implementation
        if implementation == "eager":
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        options = {"dropout": 0.0, "scaling": attention.scaling, "is_causal": False}
        attended, _ = kernel(attention, query, keys, values, attention_mask, **options)
        hidden_states = _gated_sum(hidden_states, attention.o_proj(attended.flatten(2)), gate)
        normed, gate = _normed(self.post_attention_layernorm, hidden_states, condition)
        return _gated_sum(hidden_states, self.mlp(normed), gate), keys_values


class GemmaStack(nn.Module):
    """A stack of layers with final norm; ``sizes`` are ``width, depth, mlp_dim, num_heads, num_kv_heads, head_dim``."""

    def __init__(self, sizes: Mapping[str, int], attn_implementation: str | None, adaptive: bool = False) -> None:
        super().__init__()
        config = GemmaConfig(
            hidden_size=sizes["width"],
            intermediate_size=sizes["mlp_dim"],
            num_hidden_layers=sizes["depth"],
            num_attention_heads=sizes["num_heads"],
            num_key_value_heads=sizes["num_kv_heads"],
            head_dim=sizes["head_dim"],
            rms_norm_eps=NORM_EPS,
        )
        config._attn_implementation = attn_implementation
        self.head_dim = sizes["head_dim"]
        self.layers = nn.ModuleList(GemmaActionLayer(config, i, adaptive) for i in range(sizes["depth"]))
        self.norm = AdaRMSNorm(sizes["width"]) if adaptive else GemmaRMSNorm(sizes["width"], eps=NORM_EPS)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        positions: Tensor,
        prefix: list[Tensor] | None = None,
        condition: Tensor | None = None,
    ) -> Tensor:
        """Transform ``[B, S, W]`` at ``positions [B, S]``; for the remaining arguments see ``GemmaActionLayer``."""
        rotation = rotary_embedding(positions, self.head_dim, hidden_states.dtype)
        for index, layer in enumerate(self.layers):
            seen = None if prefix is None else prefix[index]
            hidden_states, _ = layer(hidden_states, attention_mask, rotation, seen, condition)
        return _normed(self.norm, hidden_states, condition)[0]

    def keys_and_values(
        self, hidden_states: Tensor, attention_mask: Tensor, positions: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return every layer's keys and values, and the input of the last layer, ``[B, S, W]``."""
        rotation = rotary_embedding(positions, self.head_dim, hidden_states.dtype)
        keys_values = []
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            hidden_states, key_value = layer(hidden_states, attention_mask, rotation, keys_only=last)
            keys_values.append(key_value)
        return keys_values, hidden_states


class SiglipTower(nn.Module):
    """SigLIP without its pooling head (Zhai et al. 2023), with transformers' parameter names."""

    def __init__(self, sizes: Mapping[str, Any], attn_implementation: str | None) -> None:
        super().__init__()
        config = SiglipVisionConfig(**sizes, hidden_act="gelu_pytorch_tanh", layer_norm_eps=NORM_EPS)
        config._attn_implementation = attn_implementation
        width, patch_size = config.hidden_size, config.patch_size
        self.num_tokens = (config.image_size // patch_size) ** 2
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)
        self.embeddings.position_embedding = nn.Embedding(self.num_tokens, width)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map ``[N, 3, H, W]`` in [-1, 1] to ``[N, num_tokens, hidden_size]``, patches in row-major order."""
        patches = self.embeddings.patch_embedding(pixel_values.to(self.embeddings.patch_embedding.weight.dtype))
        hidden_states = patches.flatten(2).transpose(1, 2) + self.embeddings.position_embedding.weight
        for layer in self.encoder.layers:
            hidden_states = layer(hidden_states, attention_mask=None)
        return self.post_layernorm(hidden_states)


def rotary_embedding(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[B, S, head_dim]`` of rotary positions (Su et al. 2021), pairing the halves of a head."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions[..., None].float() / ROPE_THETA**exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + rotate_half(x) * sin
