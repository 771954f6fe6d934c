"""Speed of token training: tokens per second, and the share of the device's peak (model FLOPs utilisation)."""

from __future__ import annotations

from typing import Any

import torch

PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Peak of a GPU in bfloat16 without sparsity, by a part of its name, from the data sheets of its maker."""


def flops_per_token(model: Any, length: float) -> float:
    """Estimate the floating-point operations that training takes for a token (Kaplan et al. 2020, section 2.1).

    A weight in a matrix product takes 2 operations forward, 2 for the gradient of its input, and, if it is trained, 2 for its
    own gradient. Of the experts of a mixture, only those of one token count. Attention takes 4 times hidden size and length per layer forward, and twice that backward. Embeddings are looked
    up and cost nothing, unless they are also the head. What gradient checkpointing repeats is not counted.

    Args:
        model: A causal language model of transformers, sharded or not.
        length: Mean number of tokens of a row.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    looked_up = 0 if tied else sum(p.numel() for p in embedding.parameters())
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    share = used / num_experts if used and num_experts else 1.0
    sizes = [(p.numel() * (share if ".experts." in name else 1.0), p) for name, p in model.named_parameters()]
    total = sum(size for size, _ in sizes) - looked_up
    trained = min(total, sum(size for size, p in sizes if p.requires_grad))
    # Causal attention looks at half of the row on average.
    attention = 4 * text.num_hidden_layers * text.hidden_size * length / 2
    return 4 * total + 2 * trained + 3 * attention


def peak_flops() -> float | None:
    """Return the peak of this process's device in bfloat16; None: it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((PEAK_FLOPS[key] for key in sorted(PEAK_FLOPS, key=len, reverse=True) if key in name), None)
