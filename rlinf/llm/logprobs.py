"""Token log-probabilities for complete sequences, used by policies, losses and checks."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import IMAGE_KEYS, Batch, join_padded, tokens_and_mask
from rlinf.llm.packing import known_rows, packed_inputs, probe_tokens
from rlinf.models.loading import num_positions
from rlinf.models.precision import evaluation_mode
from rlinf.models.sampling import token_logprobs

TOKEN_TYPE_KEYS = {"token_type_ids", "mm_token_type_ids"}
"""Keys ``[B, S]`` that mark image tokens; 0 means text, including generated tokens."""
CHUNK_LOGITS = 2**25
"""Maximum number of logits per chunk: 128 MiB in float32. Forward and backward passes need up to five such arrays."""
USEFUL_FRACTION = 0.75
"""If a smaller fraction of positions is scored, the LM head is applied only to the scored ones."""
_TRIAL_COLUMNS = 2
_SEPARABLE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # cached results of ``has_separable_head``
_KNOWN = {"input_ids", "attention_mask", "labels", *IMAGE_KEYS, *TOKEN_TYPE_KEYS}


class TokenScores(NamedTuple):
    """Scores for every token given the previous ones, float32 ``[B, S]``; 0 in column 0, padding and tokens that are not chosen.

    Attributes:
        logprobs: Log-probability of each token.
        entropy: Entropy of its distribution in nats, without gradients; None if not requested.
    """

    logprobs: Tensor
    entropy: Tensor | None


def batch_scores(
    model: nn.Module,
    data: Batch,
    temperature: float = 1.0,
    packed: bool = False,
    with_entropy: bool = False,
    chosen: Tensor | None = None,
) -> TokenScores:
    """Return ``sequence_scores`` for right-padded prompts, training data or generation outputs, including images.

    Padding tokens are ignored, and columns that are padding in all rows are not computed.
    """
    ids, mask = tokens_and_mask(data)
    columns, width = ids.shape[1], max(1, int(mask.sum(-1).max()))
    positions = context_length(model)
    if positions is not None and width > positions:
        raise ConfigError(f"A row has {width} tokens; expected at most the model's {positions} positions")
    inputs = image_inputs(model, data, width)
    if packed and inputs:
        raise ConfigError(f"sequence_packing=True does not support {', '.join(inputs)}. Pass sequence_packing=False")
    ids, mask = ids.masked_fill(~mask, 0)[:, :width], mask[:, :width]
    chosen = None if chosen is None else chosen[:, :width]
    scores = sequence_scores(model, ids, mask, temperature, packed, inputs, with_entropy, chosen)
    return TokenScores(*(None if values is None else F.pad(values, (0, columns - width)) for values in scores))


def context_length(model: nn.Module) -> int | None:
    """Return a model's maximum number of positions (``num_positions``), or None if unknown."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return num_positions(text)


def image_inputs(model: nn.Module, data: Batch, width: int) -> dict[str, Tensor]:
    """Return the additional arguments for a vision-language model's ``forward``, for ``width`` columns of tokens."""
    parameters = inspect.signature(model.forward).parameters
    lost = [key for key in data if key in parameters and key not in _KNOWN and isinstance(data[key], Tensor | list)]
    if lost:
        raise ConfigError(f"The batch has {lost}, which is not passed to {type(model).__name__}. Remove or rename it")
    weight = next(model.parameters())
    inputs = {}
    for key in IMAGE_KEYS:
        if key in data:
            if key not in parameters:
                raise ConfigError(f"The batch has '{key}', which {type(model).__name__} does not accept. Remove it")
            images = join_padded(data[key], key) if isinstance(data[key], list) else data[key]
            if len(images):
                inputs[key] = to_device(images, weight.device)
                if images.is_floating_point():
                    inputs[key] = inputs[key].to(weight.dtype)
    for key in TOKEN_TYPE_KEYS:
        if key in data and key in parameters:
            types = to_device(data[key][:, :width], weight.device)
            inputs[key] = F.pad(types, (0, width - types.shape[1]))
    return inputs


