"""Generators owned by a rank: the trained model itself, or a vLLM engine that receives its weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlinf.engines.weight_handle import WeightBuckets
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.generation_interface import GenerationInterface
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.vllm_generation import VllmGeneration
from rlinf.models.lora import MergedWeights


class LocalGenerator:
    """Generator that uses this rank's own model or engine, with its current weights."""

    def __init__(self, engine: HuggingFacePolicy | GenerationInterface) -> None:
        self.engine = engine

    def generate(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        for batch in batches:
            yield self.engine.generate(batch, greedy)

    @contextmanager
    def ready(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """See ``Generator.close``."""


class TorchGenerator(LocalGenerator):
    """Generator that uses the trained policy itself, so no weights need to be pushed."""

    def __init__(self, policy: HuggingFacePolicy) -> None:
        super().__init__(policy)
        self.policy = policy

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Gather all weights on this rank inside the context, because the number of decoding steps differs between ranks."""
        with self.policy.parallel.gathered():
            yield


class VllmGenerator(LocalGenerator):
    """Generator that uses this rank's vLLM engine and the trained weights, with adapters merged."""

    def __init__(self, policy: HuggingFacePolicy, settings: Mapping[str, Any]) -> None:
        self.policy = policy
        self.vllm = VllmGeneration(None, settings)
        super().__init__(self.vllm)
        self._buckets = WeightBuckets()
        self._version = 0

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Push the current weights; on exit, put the engine to sleep to free its memory for training."""
        with self.policy.parallel.gathered():
            self.vllm.prepare_for_generation()
            self._version += 1
            self.vllm.update_weights(MergedWeights(self.policy.model, self._version, self._buckets))
            yield
            self.vllm.finish_generation()

    def close(self) -> None:
        """Stop the engine."""
        self.vllm.shutdown()
