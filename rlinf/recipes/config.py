"""The configuration of a recipe: sections and keys of its TOML or YAML file.

``rlinf.recipes.load`` reads it from files and checks what concerns several keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf.distributed.config import DeadlinesConfig
from rlinf.number_formats import GIB
from rlinf.options import PathText, option

TYPES = ("sft", "grpo", "dpo")
DTYPES = ("bfloat16", "float16", "float32")
VARIANTS = ("grpo", "gspo", "dapo", "rloo")
LOSS_TYPES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
DECAYS = ("none", "sqrt", "cosine", "linear")
MODES = ("disaggregated", "colocated", "colocated_separated")
BACKENDS = ("vllm", "torch")
DEVICES = ("auto", "cuda", "cpu")
LOGGERS = ("console", "wandb", "tensorboard")
UPLOADS = (False, True, "final", "all")

_REWARDS = "A name, a list of names that are summed, or a section of name and weight"


@dataclass
class DatasetConfig:
    """Where rows come from. A dataset script may read them elsewhere."""

    name: PathText = option(
        "", "Name on the hub, folder of `save_to_disk`, folder, or jsonl, json, parquet or csv file."
    )
    subset: str = option("", "Subset (configuration) of a dataset on the hub.")
    revision: str = option("", "Branch, tag or commit on the hub.")
    split: str | list[str] = option("train", "Split, or splits that are joined.")
    test_size: int | float | None = option(
        None,
        "First rows that are kept for validation: their number, or below 1.0 their fraction; null: 10 % of all.",
        minimum=0,
    )
    streaming: bool = option(False, "Read rows while training, instead of all before; needs train.max_num_steps.")
    skip_bad_rows: bool = option(False, "Leave out and count rows that cannot be used, instead of ending the run.")


@dataclass
class OverlongRewardConfig:
    """A penalty for answers near the length limit."""

    enable_overlong_penalty: bool = option(False, "Subtract the penalty from the reward.")
    buffer_length: int | None = option(
        None, "Tokens before the limit over which the penalty rises; null: a quarter of the limit.", minimum=1
    )
    penalty_factor: float = option(1.0, "Penalty at the limit.", minimum=0)


@dataclass
class TrainPolicyConfig:
    """The method of training, its data and its loss."""

    type: str = option(
        "sft",
        "sft: supervised fine-tuning; grpo: rollouts with rewards; dpo: pairs of answers. Left out, it is grpo if a key of rollouts "
        "(`temperature`, `epsilon_low`, `epsilon_high`, `kl_beta`) is there.",
        choices=TYPES,
    )
    dataset: DatasetConfig = option(DatasetConfig(), "Rows to train on.")
    mini_batch: int = option(
        2, "Rows of one forward-backward pass on one rank; at most the rows that a rank has of a batch.", minimum=1
    )
    dataloader_shuffle: bool = option(True, "Shuffle the rows in every epoch, by train.seed.")
    dataloader_num_workers: int = option(0, "Threads that prepare rows ahead of training; 0: none.", minimum=0)
    enable_dataset_cache: bool = option(
        False, "Keep every row in main memory once it is prepared; a stream keeps none."
    )

    # sft
    conversation_column_name: str = option("conversations", "Column with the messages of a row (sft).")
    system_prompt: str = option("", "Message put before every conversation or prompt; empty: none.")

    # dpo
    dpo_beta: float = option(
        0.1, "Inverse strength of the tie to the reference policy (Rafailov et al. 2023, eq. 7).", minimum=0
    )
    dpo_label_smoothing: float = option(
        0.0, "Fraction of pairs assumed to be labelled the wrong way round.", minimum=0, below=0.5
    )

    # grpo
    variant: str = option(
        "grpo",
        "grpo; gspo: one ratio per answer (Zheng et al. 2025); dapo: groups with equal rewards are generated again (Yu et al. 2025); "
        "rloo: the mean of the other answers as baseline (Ahmadian et al. 2024).",
        choices=VARIANTS,
    )
    prompt_column_name: str = option("", "Column with the prompt, as text or as messages (grpo, dpo).")
    response_column_name: str = option("", "Column with the right answer, for rewards.")
    reward_function: str | list[str] | dict[str, float] = option(["single_choice"], f"{_REWARDS}.")
    temperature: float = option(1.0, "Temperature of rollouts and of the log-probabilities in the loss.", minimum=0)
    epsilon_low: float = option(0.2, "The ratio is clipped below 1 - epsilon_low.", minimum=0)
    epsilon_high: float = option(0.2, "The ratio is clipped above 1 + epsilon_high.", minimum=0)
    lower_bound_ratio: float = option(
        3.0, "Dual clip: largest ratio of an answer with negative advantage; 0: none.", minimum=0
    )
    loss_type: str = option(
        "token-mean",
        "token-mean: mean over all tokens; seq-mean-token-mean: mean over answers of their token means; seq-mean-token-sum: mean over "
        "answers of their token sums.",
        choices=LOSS_TYPES,
    )
    unbiased_advantage: bool = option(
        False, "Do not divide advantages by the deviation of the group (Liu et al. 2025)."
    )
    kl_beta: float = option(0.0, "Weight of the KL divergence from the initial policy; 0: it is not kept.", minimum=0)
    mu_iterations: int = option(1, "Optimiser steps on one batch of answers.", minimum=1)
    max_resamples: int = option(
        4, "Times that groups with equal rewards are generated again (variant dapo).", minimum=0
    )
    overlong_reward: OverlongRewardConfig = option(OverlongRewardConfig(), "Penalty for long answers.")


@dataclass
class CkptConfig:
    """Checkpoints, exports and uploads."""

    enable_checkpoint: bool = option(
        True, "Write checkpoints from which `train.resume` continues. The final safetensors are written either way."
    )
    save_freq: int = option(20, "Steps between checkpoints.", minimum=1)
    save_freq_in_epoch: int = option(
        0, "Epochs between checkpoints, instead of save_freq; 0: save_freq counts.", minimum=0
    )
    max_keep: int = option(5, "Newest checkpoints to keep; the best by validation stays besides. -1: all.", minimum=-1)
    save_mode: str = option(
        "async", "async: written while training continues; sync: training waits.", choices=("async", "sync")
    )
    export_safetensors: bool = option(True, "Also export every checkpoint as safetensors; false: only the last one.")
    chunk_bytes: int = option(
        4 * GIB, "Most bytes of a safetensors file, unless one tensor alone has more.", minimum=1, maximum=2**50
    )
    merge_lora: bool = option(True, "Export adapters added to the weights; false: as an adapter folder of PEFT.")
    upload_hf: bool = option(False, "Upload the final safetensors to the hub; needs HF_TOKEN with write access.")
    hf_repo_name: str | None = option(None, "Repository on the hub: a name, or owner/name.")
    upload_s3: bool | str = option(
        False,
        "final (or true): upload the last checkpoint and the final safetensors to S3; all: every one.",
        choices=UPLOADS,
    )
    s3_bucket: str | None = option(None, "Bucket to upload to.")
    s3_prefix: str = option("outputs", "First part of the keys in the bucket.")

    def __post_init__(self) -> None:
        self.upload_s3 = "final" if self.upload_s3 is True else self.upload_s3


@dataclass
class TrainConfig:
    """The optimiser, precision and length of a run."""

    train_policy: TrainPolicyConfig = option(TrainPolicyConfig(), "Method and data.")
    ckpt: CkptConfig = option(CkptConfig(), "Checkpoints.")
    resume: bool | PathText = option(
        False,
        "true or auto: continue from the newest whole checkpoint below output_dir, if there is one; or a checkpoint or run folder.",
    )
    epoch: int = option(1, "Passes over the dataset.", minimum=1)
    max_num_steps: int | None = option(None, "Largest number of steps; null: as many as the epochs have.", minimum=1)
    train_batch_per_replica: int = option(
        8,
        "Rows of one optimiser step on all ranks of a replica; in GRPO its answers, prompts times n_generation.",
        minimum=1,
    )
    output_dir: PathText = option("./outputs", "Folder of the runs; each makes its own below it, named by timestamp.")
    timestamp: str = option("", "Name of the run's folder; empty: the present time as %Y%m%d%H%M%S.")
    seed: int | None = option(None, "Seed of everything random; null: 0.", minimum=0, maximum=2**63 - 1)

    optm_name: str = option("AdamW", "Optimiser.", choices=("AdamW", "Adam"))
    optm_lr: float = option(1e-6, "Learning rate after the warm-up.", minimum=0)
    optm_weight_decay: float = option(0.01, "Weight decay.", minimum=0)
    optm_betas: list[float] = option([0.9, 0.999], "Decay rates of the two moments.")
    epsilon: float = option(1e-6, "Epsilon of the optimiser.", minimum=0)
    optm_grad_norm_clip: float = option(1.0, "Largest norm of the gradient; 0: no limit.", minimum=0)
    optm_warmup_steps: int | float = option(
        20, "Steps over which the learning rate rises; a float up to 1.0 is a fraction of all steps.", minimum=0
    )
    optm_decay_type: str = option("none", "How the learning rate falls after the warm-up.", choices=DECAYS)
    optm_decay_ratio: float | None = option(
        None,
        "Fraction of all steps, the last ones, in which it falls; null: all after the warm-up.",
        minimum=0,
        maximum=1,
    )
    optm_min_lr_factor: float = option(0.0, "Smallest fraction of the learning rate.", minimum=0, maximum=1)

    param_dtype: str = option(
        "bfloat16", "Number format of forward and backward passes, and of the export.", choices=DTYPES
    )
    fsdp_offload: bool = option(False, "Keep shards, gradients and optimiser in main memory.")
    compile: bool = option(False, "Run the repeated blocks through torch.compile.")
    sequence_packing: bool = option(False, "Lay rows end to end instead of padding them; the loss stays the same.")


@dataclass
class ParallelismConfig:
    """How many GPUs share the trained model."""

    n_init_replicas: int = option(1, "Replicas, each with a batch of its own.", minimum=1)
    dp_shard_size: int = option(1, "Ranks that divide the weights (FSDP2); -1: the rest of the GPUs.", minimum=-1)
    dp_replicate_size: int = option(1, "Replicas of each of these, with a batch of their own (HSDP).", minimum=1)


@dataclass
class RolloutParallelismConfig(ParallelismConfig):
    """How many GPUs generate: n_init_replicas * tp_size."""

    n_init_replicas: int = option(1, "Engines.", minimum=1)
    tp_size: int = option(1, "GPUs that share the weights of one engine.", minimum=1)


@dataclass
class SamplingConfig:
    """How answers are drawn, besides `train.train_policy.temperature`."""

    temperature: float | None = option(
        None, "Must equal train.train_policy.temperature, which is the one that counts; null: that one.", minimum=0
    )


@dataclass
class RolloutConfig:
    """The engine that generates answers."""

    backend: str = option(
        "vllm",
        "vllm: its own process, or the trained model where vLLM is missing; torch: the trained model.",
        choices=BACKENDS,
    )
    parallelism: RolloutParallelismConfig = option(RolloutParallelismConfig(), "GPUs of the engine.")
    sampling_config: SamplingConfig = option(SamplingConfig(), "How tokens are drawn.")
    n_generation: int = option(16, "Answers to each prompt: a group.", minimum=1)
    batch_size: int = option(1, "Prompts whose answers are generated together.", minimum=1)
    max_response_length: int = option(2048, "Most tokens of an answer.", minimum=1)
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of a GPU's memory that the engine takes; null: 0.8, or on a GPU with the policy what that leaves.",
        minimum=0,
        maximum=1,
    )
    enable_chunked_prefill: bool = option(False, "Let the engine read long prompts in parts.")
    enforce_eager: bool | None = option(
        None, "Let the engine run without CUDA graphs; null: it captures them on a GPU, and has none on the CPU."
    )


@dataclass
class LoraConfig:
    """Adapters (Hu et al. 2021)."""

    r: int = option(8, "Rank of the update matrices.", minimum=1)
    lora_alpha: int = option(8, "Scale: the update is multiplied by lora_alpha / r.", minimum=1)
    lora_dropout: float = option(0.0, "Dropout in front of the update; only 0 for GRPO and DPO.", minimum=0, below=1)
    target_modules: list[str] | str | None = option(
        None, "Module name suffixes, or all-linear; null: all linear layers of the model."
    )

    def __post_init__(self) -> None:
        if self.target_modules == "all-linear":
            self.target_modules = None

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``rlinf.models.config.LoraConfig``."""
        return {
            "rank": self.r, "alpha": self.lora_alpha, "dropout": self.lora_dropout, "target_modules": self.target_modules
        }  # fmt: skip


