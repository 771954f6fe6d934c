"""Settings of the engines that generate."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.options import option


@dataclass
class VllmOptions:
    """The vLLM engine of a rollout; used with `rollout.backend=vllm`."""

    dtype: str = option(
        "auto",
        "Number format of weights and cache; auto: the format of the policy's weights.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None, "Most tokens of image, prompt and actions; null: what the language model allows.", minimum=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes of the key-value cache; null: enough for all envs, on a GPU what gpu_memory_utilization leaves.",
        minimum=1,
        maximum=2**50,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of the GPU's memory that the engine may take, weights included; null: 0.8, or on a GPU with the policy what that leaves.",
        minimum=0,
        maximum=1,
    )
    tensor_parallel_size: int = option(1, "GPUs over which the engine splits the model.", minimum=1)
    enforce_eager: bool | None = option(
        None, "Run the model without CUDA graphs; null: capture them on a GPU. An engine on the CPU has none."
    )
    sleep: bool = option(
        True,
        "Release the engine's GPU memory while the policy is scored and updated. An engine on the CPU releases nothing.",
    )
    timeout_s: float = option(
        600.0, "Deadline of every answer of the engine; then the run stops with the engine's stacks.", minimum=0.1
    )
