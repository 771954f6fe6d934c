"""Sample and score tokens; used by both rollout and training."""

import torch
from torch import Tensor

from rlinf.errors import CheckpointError


def draw_uniforms(*shape: int, device: torch.device | None = None) -> Tensor:
    """Draw uniform float32 numbers in the open interval (0, 1) from torch's global generator."""
    return torch.rand(shape, device=device).clamp_min_(torch.finfo(torch.float32).tiny)


def standard_normal(uniforms: Tensor) -> Tensor:
    """Map uniform numbers in (0, 1) to standard normal float32 numbers by inverse transform."""
    return torch.special.ndtri(uniforms.double()).float()


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return float32 log-probabilities ``[...]`` of ``tokens [...]``, and entropies in nats or None.

    They are ``log softmax(logits / temperature)`` in float32 over the last axis of ``logits [..., n_bins]`` (action bins only).
    """
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None


def check_finite(logits: Tensor) -> Tensor:
    """Return ``logits``; raise CheckpointError if any is NaN or infinite (argmax would then always return the same action)."""
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError("The policy's logits are not finite: its weights are damaged, or an input is too large")
    return logits


def sample_tokens(logits: Tensor, do_sample: bool, temperature: float = 1.0, uniforms: Tensor | None = None) -> Tensor:
    """Return int64 indices into the last axis by argmax, or by inverse transform sampling of ``softmax(logits / temperature)``.

    ``uniforms`` are float32 in (0, 1), one per token; None draws them from torch's global generator.
    """
    if not do_sample:
        return logits.argmax(-1)
    cumulative = _running_sums(torch.softmax(logits.float() / temperature, dim=-1))
    if uniforms is None:
        uniforms = draw_uniforms(*cumulative.shape[:-1], device=cumulative.device)
    threshold = (uniforms.to(cumulative) * cumulative[..., -1]).unsqueeze(-1)
    return (cumulative <= threshold).sum(-1).clamp_max(logits.shape[-1] - 1)


def _running_sums(numbers: Tensor) -> Tensor:
    """Return cumulative sums along the last axis."""
    # On a GPU, `cumsum` adds in an order that varies from run to run.
    if numbers.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sums_by_blocks(numbers)
    return numbers.cumsum(-1)


def sums_by_blocks(numbers: Tensor, size: int = 256) -> Tensor:
    """Return cumulative sums along the last axis by matrix products: within blocks of ``size``, plus all previous blocks."""
    width = numbers.shape[-1]
    if width <= size:
        # Autocast would multiply in 16 bits.
        with torch.autocast(numbers.device.type, enabled=False):
            return numbers @ numbers.new_ones(width, width).triu()
    blocks = torch.nn.functional.pad(numbers, (0, -width % size)).unflatten(-1, (-1, size))
    within = sums_by_blocks(blocks, size)
    before = torch.nn.functional.pad(sums_by_blocks(within[..., -1], size), (1, -1))
    return (within + before.unsqueeze(-1)).flatten(-2)[..., :width]