@dataclass
class PolicyConfig:
    """The trained model."""

    model_name_or_path: PathText = option("", "Folder or hub id of a model that transformers can load.")
    model_max_length: int = option(4096, "Most tokens of a row, or of a prompt with its answer.", minimum=2)
    model_gradient_checkpointing: bool = option(
        True, "Recompute blocks in the backward pass: less memory, about a third more time."
    )
    device: str = option(
        "auto", "auto: a GPU if there is one; cpu: the ranks are processes on this machine.", choices=DEVICES
    )
    parallelism: ParallelismConfig = option(ParallelismConfig(), "GPUs of the trained model.")
    lora: LoraConfig | None = option(
        None, "Train adapters only; null: all weights. An empty section takes the defaults."
    )


@dataclass
class LoggingConfig:
    """Where metrics go besides `metrics.jsonl`, TensorBoard files and the console."""

    logger: list[str] = option(
        [], "wandb: also log to Weights & Biases, offline without WANDB_API_KEY; console, tensorboard: always on."
    )
    project_name: str = option("rlinf", "Project of Weights & Biases.")
    experiment_name: str | None = option(None, "Name of the run there, before its timestamp; null or None: output_dir.")
    log_interval: int = option(1, "Steps between lines on the console.", minimum=1)
    report_entropy: bool = option(
        False, "Log the mean entropy of the trained tokens; it takes two more arrays of the size of a chunk of logits."
    )

    def __post_init__(self) -> None:
        if self.experiment_name in ("None", ""):
            self.experiment_name = None


