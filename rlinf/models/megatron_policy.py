"""The place of a Megatron-LM backend. It checks its arguments and then says what is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from rlinf.config.options import from_mapping, option
from rlinf.distributed.batched_data_dict import BatchedDataDict
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.models.interfaces import LossFunction, PolicyInterface


@dataclass
class MegatronPolicyConfig:
    """Keyword arguments of ``MegatronPolicy``."""

    tensor_model_parallel_size: int = option(1, "GPUs that share each layer.", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Groups of GPUs that hold successive layers.", minimum=1)
    sequence_parallel: bool = option(False, "Split activations along the sequence; needs tensor parallelism.")
    use_flash_attention: bool = option(False, "Flash attention kernels.")


class MegatronPolicy(PolicyInterface):
    """Not available: no release of this package trains with Megatron-LM. ``HuggingFacePolicy`` is the policy that runs.

    The class is here so that code can name it, and so that a wrong configuration is told from a missing backend.

    Args:
        model_name: Name of the model.
        **kwargs: Fields of ``MegatronPolicyConfig``.

    Raises:
        ConfigError: A keyword is unknown or contradicts another.
        MissingDependencyError: Always otherwise.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        config = from_mapping(MegatronPolicyConfig, kwargs)
        if config.sequence_parallel and config.tensor_model_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel=True needs tensor_model_parallel_size of 2 or more, and it is 1. "
                "Type sequence_parallel=False"
            )
        found = "is installed, but" if importlib.util.find_spec("megatron") else "is not installed, and"
        raise MissingDependencyError(
            f"MegatronPolicy('{model_name}') needs the extra 'megatron' (megatron-core). It {found} this release has no "
            f"backend for it. Use HuggingFacePolicy('{model_name}')"
        )

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        raise NotImplementedError("MegatronPolicy has no backend")

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        raise NotImplementedError("MegatronPolicy has no backend")

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        raise NotImplementedError("MegatronPolicy has no backend")
