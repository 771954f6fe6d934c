"""Choose a token policy's rows per pass and its recomputed layers from an estimate of its GPU memory."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlinf.distributed.parallel import StateBytes
from rlinf.llm.hf_model import HFModel
from rlinf.llm.logprobs import batch_scores
from rlinf.models.layers import find_layers, set_training_options

MOST_TOKENS = 2**14
"""Maximum number of tokens in a micro-batch that is chosen."""


class PassPlan(NamedTuple):
    """How an update uses GPU memory."""

    length: int  # tokens of the longest row
    rows: int  # number of such rows per forward-backward pass
    recomputed: int  # layers whose activations are recomputed
    num_layers: int
    memory: int | str  # estimated peak bytes of an update, or why they are unknown

    def __str__(self) -> str:
        memory = self.memory if isinstance(self.memory, str) else f"about {self.memory / 1e9:.1f} GB"
        return f"{self.rows} x {self.length} tokens at a time, {self.recomputed} of {self.num_layers} layers recomputed, {memory}"


def plan_passes(
    model: HFModel, length: int, rows: int | None, recomputed: bool | str, gpu_bytes: int, *,
    shards: int | None, offloads: bool, has_reference: bool,
) -> PassPlan:  # fmt: skip
    """Choose the fewest recomputed layers with which an update fits, and then the most rows.

    Args:
        model: With adapters; moved to the meta device, where its layers may be left recomputing.
        length: Tokens of the longest row.
        rows: Rows per pass; None to choose them.
        recomputed: Whether to recompute all layers or none; ``auto`` to choose their number (all if memory is unknown).
        shards: Ranks over which weights, gradients and optimiser are sharded; None if they are replicated.
        has_reference: Whether a copy of the initial weights is on the GPU.
    """
    # These modules import the simulators' settings.
    from rlinf.preflight.activations import NOTHING, measure_update
    from rlinf.preflight.gpu_memory import FILLED, LIBRARIES, gathered_bytes

    def run(count: int) -> list[Tensor]:
        ids = torch.zeros(count, length, dtype=torch.int64)
        return [batch_scores(inner, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).logprobs]

    state, inner, num_layers = StateBytes.of(model, shards), model.to("meta").model, len(find_layers(model))
    resident = LIBRARIES + (gathered_bytes(model) if shards else 0) + (state.weights if has_reference else 0)
    resident += 0 if offloads else state.total
    free, most = FILLED * gpu_bytes - resident, max(1, MOST_TOKENS // length)
    counts = range(num_layers + 1) if recomputed == "auto" else [num_layers * bool(recomputed)]
    reason = "memory unknown with images"
    if getattr(inner.config, "vision_config", None) is None:
        try:
            # Memory is convex in the rows, so the line through the smallest and the largest batch is an upper bound between them.
            updates, saved = measure_update(inner, run, max(2, rows or most))
            passes = replace(NOTHING, updates=updates, recomputes=updates, saved=saved)
            if counts[-1] and (counts[0] or updates.at(rows or 1) > free):
                set_training_options(inner, recomputed=True, compiled=False)
                passes = replace(passes, recomputes=measure_update(inner, run, max(2, rows or most))[0])
            count = next((n for n in counts if passes.update(n).at(rows or 1) <= free), counts[-1])
            line = passes.update(count)
            rows = rows or max(1, min(most, int((free - line.fixed) / line.row)))
            return PassPlan(length, rows, count, num_layers, resident + line.at(rows))
        except Exception as error:  # noqa: BLE001 - a model's own code may raise any exception on the meta device
            reason = f"memory unknown ({type(error).__name__}: {error})"
    return PassPlan(length, rows or 2, counts[-1], num_layers, reason)
