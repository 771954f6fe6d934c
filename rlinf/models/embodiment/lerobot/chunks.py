"""Sample chunks of lerobot's policies from given noise, including types whose own ``predict_action_chunk`` draws it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class FlowPrefix(NamedTuple):
    """The part of a pass common to all denoising steps: states ``[B, P, W]``, their mask, and the rest that steps read."""

    mask: Tensor
    cache: Any
    states: Tensor

    def repeated(self, count: int) -> FlowPrefix:
        """Repeat each row; only for a cache of tensors."""
        mask, *cache, states = (x.repeat_interleave(count, 0) for x in (self.mask, *self.cache, self.states))
        return FlowPrefix(mask, tuple(cache), states)


def flow_chunk(policy: Any, prepared: Mapping[str, Any], noise: Tensor | None, count: int) -> Tensor:
    """Return normalised actions ``[B * count, T, D]``, starting at the current step, for ``B`` rows."""
    if noise is None:
        return policy.predict_action_chunk(prepared)
    return policy.predict_action_chunk(_repeated(prepared, len(noise), count), noise=noise)


def code_chunk(policy: Any, prepared: Mapping[str, Any], noise: Tensor, count: int) -> Tensor:
    """Return the chunks of a policy that samples codes; rows are run one by one, each seeded by its noise."""
    prepared = _repeated(prepared, len(noise), count)
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


def xvla_chunk(policy: Any, prepared: Mapping[str, Any], noise: Tensor, count: int) -> Tensor:
    """Return X-VLA's chunks from ``noise [B * count, T, model width]``, which its ``predict_action_chunk`` ignores."""
    flow, inputs = policy.model, policy._build_model_inputs(dict(prepared))
    noise = noise.to(flow._get_target_dtype())
    encoded = flow.forward_vlm(inputs["input_ids"], inputs["image_input"].to(noise.dtype), inputs["image_mask"])
    encoded |= {"domain_id": inputs["domain_id"], "proprio": inputs["proprio"].to(noise.dtype)}
    encoded = {name: values.repeat_interleave(count, 0) for name, values in encoded.items()}
    proprio = encoded.pop("proprio")
    num_steps = max(1, int(policy.config.num_denoising_steps))
    actions = torch.zeros_like(noise)
    for step in range(num_steps, 0, -1):
        # The model predicts the actions themselves, which are then mixed with the same noise again.
        t = noise.new_full((len(noise),), step / num_steps)
        mixed = noise * t[:, None, None] + actions * (1 - t)[:, None, None]
        state, mixed = flow.action_space.preprocess(proprio, mixed)
        actions = flow.transformer(action_with_noise=mixed, proprio=state, t=t, **encoded)
    return flow.action_space.postprocess(actions)


def _repeated(prepared: Mapping[str, Any], total: int, count: int) -> dict[str, Any]:
    """Repeat each row's tensors ``count`` times, to ``total`` rows."""
    return {
        name: values.repeat_interleave(count, 0)
        if isinstance(values, Tensor) and len(values) * count == total
        else values
        for name, values in prepared.items()
    }


def seeds_of(noise: Tensor) -> list[int]:
    """Return a seed for each row of noise."""
    return [zlib.crc32(row.contiguous().numpy().tobytes()) for row in noise.cpu()]
