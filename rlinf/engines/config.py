"""Settings of generation engines."""

from dataclasses import dataclass

from rlinf.options import option


@dataclass
class VllmOptions:
    """vLLM engine of a rollout; used with `rollout.backend=vllm`."""

    dtype: str = option(
        "auto", "Dtype of weights and cache; auto: as the policy.", choices=("auto", "float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(None, "Maximum tokens per sequence; null: the model's limit.", minimum=1)
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of the KV cache; null: automatic.", minimum=1, maximum=2**50
    )
    gpu_memory_utilization: float | None = option(
        None, "Fraction of GPU memory; null: automatic.", minimum=0, maximum=1
    )
    tensor_parallel_size: int = option(1, "Tensor-parallel GPUs of the engine.", minimum=1)
    enforce_eager: bool | None = option(None, "Disable CUDA graphs; null: only on the CPU.")
    sleep: bool = option(True, "Release the engine's GPU memory during the update.")
    timeout_s: float = option(600.0, "Deadline of each reply of the engine.", minimum=0.1)
