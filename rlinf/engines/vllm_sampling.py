"""What the engine adds to vLLM's sampling. Imported in the engine's process only; importing it needs vLLM."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rlinf.engines.vllm_engine import GREEDY_TEMPERATURE


class GreedyTemperature(AdapterLogitsProcessor):
    """Divides the logits of greedy requests by the temperature, which vLLM does for sampled ones only.

    The choice stays the same, and its log-probability is the one that the trainer computes at this temperature.
    """

    def is_argmax_invariant(self) -> bool:
        """vLLM leaves processors that say so out of greedy requests."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        temperature = (params.extra_args or {}).get(GREEDY_TEMPERATURE)
        return None if temperature is None else lambda _, logits: logits / temperature