def sequence_scores(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    temperature: float = 1.0,
    packed: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
    with_entropy: bool = False,
    chosen: Tensor | None = None,
) -> TokenScores:
    """Return the log-probability of every token given the previous ones and, if requested, the entropy.

    Logits need the most memory. If the model ``has_separable_head``, the LM head is therefore applied in chunks of ``CHUNK_LOGITS``
    logits. The backward pass recomputes them if the head is trained; otherwise, the forward pass computes the gradients.

    Args:
        input_ids, attention_mask: int64 and bool ``[B, S]``, right-padded, preferably on the CPU.
        temperature: Divisor of the logits.
        packed: Whether to concatenate the rows and run them as one row (see ``rlinf.llm.packing``).
        inputs: Additional inputs for the model (``image_inputs``).
        with_entropy: Whether to compute the entropy, which needs memory for two additional chunks of logits.
        chosen: Tokens to score, bool ``[B, S]``; None for all.
    """
    # Shapes depend on the lengths. Batches start on the CPU, so reading lengths there avoids waiting for the GPU.
    ids, attended = input_ids.cpu(), attention_mask.bool().cpu()
    predicted = attended.clone() if chosen is None else attended & chosen.cpu()
    predicted[:, 0] = False  # in a packed row, the previous token is from a different sequence
    device, lengths = next(model.parameters()).device, attended.sum(-1)
    places = predicted.flatten().nonzero().flatten()
    if packed:
        tokens = packed_inputs(model, ids, lengths)
        before = predicted[attended].nonzero().flatten() - 1
    else:
        tokens = {"input_ids": ids, "attention_mask": attended.long(), **(inputs or {})}
        before = places - 1
    tokens = {name: to_device(tensor, device) for name, tensor in tokens.items()}
    states, head, is_frozen = _run_to_head(model, tokens, len(places), known_rows(lengths.tolist(), packed))
    scored = states.flatten(0, 1)[to_device(before, states.device)]
    targets = to_device(ids.flatten()[places], scored.device)
    logprobs, entropy = _chunked_scores(scored, targets, head, is_frozen, temperature, with_entropy)
    return TokenScores(*(None if v is None else _placed(v, places, ids.shape) for v in (logprobs, entropy)))


