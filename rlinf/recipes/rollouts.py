"""Who generates the answers of GRPO: the trained model itself, or a vLLM engine that gets its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlinf.engines.weight_handle import WeightBuckets
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.vllm_generation import VllmGeneration
from rlinf.models.merged_weights import MergedWeights


class TorchGenerator:
    """The trained policy generates; there is nothing to push.

    Args:
        policy: Trained.
    """

    def __init__(self, policy: HuggingFacePolicy) -> None:
        self.policy = policy
        self.generate = policy.generate

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Hold all weights on this rank inside, so that ranks may generate for different times."""
        with self.policy.parallel.whole():
            yield

    def close(self) -> None:
        """Nothing is to close."""


class VllmGenerator:
    """A vLLM engine of this rank generates with the trained weights, adapters merged.

    Args:
        policy: Trained.
        settings: ``VllmConfig``.
    """

    def __init__(self, policy: HuggingFacePolicy, settings: Mapping[str, Any]) -> None:
        self.policy = policy
        self.engine = VllmGeneration(None, settings)
        self.generate = self.engine.generate
        self._buckets = WeightBuckets()
        self._version = 0

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Push the present weights, and let the engine sleep afterwards, so that training has its memory."""
        with self.policy.parallel.whole():
            self.engine.prepare_for_generation()
            self._version += 1
            self.engine.update_weights(MergedWeights(self.policy.model, self._version, self._buckets))
            yield
            self.engine.finish_generation()

    def close(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()
