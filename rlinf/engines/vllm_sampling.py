"""Logits processor for vLLM. This module needs vLLM and is imported only by the engine's process."""

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rlinf.engines.vllm_engine import GREEDY_TEMPERATURE


class GreedyTemperature(AdapterLogitsProcessor):
    """Logits processor that divides logits by the temperature in greedy requests; vLLM does so only in sampled requests.

    This does not change the tokens, and makes their log-probabilities equal the trainer's at this temperature.
    """

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM applies this processor to greedy requests."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        temperature = (params.extra_args or {}).get(GREEDY_TEMPERATURE)
        return None if temperature is None else lambda _, logits: logits / temperature
