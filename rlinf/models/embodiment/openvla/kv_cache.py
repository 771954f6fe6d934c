"""Keys and values of a sequence whose final length is known."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """Keys and values of every layer, written into buffers of the final length, so that a new token copies nothing else.

    The buffers are made at the first update, in its dtype. For decoding without gradients.

    Attributes:
        max_len: Positions of the whole sequence, future ones included.
        length: Positions written so far; ``run_layers`` counts them, once all layers have written.
        rotary: Rotary tables of all positions; ``run_layers`` computes them at the first call.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self.rotary: tuple[Tensor, Tensor] | None = None
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def repeated(self, times: int, length: int) -> KVCache:
        """Return a cache of ``times`` copies of each row, next to each other, with its first ``length`` positions."""
        cache = KVCache(self.max_len)
        cache.length = length
        is_shared = len(self.rotary[0]) == 1  # by all rows
        cache.rotary = self.rotary if is_shared else tuple(x.repeat_interleave(times, dim=0) for x in self.rotary)
        for layer, parts in self._buffers.items():
            cache._buffers[layer] = tuple(part.repeat_interleave(times, dim=0) for part in parts)
        return cache

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, S, head_dim]`` and return all keys and values so far (views of the buffers)."""
        end = self.length + key.shape[2]
        if end > self.max_len:
            raise ValueError(f"The cache holds {self.max_len} positions, and {end} are wanted.")
        if layer_idx not in self._buffers:
            shape = (*key.shape[:2], self.max_len, key.shape[3])
            self._buffers[layer_idx] = key.new_empty(shape), value.new_empty(shape)
        keys, values = self._buffers[layer_idx]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]