@dataclass
class ValidationConfig:
    """Validation during training."""

    enable: bool = option(False, "Validate.")
    val_before_train: bool = option(False, "Validate before the first step, too.")
    freq: int = option(20, "Steps between validations.", minimum=1)
    batch_size: int | None = option(None, "Rows that a rank evaluates together; null: as in training.", minimum=1)
    dataset: DatasetConfig = option(
        DatasetConfig(), "Rows to validate with; without a name, the first `test_size` rows of the training data."
    )
    max_response_length: int | None = option(
        None, "Most tokens of an answer; only null or rollout.max_response_length.", minimum=1
    )
    reward_function: str | list[str] | dict[str, float] | None = option(
        None, f"{_REWARDS}; null: in GRPO the rewards of training, in SFT none (the loss alone)."
    )


@dataclass
class SubProfilerConfig:
    """Steps that are recorded: the `active_steps` after `wait_steps` and `warmup_steps`."""

    active_steps: int = option(1, "Steps that are recorded.", minimum=1)
    warmup_steps: int = option(1, "Steps before them, after wait_steps.", minimum=0)
    wait_steps: int = option(1, "First steps of the run.", minimum=0)


@dataclass
class ProfilerConfig:
    """Recording the operations of a few steps, as `trainer.profile_steps` of `rlinf train` does."""

    enable_profiler: bool = option(False, "Write `profile/trace_rank<rank>.json.gz`, which the report links.")
    sub_profiler_config: SubProfilerConfig = option(SubProfilerConfig(), "Which steps.")

    @property
    def steps(self) -> list[int] | None:
        """The first and the last step that are recorded, numbered from 0; None: none."""
        which = self.sub_profiler_config
        first = which.wait_steps + which.warmup_steps
        return [first, first + which.active_steps - 1] if self.enable_profiler else None


