"""Configuration of rollouts."""

from dataclasses import dataclass

from rlinf.engines.config import VllmOptions
from rlinf.options import option


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
    backend: str = option(
        "torch", "Inference engine of the policy: torch, or vllm in a separate process.", choices=("torch", "vllm")
    )
    vllm: VllmOptions = option(VllmOptions(), "Settings of the vLLM engine.")
