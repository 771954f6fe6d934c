"""Processes, collectives, devices and FSDP. Also exports ``BatchedDataDict`` and ``RayVirtualCluster``."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__, {"BatchedDataDict": "rlinf.llm.batched_data_dict", "RayVirtualCluster": "rlinf.llm.vllm_generation"}
)