@dataclass
class ClusterConfig:
    """The ranks of the trained model, and the rollout workers that generate for them."""

    start: str = option(
        "auto",
        "auto: the ranks are started here, or torchrun or srun has started them; ray: they are started here, and there are rollout workers. Ray "
        "places rollout workers in the cluster that the variable RAY_ADDRESS names, or in one that is started on this machine for the run.",
        choices=("auto", "ray"),
    )
    placement: str | None = option(
        None,
        "colocated: each rank generates its answers; disaggregated: rollout workers do (grpo), in processes and on GPUs of their own; null: split where "
        "mode=disaggregated, rollout.backend=vllm and the ranks have GPUs, or another key asks for rollout workers.",
        choices=("colocated", "disaggregated"),
    )
    num_rollout_workers: int | None = option(
        None,
        "RolloutWorkers, a multiple or a divisor of the ranks; null: rollout.parallelism.n_init_replicas.",
        minimum=1,
    )
    max_restarts: int = option(
        20,
        "RolloutWorkers of each rank that may be replaced (killed, machine lost, deadline missed) before the run ends.",
        minimum=0,
    )
    num_threads: int | None = option(
        None, "CPU threads per rank; null: OMP_NUM_THREADS, or all cores divided by the ranks of a machine.", minimum=1
    )
    deadlines: DeadlinesConfig = option(DeadlinesConfig(), "Deadlines of what several ranks do together.")


@dataclass
class RecipeConfig:
    """A recipe: what a model learns, from which data, and where."""

    train: TrainConfig = option(TrainConfig(), "Training.")
    policy: PolicyConfig = option(PolicyConfig(), "The trained model.")
    rollout: RolloutConfig = option(RolloutConfig(), "Generation of answers (grpo).")
    validation: ValidationConfig = option(ValidationConfig(), "Validation.")
    logging: LoggingConfig = option(LoggingConfig(), "Where metrics go.")
    profiler: ProfilerConfig = option(ProfilerConfig(), "Recording of steps.")
    cluster: ClusterConfig = option(ClusterConfig(), "RolloutWorkers, threads and deadlines of the ranks.")
    custom: dict[str, Any] = option({}, "Keys of your own, for your dataset script.")
    mode: str = option(
        "disaggregated",
        "disaggregated: vLLM engines have GPUs of their own; colocated: they share the policy's.",
        choices=MODES,
    )
