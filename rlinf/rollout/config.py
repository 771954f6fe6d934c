"""Configuration of rollouts."""

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


@dataclass
class RolloutConfig:
    """Settings of rollouts."""

    num_envs: int = option(64, "Parallel environments across all ranks.", minimum=1)
    num_chunks: int | None = option(None, "Policy calls per env and iteration; null: longest episode.", minimum=1)
    group_size: int = option(1, "Episodes with the same EpisodeSpec; GRPO and RLOO need 2 or more.", minimum=1)
    init_states: str = option(
        "random",
        "random: drawn each time; ordered: in sequence; fixed: always the same.",
        choices=("random", "ordered", "fixed"),
    )
    auto_reset: bool = option(True, "Start a new episode when one ends; false: one episode per env and iteration.")
    continue_episodes: bool = option(False, "Continue running episodes in the next iteration; requires auto_reset.")
    temperature: float = option(1.0, "Divisor of the logits in rollout and training.", minimum=1e-6)
    offload_envs: bool = option(False, "Free the simulators' graphics memory and end their processes between rollouts.")
    worker_processes: int = option(
        0, "Rollout processes per rank, with a shared policy on the CPU; 0: use threads.", minimum=0
    )
    pipeline_stages: int | None = option(
        None, "Threads that alternate between acting and stepping; null: two, or one if cheaper.", minimum=1
    )
    merge_adapters: bool = option(False, "Act with LoRA adapters merged into a copy of the weights.")
    backend: str = option(
        "torch", "Inference engine of the policy: torch, or vllm in a separate process.", choices=("torch", "vllm")
    )
    vllm: VllmOptions = option(VllmOptions(), "Settings of the vLLM engine.")
