"""Configuration of rollouts, optimisation, behaviour cloning and processes."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.config.options import option
from rlinf.models.generation.config import VllmOptions


@dataclass
class RolloutConfig:
    """How experience is collected."""

    num_envs: int = option(64, "Parallel environments over all ranks.", minimum=1)
    num_chunks: int = option(
        48, "Policy calls per environment and iteration; they must cover the longest episode.", minimum=1
    )
    group_size: int = option(1, "Episodes that share an EpisodeSpec (GRPO and RLOO need 2 or more).", minimum=1)
    init_states: str = option(
        "random",
        "random: drawn anew; ordered: one after the other, over tasks and initial states; fixed: the first ones, in "
        "every iteration.",
        choices=("random", "ordered", "fixed"),
    )
    auto_reset: bool = option(True, "Start a new episode where one ends; false: one episode per env and iteration.")
    temperature: float = option(1.0, "Divides the logits in rollout and training alike.", minimum=1e-6)
    offload_envs: bool = option(
        False, "Free the simulators' graphics memory, and end their worker processes, between rollouts."
    )
    num_lanes: int | None = option(
        None,
        "Threads that each play a share of the envs: while one steps, the policy acts for another; null: two, and one where "
        "steps cost less than threads (simulators in this process that draw no images). A simulation on the GPU, which steps all "
        "rows at once, has one, whatever is typed.",
        minimum=1,
    )
    backend: str = option(
        "torch",
        "What runs the policy: torch (the model that is trained), or vllm (an engine in its own process).",
        choices=("torch", "vllm"),
    )
    vllm: VllmOptions = option(VllmOptions(), "Settings of the vLLM engine.")


@dataclass
class TrainerConfig:
    """The optimiser, the loop and what it writes."""

    max_steps: int = option(100, "RL iterations (rollout + update).", minimum=0)
    minibatch_size: int = option(128, "Samples of one optimiser step over all ranks.", minimum=1)
    learning_rate: float = option(1e-4, "Peak learning rate of the policy.", minimum=0, maximum=1)
    value_learning_rate: float = option(1e-3, "Learning rate of the value head.", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "AdamW weight decay of matrices.", minimum=0)
    adam_beta1: float = option(0.9, "First AdamW coefficient.", minimum=0, below=1)
    adam_beta2: float = option(0.95, "Second AdamW coefficient.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "AdamW epsilon.", minimum=0)
    warmup_steps: int = option(0, "Optimiser steps of linear warm-up.", minimum=0)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this global norm.", minimum=1e-6)
    parity_max_gap: float | None = option(
        None,
        "Largest accepted |rollout - trainer| of a log-prob, and of a value in shares of the largest one. Above it the run stops: in "
        "float32 at any step, in 16 bits at the first step of a process and the first after an update, later it warns. null: 0.001 "
        "in float32; in 16 bits a mean exp|gap| of 1.05 instead.",
        minimum=0,
    )
    eval_every: int = option(0, "Iterations between evaluations; 0: only before and after training.", minimum=0)
    save_every: int = option(
        0, "Steps (of cloning, of RL) between checkpoints; 0: at the end, and as save_every_minutes has it.", minimum=0
    )
    save_every_minutes: float = option(
        10.0,
        "Minutes after which a checkpoint is due; 0: never. The clock of rank 0 decides, and no number changes.",
        minimum=0,
    )
    max_keep: int = option(
        2, "Newest checkpoints of a phase kept, next to the one of the best evaluation; -1: all.", minimum=-1
    )
    target_success_rate: float | None = option(
        None, "Stop when an evaluation during training reaches this rate; null: never.", minimum=0, maximum=1
    )
    sharding: str = option(
        "auto",
        "fsdp2: shard weights over ranks; none: one process; auto: fsdp2 when there is more than one rank.",
        choices=("auto", "fsdp2", "none"),
    )


@dataclass
class ExpertConfig:
    """The scripted demonstrator and its faults."""

    aim_offset_m: list[float] = option([0.0, 0.0], "Metres (x, y) by which the demonstrator's aim is miscalibrated.")
    jitter: float = option(
        0.0,
        "Standard deviation of noise on executed actions (labels stay clean), in units of the action range.",
        minimum=0,
    )
    keep_failures: bool = option(True, "Keep demonstrations that failed.")


@dataclass
class SFTConfig:
    """Behaviour cloning; runs before RL when `max_steps` > 0. It clones a dataset, or the scripted expert without one."""

    max_steps: int = option(0, "Optimiser steps; 0: no behaviour cloning.", minimum=0)
    dataset: str | None = option(
        None,
        "Folder of demonstrations (LeRobotDataset v3.0 or RLDS); null: the scripted expert plays them now, in memory.",
    )
    cameras: list[str] | None = option(
        None, "Cameras of the dataset that stand for `env.cameras`, in their order; null: those of the same names."
    )
    state_key: str | None = option(
        None,
        "Column of the dataset with the robot's state; null: observation.state (LeRobot), observation/state (RLDS).",
    )
    allow_mismatch: list[str] = option(
        [], "Keys of `env` in which the dataset, where `rlinf collect` wrote it, may differ from the present env."
    )
    num_workers: int = option(
        2, "Threads per rank that read batches of the dataset ahead; 0: read when needed.", minimum=0
    )
    num_demonstrations: int = option(1200, "Episodes of the scripted expert.", minimum=1)
    expert: ExpertConfig = option(ExpertConfig(), "The demonstrator.")
    batch_size: int = option(64, "Samples of one optimiser step over all ranks.", minimum=1)
    learning_rate: float = option(5e-4, "Peak learning rate, constant after warm-up.", minimum=0, maximum=1)
    warmup_steps: int = option(50, "Optimiser steps of linear warm-up.", minimum=0)
    eval_every: int = option(0, "Optimiser steps between evaluations; 0: only at the end.", minimum=0)
    time_limit_s: float | None = option(
        None, "Go on beyond max_steps until this many seconds have passed; null: stop at max_steps.", minimum=0
    )


@dataclass
class ClusterConfig:
    """Processes and threads."""

    num_processes: int = option(1, "Ranks on this machine (FSDP over gloo on CPU, nccl on GPUs).", minimum=1)
    num_threads: int | None = option(None, "CPU threads per rank; null: all cores divided by the ranks.")
    device: str = option("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    timeout_s: float = option(
        3600.0, "Seconds that a rank waits for the others before the run ends with an error.", minimum=1
    )
    tp_size: int = option(1, "Tensor parallel ranks of the trainer, which shards by FSDP only.", choices=(1,))
    pp_size: int = option(1, "Pipeline parallel ranks of the trainer, which shards by FSDP only.", choices=(1,))
    cp_size: int = option(1, "Context parallel ranks of the trainer, which shards by FSDP only.", choices=(1,))
