"""Configuration of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.engines.config import VllmOptions
from rlinf.options import option


@dataclass
class RolloutConfig:
    """Settings of rollouts."""

    num_envs: int = option(64, "Parallel environments over all ranks.", minimum=1)
    num_chunks: int | None = option(
        None, "Policy calls per env and iteration; null: enough for the longest episode.", minimum=1
    )
    group_size: int = option(1, "Episodes that share an EpisodeSpec; GRPO and RLOO need 2 or more.", minimum=1)
    init_states: str = option(
        "random",
        "random: drawn in each iteration; ordered: one after the other; fixed: always the first ones.",
        choices=("random", "ordered", "fixed"),
    )
    auto_reset: bool = option(True, "Start a new episode when one ends; false: one episode per env and iteration.")
    continue_episodes: bool = option(
        False, "Continue running episodes in the next iteration; requires auto_reset; a resumed run starts new ones."
    )
    temperature: float = option(1.0, "Divides the logits, in rollout and training.", minimum=1e-6)
    offload_envs: bool = option(False, "Free the simulators' graphics memory and end their processes between rollouts.")
    worker_processes: int = option(
        0,
        "Processes per rank that collect rollouts with a policy in shared memory, on the CPU; 0: threads instead.",
        minimum=0,
    )
    pipeline_stages: int | None = option(
        None,
        "Threads that step and act in turn, each with a fraction of the envs; null: two, or one where two cost more.",
        minimum=1,
    )
    backend: str = option(
        "torch",
        "What runs the policy: torch (the trained model) or vllm (an engine in its own process).",
        choices=("torch", "vllm"),
    )
    vllm: VllmOptions = option(VllmOptions(), "Settings of the vLLM engine.")
