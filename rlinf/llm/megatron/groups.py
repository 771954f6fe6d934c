"""Process groups for a Megatron-core model with tensor, sequence, pipeline and data parallelism."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.distributed.devices import take_own_device
from rlinf.distributed.process_group import backend_of, world_size
from rlinf.errors import ConfigError


class MegatronGroups:
    """Megatron-core's process groups, and this rank's position in them.

    Attributes:
        tensor: Group of ranks that split each layer.
        pipeline: Group of ranks with successive layers.
        model: Group of all ranks of one model.
        data: Group of ranks with the same part of the weights.
        stage, num_stages: This rank's pipeline stage, and the number of stages.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        sizes = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size)
        if not parallel_state.model_parallel_is_initialized():
            # Skip the additional gloo groups, which are not needed and would start two threads each (see process_group).
            parallel_state.initialize_model_parallel(*sizes, create_gloo_process_groups=False)
        self.tensor = parallel_state.get_tensor_model_parallel_group()
        self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        actual = (self.tensor.size(), self.pipeline.size())
        if actual != sizes:
            raise ConfigError(
                f"tensor_model_parallel_size and pipeline_model_parallel_size are {sizes}, but this process already has groups "
                f"of {actual}. Pass tensor_model_parallel_size={actual[0]}, pipeline_model_parallel_size={actual[1]}"
            )
        # Set this tracker although it is not used, because the default one needs CUDA.
        initialize_rng_tracker(inference_rng_tracker=True)
        self._device = device
        self.model = parallel_state.get_model_parallel_group()
        self.data = parallel_state.get_data_parallel_group()
        ranks = dist.get_process_group_ranks(self.pipeline)
        self.stage, self.num_stages = self.pipeline.rank(), len(ranks)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.num_stages - 1
        self._last = ranks[-1]
        self.previous, self.next = ranks[self.stage - 1], ranks[(self.stage + 1) % self.num_stages]

    def sum(self, values: list[float], group: Any) -> list[float]:
        """Return the values summed over a group."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=group)
        return total.tolist()

    def broadcast_from_last_stage(self, tensor: Tensor) -> None:
        """Broadcast the last stage's tensor to every stage in place."""
        dist.broadcast(tensor, self._last, group=self.pipeline)

    def from_last_stage(self, value: Any) -> Any:
        """Return the last stage's object on every stage."""
        box = [value]
        dist.broadcast_object_list(box, self._last, group=self.pipeline)
        return box[0]


def check_device(config: Any, device: torch.device) -> None:
    """Raise ConfigError for options that the device does not support."""
    for name, needed in (("sequence_parallel", "Megatron-core's collectives allocate on CUDA"),
                         ("use_flash_attention", "the flash kernel runs on CUDA")):  # fmt: skip
        if getattr(config, name) and device.type != "cuda":
            raise ConfigError(f"{name}=True, but the device is '{device}': {needed}. Pass {name}=False")
    if config.use_flash_attention and "bfloat16" not in str(config.torch_dtype):
        raise ConfigError(
            f"use_flash_attention=True with torch_dtype={config.torch_dtype}; expected bfloat16. Pass torch_dtype='bfloat16'"
        )


def check_ranks(config: Any) -> None:
    """Raise ConfigError if the number of ranks is not a multiple of the ranks per model."""
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    needed = tensor * pipeline
    if world_size() % needed:
        raise ConfigError(
            f"tensor_model_parallel_size={tensor} and pipeline_model_parallel_size={pipeline} need {needed} ranks per model, but "
            f"there are {world_size()}. Start {needed} ranks with torchrun, and call torch.distributed.init_process_group in each"
        )


def device_of_this_rank() -> torch.device:
    """Return this rank's device; create a process group of size 1 if none exists."""
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group(backend_of("cuda" if cuda else "cpu"), store=dist.HashStore(), rank=0, world_size=1)
    return take_own_device() if cuda else torch.device("cpu")
