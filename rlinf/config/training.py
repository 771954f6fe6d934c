"""Configuration of the optimiser, the loop and the processes."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.distributed.config import SHARDINGS, DeadlinesConfig
from rlinf.optim.schedule import DECAYS
from rlinf.options import option


@dataclass
class TrainerConfig:
    """The optimiser, the loop and what it writes."""

    max_steps: int = option(100, "RL iterations (rollout + update).", minimum=0)
    minibatch_size: int = option(128, "Samples of one optimiser step over all ranks.", minimum=1)
    learning_rate: float = option(1e-4, "Peak learning rate of the policy.", minimum=1e-12, maximum=1)
    value_learning_rate: float = option(1e-3, "Learning rate of the value head.", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "AdamW weight decay of matrices.", minimum=0)
    adam_beta1: float = option(0.9, "First AdamW coefficient.", minimum=0, below=1)
    adam_beta2: float = option(0.95, "Second AdamW coefficient.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "AdamW epsilon.", minimum=0)
    warmup_steps: int = option(0, "Optimiser steps of linear warm-up.", minimum=0)
    lr_decay: str = option(
        "none",
        "How the learning rates of RL, also that of a head, decay over its iterations; none: they stay.",
        choices=tuple(DECAYS),
    )
    lr_min_factor: float = option(
        0.0, "Smallest fraction of the learning rates while they decay.", minimum=0, maximum=1
    )
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this global norm.", minimum=1e-6)
    clip_together: bool = option(
        False,
        "Policy and value head share one norm; false: each has its own, so that value errors do not slow the policy.",
    )
    parity_max_gap: float | None = option(
        None,
        "Largest accepted |rollout - trainer| of a log-prob, and of a value in fractions of the largest. Above it the run stops: in float32 "
        "at any step, in 16 bits at the first step and after the first update, later it warns. null: 0.001 in float32; "
        "in 16 bits a mean exp|gap| of 1.05.",
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
    save_mode: str = option(
        "sync",
        "sync: training continues when a checkpoint is written; async: when its numbers are copied, and a thread writes. An error of the "
        "thread ends the run at its next checkpoint.",
        choices=("sync", "async"),
    )
    max_keep: int = option(
        2, "Newest checkpoints of a phase kept, next to the one of the best evaluation; -1: all.", minimum=-1
    )
    target_success_rate: float | None = option(
        None, "Stop when an evaluation during training reaches this rate; null: never.", minimum=0, maximum=1
    )
    on_collapse: str = option(
        "continue",
        "After two evaluations of RL in a row certainly below half of the best before. continue: nothing. stop: the run ends. rollback: it "
        "returns to the best checkpoint with half the learning rates, three times at most, then ends. Needs trainer.eval_every.",
        choices=("continue", "stop", "rollback"),
    )
    profile_steps: list[int] | None = option(
        None,
        "[first, last]: the steps of RL (of cloning where trainer.max_steps is 0) whose operations are recorded, numbered from 0 as in "
        "metrics.jsonl; the report links the trace. null: none.",
    )
    sharding: str = option(
        "auto",
        "How ranks hold the trained model. replicate: each of them whole; fsdp2: in shards; auto: in shards if there are several ranks "
        "and a replica is too large for it. The run prints the choice and its reason.",
        choices=SHARDINGS,
    )
    shard_size: int | None = option(
        None,
        "Ranks that divide the weights among themselves (HSDP), e.g. the ranks of one machine; groups of so many ranks hold replicas. "
        "null: all ranks.",
        minimum=1,
    )
    cpu_offload: bool = option(
        False, "Keep shards, their gradients and the optimiser in main memory, and gather weights from there."
    )
    deterministic: bool = option(
        False,
        "Use only kernels of torch that give equal bits for equal inputs on a GPU, which may be slower; an operation without one ends the "
        "run. Runs on CPUs repeat either way.",
    )


@dataclass
class ClusterConfig:
    """Processes and threads."""

    num_processes: int | None = option(
        None,
        "Ranks (gloo on CPUs, nccl on GPUs). null: one; in a command that torchrun or srun has started several times, all of "
        "these, on any number of machines. Else cluster.start says who starts them. One rank is the process of the command.",
        minimum=1,
    )
    start: str = option(
        "auto",
        "auto: the ranks are started here, or torchrun or srun has started them; ray: Ray starts several ranks, and rollout workers, in the cluster "
        "that the variable RAY_ADDRESS names, or in one that is started on this machine for the run.",
        choices=("auto", "ray"),
    )
    placement: str = option(
        "colocated",
        "colocated: the ranks that train also play; disaggregated: rollout workers in processes of their own play, on any machine.",
        choices=("colocated", "disaggregated"),
    )
    num_rollout_workers: int | None = option(
        None,
        "RolloutWorkers over all machines: of a training with cluster.placement=disaggregated, a multiple of the ranks (null: one for each rank), or of "
        "rlinf evaluate (null: the ranks play).",
        minimum=1,
    )
    max_staleness: int = option(
        0,
        "Iterations by which the weights that play may be older than those that are trained. From 1 on, the rollouts of the next "
        "iterations are played while the policy is updated; required: processes or rollout workers that play (rollout.worker_processes, "
        "cluster.placement=disaggregated), and algorithm.tis_cap.",
        minimum=0,
    )
    max_restarts: int = option(
        20,
        "RolloutWorkers of each rank that may be replaced (killed, machine lost, deadline missed) before the run ends; also, how often the "
        "ranks of cluster.start=ray may start again from the newest checkpoint.",
        minimum=0,
    )
    num_threads: int | None = option(
        None, "CPU threads per rank; null: OMP_NUM_THREADS, or all cores divided by the ranks."
    )
    device: str = option("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    num_env_workers: int = option(
        0,
        "Ray actors that hold the simulators of each env, in which they share the rows. 0: none, simulators run next to the policy. "
        "They go to the machines that have the Ray resource rlinf_env, if there are any, else to all.",
        minimum=0,
        maximum=4096,
    )
    env_worker_timeout_s: float = option(
        600.0, "Seconds in which such an actor may neither answer nor finish a simulator call.", minimum=0.1
    )
    env_worker_restarts: int = option(20, "Such actors of an env that may be replaced before the run ends.", minimum=0)
    deadlines: DeadlinesConfig = option(DeadlinesConfig(), "Deadlines of what several ranks do together.")
    tp_size: int = option(1, "Tensor parallel ranks of the trainer, which shards by FSDP only.", choices=(1,))
    pp_size: int = option(1, "Pipeline parallel ranks of the trainer, which shards by FSDP only.", choices=(1,))
    cp_size: int = option(1, "Context parallel ranks of the trainer, which shards by FSDP only.", choices=(1,))
