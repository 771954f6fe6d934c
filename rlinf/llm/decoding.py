"""Skip work in transformers' ``generate`` that is not needed for the next token, for any architecture."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class StaticLayer(DynamicLayer):
    """Cache layer that preallocates ``max_len`` keys and values, so that a new token does not require copying earlier ones.

    Unlike transformers' static layer, it returns only filled positions, so masks need no change.
    """

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, S, head_dim]`` and return views of all keys and values so far."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            # Some models cache image keys separately, which max_len does not include.
            length = max(self.max_len, end)
            self._buffers = [
                part.new_empty(*part.shape[:2], length, part.shape[3]) for part in (key_states, value_states)
            ]
        for buffer, part in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = part
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values


def static_cache(model: nn.Module, max_len: int) -> DynamicCache | None:
    """Return a cache with static full-attention layers, or None for models with their own cache or state."""
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    if not takes_cache or not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [StaticLayer(max_len) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@contextmanager
def next_token_only(model: nn.Module, token_ids: Tensor | None) -> Iterator[None]:
    """Inside the context, compute only values needed for the last position's logits, and set the remaining ones to zero.

    The last layer's MLP computes only the last position, and the LM head only the columns ``token_ids [N]`` (all if None). Modules
    with unexpected names or types are left unchanged.
    """
    with ExitStack() as stack:
        head = model.get_output_embeddings()
        if token_ids is not None and type(head) is nn.Linear:
            stack.enter_context(_replaced_forward(head, _columns_of(head, token_ids)))
        layers = getattr(model.get_decoder(), "layers", None)
        mlp = getattr(layers[-1], "mlp", None) if layers else None
        if isinstance(mlp, nn.Module):
            stack.enter_context(_replaced_forward(mlp, _last_position_of(mlp.forward)))
        yield


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    # Skip modules whose forward is already replaced, for example by placement on several devices.
    if "forward" in vars(module):
        yield
        return
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _columns_of(head: nn.Linear, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
    weight, bias = head.weight[token_ids], None if head.bias is None else head.bias[token_ids]

    def forward(hidden_states: Tensor) -> Tensor:
        columns = nn.functional.linear(hidden_states, weight, bias)
        logits = columns.new_zeros(*columns.shape[:-1], head.out_features)
        logits[..., token_ids] = columns
        return logits

    return forward


def _last_position_of(mlp: Callable[..., Any]) -> Callable[..., Any]:
    """Apply an MLP only to the last position, which is valid because it treats positions independently."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.ndim != 3 or hidden_states.shape[1] == 1 or args or kwargs:
            return mlp(hidden_states, *args, **kwargs)
        last = mlp(hidden_states[:, -1:])
        if not isinstance(last, Tensor):  # a mixture of experts also returns its routing
            return mlp(hidden_states)
        output = last.new_zeros(*hidden_states.shape[:2], last.shape[-1])
        output[:, -1:] = last
        return output

    return forward
