"""Sample chunks of lerobot's policies from given noise, including types whose own ``predict_action_chunk`` draws it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def flow_chunk(policy: Any, prepared: dict[str, Any], noise: Tensor | None) -> Tensor:
    """Return normalised actions ``[B, T, D]``, starting at the current step."""
    return policy.predict_action_chunk(prepared, **({} if noise is None else {"noise": noise}))


def code_chunk(policy: Any, prepared: dict[str, Any], noise: Tensor) -> Tensor:
    """Return the chunk of a policy that samples codes; rows are run one by one, each seeded by its noise."""
    images = torch.stack([prepared[name] for name in policy.config.image_features], -4)
    chunks = []
    for row, seed in enumerate(seeds_of(noise)):
        # The policy samples from torch's global generator.
        with torch.random.fork_rng(devices=[noise.device] if noise.is_cuda else []):
            torch.manual_seed(seed)
            states = prepared["observation.state"][row : row + 1]
            batch = {"observation.images": images[row : row + 1], "observation.state": states}
            chunks.append(policy.vqbet(batch, rollout=True)[:, : policy.config.action_chunk_size])
    return torch.cat(chunks)


def xvla_chunk(policy: Any, prepared: dict[str, Any], noise: Tensor) -> Tensor:
    """Return X-VLA's chunk from ``noise [B, T, model width]``, which its own ``predict_action_chunk`` ignores."""
    flow, inputs = policy.model, policy._build_model_inputs(prepared)
    images, tokens, mask, domain = (inputs[name] for name in ("image_input", "input_ids", "image_mask", "domain_id"))
    noise, proprio = noise.to(flow._get_target_dtype()), inputs["proprio"].to(flow._get_target_dtype())
    encoded = flow.forward_vlm(tokens, images.to(noise.dtype), mask)
    num_steps = max(1, int(policy.config.num_denoising_steps))
    actions = torch.zeros_like(noise)
    for step in range(num_steps, 0, -1):
        # The model predicts the actions themselves, which are then mixed with the same noise again.
        t = noise.new_full((len(noise),), step / num_steps)
        mixed = noise * t[:, None, None] + actions * (1 - t)[:, None, None]
        state, mixed = flow.action_space.preprocess(proprio, mixed)
        actions = flow.transformer(domain_id=domain, action_with_noise=mixed, proprio=state, t=t, **encoded)
    return flow.action_space.postprocess(actions)


CHUNKS: dict[str, Callable[[Any, dict[str, Any], Tensor], Tensor]] = {"vqbet": code_chunk, "xvla": xvla_chunk}
"""Chunk functions of policy types whose ``predict_action_chunk`` does not use ``noise``."""


def seeds_of(noise: Tensor) -> list[int]:
    """Return a seed for each row of noise."""
    return [zlib.crc32(row.contiguous().numpy().tobytes()) for row in noise.cpu()]
