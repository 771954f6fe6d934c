"""Logits processor for vLLM. Only the engine's process imports this module, which needs vLLM."""

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rlinf.engines.vllm_engine import GREEDY_TEMPERATURE


class GreedyTemperature(AdapterLogitsProcessor):
    """Logits processor that divides the logits of greedy requests by the temperature; vLLM does so only for sampled requests.

    The tokens are unchanged, and their log-probabilities equal the trainer's at this temperature.
    """

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM applies this processor to greedy requests."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        temperature = (params.extra_args or {}).get(GREEDY_TEMPERATURE)
        return None if temperature is None else lambda _, logits: logits / temperature