def _placed(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return float32 zeros with the given shape, and ``values`` at the flat indices ``places``."""
    zeros = torch.zeros(shape.numel(), dtype=torch.float32, device=values.device)
    return zeros.index_put((to_device(places, values.device),), values).view(shape)


def has_separable_head(model: nn.Module) -> bool:
    """Return whether applying the LM head and ``_head_logits`` reproduces a model's logits; the first call tests it on a few tokens."""
    # With shards, the first call is collective, because it runs the model; later calls use the cached result.
    if model not in _SEPARABLE:
        _SEPARABLE[model] = _has_separable_head(model)
    return _SEPARABLE[model]


def _has_separable_head(model: nn.Module) -> bool:
    takes_few = "logits_to_keep" in inspect.signature(model.forward).parameters
    if not takes_few or model.get_output_embeddings() is None:
        return False
    ids = probe_tokens(model)
    with evaluation_mode(model):
        states, logits = _run_with_few_logits(model, {"input_ids": ids})
        if len(states) != 1 or states[0].shape[:-1] != ids.shape:
            return False
        return _are_equal(_logits_of(model, states[0][:, :_TRIAL_COLUMNS]), logits)


def _run_to_head(
    model: nn.Module, inputs: Mapping[str, Tensor], num_scored: int, rows: AbstractContextManager
) -> tuple[Tensor, Callable[[Tensor], Tensor], bool]:
    """Run a causal language model, skipping the LM head if there would be more than ``CHUNK_LOGITS`` logits or most are not needed.

    Return hidden states ``[B, S, H]``, a function that maps them to logits ``[..., V]`` and whether its weights are frozen, or logits, the
    identity and False. ``rows`` is the context for the pass (``known_rows``).
    """
    num_tokens = inputs["input_ids"].numel()
    is_large = num_tokens * model.config.get_text_config().vocab_size > CHUNK_LOGITS
    is_separable = has_separable_head(model)  # for every batch, because the first call is collective
    # Ranks may take different branches: the head is not a separate FSDP unit, so both gather equal weights in the same order.
    with rows:
        if is_separable and (is_large or num_scored < USEFUL_FRACTION * num_tokens):
            (states,), _ = _run_with_few_logits(model, inputs)
            is_frozen = not any(weight.requires_grad for weight in model.get_output_embeddings().parameters())
            return states, lambda part: _logits_of(model, part), is_frozen
        return model(**inputs, use_cache=False).logits, lambda logits: logits, False


def _run_with_few_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Run a model with the LM head applied only to the first columns; return the head's full inputs and those columns' logits."""
    inputs_of_head: list[Tensor] = []

    def keep_few(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs_of_head.extend(args)
        return tuple(states[:, :_TRIAL_COLUMNS] for states in args)

    hook = model.get_output_embeddings().register_forward_pre_hook(keep_few)
    try:
        return inputs_of_head, model(**inputs, use_cache=False).logits
    finally:
        hook.remove()


def _logits_of(model: nn.Module, states: Tensor) -> Tensor:
    return _head_logits(model.config.get_text_config(), model.get_output_embeddings()(states))


def _head_logits(config: Any, logits: Tensor) -> Tensor:
    """Scale the LM head's output as the model does: Granite divides, Cohere multiplies, Gemma soft-caps."""
    names = ("logits_scaling", "logit_scale", "final_logit_softcapping")
    divisor, factor, cap = (getattr(config, name, None) for name in names)
    if divisor is not None:
        logits = logits / divisor
    if factor is not None:
        logits = logits * factor
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _are_equal(ours: Tensor, logits: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding in an elementwise function."""
    if ours.is_meta or ours.shape != logits.shape:  # without values, only shapes can differ
        return ours.shape == logits.shape
    rounding = 4 * max(torch.finfo(tensor.dtype).eps for tensor in (ours, logits))
    return torch.allclose(ours.float(), logits.float(), rtol=rounding, atol=0)


def _chunked_scores(
    states: Tensor,
    tokens: Tensor,
    head: Callable[[Tensor], Tensor],
    is_frozen: bool,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities for ``tokens [N]`` and, if requested, entropies, float32 ``[N]``, in chunks of ``CHUNK_LOGITS`` logits."""

    def score(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = token_logprobs(head(states), tokens, temperature, with_entropy)
        return logprobs, None if entropy is None else entropy.detach()

    if len(tokens) == 0:
        return score(states, tokens)
    with torch.no_grad():
        num_columns = head(states[:1]).shape[-1]
    rows = max(1, CHUNK_LOGITS // num_columns)
    if len(tokens) <= rows:
        return score(states, tokens)
    chunks = zip(states.split(rows), tokens.split(rows), strict=True)
    if not torch.is_grad_enabled() or (is_frozen and not states.requires_grad):
        scores = [score(*chunk) for chunk in chunks]
    elif is_frozen:
        scores = [_FrozenHead.apply(*chunk, score) for chunk in chunks]
    else:  # recompute each chunk's logits in the backward pass instead of storing them
        scores = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    logprobs, entropies = zip(*scores, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


class _FrozenHead(torch.autograd.Function):
    """Apply ``score``, and compute its gradient with respect to ``states`` in the forward pass; a frozen head has no gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        states: Tensor,
        tokens: Tensor,
        score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            states = states.detach().requires_grad_()
            logprobs, entropy = score(states, tokens)
            # Row i of the sum's gradient is the gradient of log-probability i, which depends on no other row.
            ctx.save_for_backward(*torch.autograd.grad(logprobs.sum(), states))
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs.detach(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradient.unsqueeze(-1) * gradients, None, None
