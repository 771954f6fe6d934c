"""Configuration of the optimiser, the loop and the processes."""

from dataclasses import dataclass

from rlinf.distributed.config import SHARDINGS, DeadlinesConfig
from rlinf.optim.schedule import DECAYS
from rlinf.options import option


@dataclass
class TrainerConfig:
    """Settings of the optimiser, the training loop and its output."""

    max_steps: int = option(100, "RL iterations (rollout + update).", minimum=0)
    minibatch_size: int = option(128, "Samples per optimiser step, across all ranks.", minimum=1)
    learning_rate: float = option(1e-4, "Peak learning rate of the policy.", minimum=1e-12, maximum=1)
    value_learning_rate: float = option(1e-3, "Learning rate of the value head.", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "AdamW weight decay, applied to matrices only.", minimum=0)
    adam_beta1: float = option(0.9, "First AdamW coefficient.", minimum=0, below=1)
    adam_beta2: float = option(0.95, "Second AdamW coefficient.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "AdamW epsilon.", minimum=0)
    warmup_steps: int = option(0, "Optimiser steps of linear warm-up.", minimum=0)
    lr_decay: str = option("none", "Decay schedule of RL's learning rates; none: constant.", choices=tuple(DECAYS))
    max_grad_norm: float = option(1.0, "Maximum global gradient norm.", minimum=1e-6)
    clip_together: bool = option(False, "Clip policy and value head by their joint gradient norm; false: separately.")
    parity_max_gap: float | None = option(
        None,
        "Maximum accepted |rollout - trainer| of log-probs and relative values; null: 0.001 in float32.",
        minimum=0,
    )
    eval_every: int = option(0, "Iterations between evaluations; 0: only before and after training.", minimum=0)
    save_every: int = option(0, "Steps between checkpoints; 0: only by save_every_minutes and at the end.", minimum=0)
    save_every_minutes: float = option(10.0, "Minutes between checkpoints, by rank 0's clock; 0: never.", minimum=0)
    save_mode: str = option(
        "sync", "sync: wait until a checkpoint is written; async: write it in a thread.", choices=("sync", "async")
    )
    max_keep: int = option(2, "Newest checkpoints to keep per phase in addition to the best one; -1: all.", minimum=-1)
    target_success_rate: float | None = option(
        None, "Stop when the success rate of an evaluation reaches this value; null: never.", minimum=0, maximum=1
    )
    on_collapse: str = option(
        "continue",
        "After two evaluations below half the best: continue, stop, or rollback with halved learning rates.",
        choices=("continue", "stop", "rollback"),
    )
    profile_steps: list[int] | None = option(
        None, "[first, last] training steps to profile, numbered as in metrics.jsonl; null: none."
    )
    sharding: str = option(
        "auto", "replicate; fsdp2: shard; auto: shard if a replica does not fit into memory.", choices=SHARDINGS
    )
    shard_size: int | None = option(
        None, "Ranks per shard group, each of which has a replica (HSDP); null: all ranks.", minimum=1
    )
    cpu_offload: bool = option(False, "Keep shards, gradients and optimiser state in main memory.")
    deterministic: bool = option(False, "Use only deterministic GPU kernels, which may be slower.")


@dataclass
class ClusterConfig:
    """Processes and threads."""

    num_processes: int | None = option(
        None, "Number of ranks; null: all processes started by torchrun or srun, otherwise one.", minimum=1
    )
    start: str = option(
        "auto",
        "auto: start ranks here, or use torchrun's or srun's; ray: start them with Ray.",
        choices=("auto", "ray"),
    )
    placement: str = option(
        "colocated",
        "colocated: training ranks roll out; disaggregated: separate rollout workers roll out.",
        choices=("colocated", "disaggregated"),
    )
    num_rollout_workers: int | None = option(
        None, "Total number of rollout workers, a multiple of the number of ranks; null: one per rank.", minimum=1
    )
    max_staleness: int = option(
        0,
        "Maximum age of rollout weights in iterations; above 0 needs rollout processes or workers, and algorithm.tis_cap.",
        minimum=0,
    )
    max_restarts: int = option(
        20, "Maximum number of replaced rollout workers (or restarts of Ray's ranks) per run.", minimum=0
    )
    num_threads: int | None = option(None, "CPU threads per rank; null: OMP_NUM_THREADS, or cores divided by ranks.")
    device: str = option("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    num_env_workers: int = option(
        0, "Ray actors that run an env's simulators; 0: simulators run next to the policy.", minimum=0, maximum=4096
    )
    env_worker_timeout_s: float = option(600.0, "Seconds after which a silent env worker is replaced.", minimum=0.1)
    env_worker_restarts: int = option(20, "Maximum number of worker replacements per env.", minimum=0)
    deadlines: DeadlinesConfig = option(DeadlinesConfig(), "Deadlines of collective operations.")
    tp_size: int = option(1, "Tensor-parallel ranks, always 1: the trainer shards only with FSDP.", choices=(1,))
    pp_size: int = option(1, "Pipeline-parallel ranks, always 1: the trainer shards only with FSDP.", choices=(1,))
    cp_size: int = option(1, "Context-parallel ranks, always 1: the trainer shards only with FSDP.", choices=(1,))
