"""Configuration of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.engines.config import VllmOptions
from rlinf.options import option


@dataclass
class RolloutConfig:
    """How experience is collected."""

    num_envs: int = option(64, "Parallel environments over all ranks.", minimum=1)
    num_chunks: int | None = option(
        None,
        "Policy calls per environment and iteration; they must cover the longest episode. null: just as many as its steps need.",
        minimum=1,
    )
    group_size: int = option(1, "Episodes that share an EpisodeSpec (GRPO and RLOO need 2 or more).", minimum=1)
    init_states: str = option(
        "random",
        "random: drawn again; ordered: one after the other, over tasks and initial states; fixed: the first ones, in "
        "every iteration.",
        choices=("random", "ordered", "fixed"),
    )
    auto_reset: bool = option(True, "Start a new episode where one ends; false: one episode per env and iteration.")
    continue_episodes: bool = option(
        False,
        "An episode that runs at the end of an iteration continues in the next one; false: every iteration starts new ones. A resumed run "
        "starts new ones either way. Required: rollout.auto_reset, and simulators that stay.",
    )
    temperature: float = option(1.0, "Divides the logits in rollout and training alike.", minimum=1e-6)
    offload_envs: bool = option(
        False, "Free the simulators' graphics memory, and end their worker processes, between rollouts."
    )
    worker_processes: int = option(
        0,
        "Processes of a rank that play, each with a fraction of the envs and the policy in memory that all share; required: a policy on the "
        "CPU, and simulators without processes of their own. 0: threads of this process play.",
        minimum=0,
    )
    pipeline_stages: int | None = option(
        None,
        "Threads, each with a fraction of the envs; while one steps its simulators, another acts (without rollout.worker_processes). "
        "null: two, or one for cheap simulators (in this process, without images), for a simulation on the GPU, and where "
        "two would have fewer than 32 envs each on a GPU.",
        minimum=1,
    )
    backend: str = option(
        "torch",
        "What runs the policy: torch (the model that is trained), or vllm (an engine in its own process).",
        choices=("torch", "vllm"),
    )
    vllm: VllmOptions = option(VllmOptions(), "Settings of the vLLM engine.")
