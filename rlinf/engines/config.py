"""Settings for generation engines."""

from dataclasses import dataclass

from rlinf.options import option


@dataclass
class VllmOptions:
    """Settings for the rollout's vLLM engine, used with `rollout.backend=vllm`."""

    dtype: str = option(
        "auto", "Dtype of weights and KV cache; auto: the policy's.", choices=("auto", "float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(None, "Maximum number of tokens per sequence; null: model's limit.", minimum=1)
    kv_cache_memory_bytes: int | None = option(
        None, "KV cache size in bytes; null: automatic.", minimum=1, maximum=2**50
    )
    gpu_memory_utilization: float | None = option(
        None, "Fraction of GPU memory reserved for the engine; null: automatic.", minimum=0, maximum=1
    )
    tensor_parallel_size: int = option(1, "Number of tensor-parallel GPUs per engine.", minimum=1)
    enforce_eager: bool | None = option(None, "Disable CUDA graphs; null: disable them only on CPUs.")
    sleep: bool = option(True, "Release the engine's GPU memory during updates.")
    timeout_s: float = option(600.0, "Deadline for each engine reply, in seconds.", minimum=0.1)
