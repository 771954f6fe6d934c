"""Accelerators that a generation backend may use."""

from collections.abc import Sequence

import torch

from rlinf.errors import ConfigError


class RayVirtualCluster:
    """Processes on one machine, one per accelerator. Despite its name, it does not use Ray.

    Raises ConfigError if more machines or GPUs are requested than exist. To place a worker in a Ray cluster, use
    ``ray.remote(VllmGenerationWorker).remote(model_name)``.
    """

    def __init__(self, bundle_ct_per_node_list: Sequence[int], use_gpus: bool = True) -> None:
        counts = bundle_ct_per_node_list
        if not isinstance(counts, Sequence) or len(counts) != 1 or counts[0] < 1:
            raise ConfigError(
                f"RayVirtualCluster got {counts}; expected a single number of processes. Use RayVirtualCluster([1])"
            )
        num_gpus = torch.cuda.device_count()
        if use_gpus and num_gpus < counts[0]:
            smaller = f"[{num_gpus}]" if num_gpus else f"{counts}, use_gpus=False"
            raise ConfigError(
                f"RayVirtualCluster({counts}) needs {counts[0]} GPUs, but torch sees {num_gpus or 'none'}. Use RayVirtualCluster({smaller})"
            )
        self._num_processes = counts[0]
        self.use_gpus = use_gpus

    def world_size(self) -> int:
        """Number of processes."""
        return self._num_processes

    def node_count(self) -> int:
        """Number of machines."""
        return 1
