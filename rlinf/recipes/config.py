"""Configuration of a recipe: sections and keys of its TOML or YAML file (read and checked by ``rlinf.recipes.load``)."""

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

_REWARDS = "Reward name, list of names, or map of name to weight"


@dataclass
class DatasetConfig:
    """Source of the rows; a dataset script may read them elsewhere."""

    name: PathText = option("", "Hub name, folder, or jsonl, json, parquet or csv file.")
    subset: str = option("", "Subset (configuration) on the hub.")
    revision: str = option("", "Branch, tag or commit on the hub.")
    split: str | list[str] = option("train", "Split, or list of splits to concatenate.")
    test_size: int | float | None = option(
        None, "Validation rows: count, or fraction below 1.0; null: 10 %.", minimum=0
    )
    streaming: bool = option(False, "Read rows during training; needs train.max_num_steps.")
    skip_bad_rows: bool = option(False, "Skip and count unusable rows instead of raising an error.")


@dataclass
class OverlongRewardConfig:
    """Penalty for completions near the length limit."""

    enable_overlong_penalty: bool = option(False, "Subtract the penalty from the reward.")
    buffer_length: int | None = option(
        None, "Tokens over which the penalty rises; null: a quarter of the limit.", minimum=1
    )
    penalty_factor: float = option(1.0, "Penalty at the limit.", minimum=0)


@dataclass
class TrainPolicyConfig:
    """Training method, its data and its loss."""

    type: str = option(
        "sft",
        "Method; missing: grpo with a key such as temperature, else sft.",
        choices=TYPES,
    )
    dataset: DatasetConfig = option(DatasetConfig(), "Training data.")
    mini_batch: int = option(2, "Rows of one forward-backward pass per rank.", minimum=1)
    dataloader_shuffle: bool = option(True, "Shuffle the rows in every epoch, by train.seed.")
    dataloader_num_workers: int = option(0, "Threads that prepare batches in advance.", minimum=0)
    enable_dataset_cache: bool = option(False, "Cache prepared rows in main memory (not while streaming).")

    # sft
    conversation_column_name: str = option("conversations", "Column of the messages (sft).")
    system_prompt: str = option("", "System message of every conversation or prompt.")

    # dpo
    dpo_beta: float = option(0.1, "DPO beta (Rafailov et al. 2023, eq. 7).", minimum=0)
    dpo_label_smoothing: float = option(0.0, "Assumed fraction of swapped labels.", minimum=0, below=0.5)

    # grpo
    variant: str = option(
        "grpo",
        "gspo: sequence ratio; dapo: resample equal rewards; rloo: leave-one-out baseline.",
        choices=VARIANTS,
    )
    prompt_column_name: str = option("", "Column of the prompt: text or messages (grpo, dpo).")
    response_column_name: str = option("", "Column of the reference answer, for rewards.")
    reward_function: str | list[str] | dict[str, float] = option(["single_choice"], f"{_REWARDS}.")
    temperature: float = option(1.0, "Temperature of rollouts and of the loss.", minimum=0)
    epsilon_low: float = option(0.2, "The ratio is clipped below 1 - epsilon_low.", minimum=0)
    epsilon_high: float = option(0.2, "The ratio is clipped above 1 + epsilon_high.", minimum=0)
    lower_bound_ratio: float = option(3.0, "Dual clip for negative advantages; 0: disabled.", minimum=0)
    loss_type: str = option("token-mean", "Reduction of the loss over tokens and completions.", choices=LOSS_TYPES)
    unbiased_advantage: bool = option(False, "Do not divide advantages by the group's std (Liu et al. 2025).")
    kl_beta: float = option(0.0, "Weight of the KL from the initial policy; 0: no reference model.", minimum=0)
    mu_iterations: int = option(1, "Optimiser steps per batch of completions.", minimum=1)
    max_resamples: int = option(4, "Maximum resamples of groups with equal rewards (dapo).", minimum=0)
    overlong_reward: OverlongRewardConfig = option(OverlongRewardConfig(), "Penalty for long completions.")


@dataclass
class CkptConfig:
    """Checkpoints, exports and uploads."""

    enable_checkpoint: bool = option(True, "Write checkpoints, from which train.resume continues.")
    save_freq: int = option(20, "Steps between checkpoints.", minimum=1)
    save_freq_in_epoch: int = option(0, "Epochs between checkpoints; 0: use save_freq.", minimum=0)
    max_keep: int = option(5, "Newest checkpoints to keep, in addition to the best; -1: all.", minimum=-1)
    save_mode: str = option("async", "async: write while training; sync: training waits.", choices=("async", "sync"))
    export_safetensors: bool = option(True, "Export every checkpoint as safetensors, not only the last.")
    chunk_bytes: int = option(4 * GIB, "Maximum size of a safetensors file.", minimum=1, maximum=2**50)
    merge_lora: bool = option(True, "Export adapters merged; false: as a PEFT adapter folder.")
    upload_hf: bool = option(False, "Upload the final safetensors to the hub; needs HF_TOKEN.")
    hf_repo_name: str | None = option(None, "Repository on the hub: name or owner/name.")
    upload_s3: bool | str = option(False, "Upload to S3: final (or true), or all checkpoints.", choices=UPLOADS)
    s3_bucket: str | None = option(None, "S3 bucket.")
    s3_prefix: str = option("outputs", "Key prefix in the bucket.")

    def __post_init__(self) -> None:
        self.upload_s3 = "final" if self.upload_s3 is True else self.upload_s3


@dataclass
class TrainConfig:
    """Optimiser, precision and length of a run."""

    train_policy: TrainPolicyConfig = option(TrainPolicyConfig(), "Method and data.")
    ckpt: CkptConfig = option(CkptConfig(), "Checkpoints.")
    resume: bool | PathText = option(False, "true or auto: newest checkpoint below output_dir; or its folder.")
    epoch: int = option(1, "Passes over the dataset.", minimum=1)
    max_num_steps: int | None = option(None, "Maximum number of steps.", minimum=1)
    train_batch_per_replica: int = option(8, "Rows per step and replica; in GRPO, completions.", minimum=1)
    output_dir: PathText = option("./outputs", "Parent folder of the runs.")
    timestamp: str = option("", "Name of the run's folder; empty: the current time.")
    seed: int | None = option(None, "Random seed; null: 0.", minimum=0, maximum=2**63 - 1)

    optm_name: str = option("AdamW", "Optimiser.", choices=("AdamW", "Adam"))
    optm_lr: float = option(1e-6, "Learning rate after the warmup.", minimum=0)
    optm_weight_decay: float = option(0.01, "Weight decay.", minimum=0)
    optm_betas: list[float] = option([0.9, 0.999], "Adam betas.")
    epsilon: float = option(1e-6, "Adam epsilon.", minimum=0)
    optm_grad_norm_clip: float = option(1.0, "Maximum gradient norm; 0: no clipping.", minimum=0)
    optm_warmup_steps: int | float = option(20, "Warmup steps, or as a float up to 1.0 their fraction.", minimum=0)
    optm_decay_type: str = option("none", "Learning-rate decay.", choices=DECAYS)
    optm_decay_ratio: float | None = option(
        None, "Fraction of steps with decay; null: all after warmup.", minimum=0, maximum=1
    )
    optm_min_lr_factor: float = option(0.0, "Final learning rate as a fraction of optm_lr.", minimum=0, maximum=1)

    param_dtype: str = option("bfloat16", "Dtype of forward and backward passes and of the export.", choices=DTYPES)
    fsdp_offload: bool = option(False, "Offload shards, gradients and optimiser to main memory.")
    compile: bool = option(False, "Compile the repeated layers with torch.compile.")
    sequence_packing: bool = option(False, "Concatenate rows instead of padding; the loss is unchanged.")


@dataclass
class ParallelismConfig:
    """GPUs of the trained model."""

    n_init_replicas: int = option(1, "Data-parallel replicas.", minimum=1)
    dp_shard_size: int = option(1, "Ranks that shard the weights (FSDP2); -1: all remaining GPUs.", minimum=-1)
    dp_replicate_size: int = option(1, "Replicas of each shard group (HSDP).", minimum=1)


@dataclass
class RolloutParallelismConfig(ParallelismConfig):
    """GPUs that generate: n_init_replicas * tp_size."""

    n_init_replicas: int = option(1, "Number of engines.", minimum=1)
    tp_size: int = option(1, "Tensor-parallel GPUs per engine.", minimum=1)


@dataclass
class SamplingConfig:
    """Sampling of completions, in addition to `train.train_policy.temperature`."""

    temperature: float | None = option(None, "null or train.train_policy.temperature.", minimum=0)


@dataclass
class RolloutConfig:
    """Engine that generates completions."""

    backend: str = option("vllm", "vllm, with torch where vLLM is missing; or torch.", choices=BACKENDS)
    parallelism: RolloutParallelismConfig = option(RolloutParallelismConfig(), "GPUs of the engine.")
    sampling_config: SamplingConfig = option(SamplingConfig(), "Sampling of tokens.")
    n_generation: int = option(16, "Completions per prompt (group size).", minimum=1)
    batch_size: int = option(1, "Prompts per generation call.", minimum=1)
    max_response_length: int = option(2048, "Maximum tokens of a completion.", minimum=1)
    gpu_memory_utilization: float | None = option(
        None, "Fraction of GPU memory; null: automatic.", minimum=0, maximum=1
    )
    enable_chunked_prefill: bool = option(False, "Prefill long prompts in chunks.")
    enforce_eager: bool | None = option(None, "Disable CUDA graphs; null: only on the CPU.")


@dataclass
class LoraConfig:
    """Adapters (Hu et al. 2021)."""

    r: int = option(8, "Rank of the update matrices.", minimum=1)
    lora_alpha: int = option(8, "The update is multiplied by lora_alpha / r.", minimum=1)
    lora_dropout: float = option(0.0, "Dropout before the update; 0 for GRPO and DPO.", minimum=0, below=1)
    target_modules: list[str] | str | None = option(None, "Module name suffixes; null, all-linear: all linear layers.")

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

    model_name_or_path: PathText = option("", "Folder or hub id of a transformers model.")
    model_max_length: int = option(4096, "Maximum tokens of a row, or of prompt plus completion.", minimum=2)
    model_gradient_checkpointing: bool = option(True, "Recompute layers in the backward pass to save memory.")
    device: str = option("auto", "auto: GPU if available; cpu: ranks as local processes.", choices=DEVICES)
    parallelism: ParallelismConfig = option(ParallelismConfig(), "GPUs of the trained model.")
    lora: LoraConfig | None = option(None, "Train adapters only; null: all weights.")


@dataclass
class LoggingConfig:
    """Metric loggers, in addition to `metrics.jsonl`, TensorBoard files and the console."""

    logger: list[str] = option([], "Loggers; only wandb is optional (offline without WANDB_API_KEY).")
    project_name: str = option("rlinf", "Weights & Biases project.")
    experiment_name: str | None = option(None, "Prefix of the Weights & Biases run name; null: output_dir.")
    log_interval: int = option(1, "Steps between console lines.", minimum=1)
    report_entropy: bool = option(False, "Log the mean token entropy; takes memory for two logit chunks.")

    def __post_init__(self) -> None:
        if self.experiment_name in ("None", ""):
            self.experiment_name = None


@dataclass
class ValidationConfig:
    """Validation during training."""

    enable: bool = option(False, "Validate during training.")
    val_before_train: bool = option(False, "Validate before the first step, too.")
    freq: int = option(20, "Steps between validations.", minimum=1)
    batch_size: int | None = option(None, "Rows per rank and forward pass; null: as in training.", minimum=1)
    dataset: DatasetConfig = option(DatasetConfig(), "Validation data; without a name, split off by test_size.")
    max_response_length: int | None = option(None, "null or rollout.max_response_length.", minimum=1)
    reward_function: str | list[str] | dict[str, float] | None = option(None, f"{_REWARDS}; null: that of GRPO.")


@dataclass
class SubProfilerConfig:
    """Recorded steps: the `active_steps` after `wait_steps` and `warmup_steps`."""

    active_steps: int = option(1, "Recorded steps.", minimum=1)
    warmup_steps: int = option(1, "Steps between wait_steps and the recording.", minimum=0)
    wait_steps: int = option(1, "Steps before the warmup.", minimum=0)


@dataclass
class ProfilerConfig:
    """Profiling of a few steps, as with `trainer.profile_steps` of `rlinf train`."""

    enable_profiler: bool = option(False, "Write profile/trace_rank<rank>.json.gz.")
    sub_profiler_config: SubProfilerConfig = option(SubProfilerConfig(), "Recorded steps.")

    @property
    def steps(self) -> list[int] | None:
        """First and last recorded step, numbered from 0; None: none."""
        window = self.sub_profiler_config
        first = window.wait_steps + window.warmup_steps
        return [first, first + window.active_steps - 1] if self.enable_profiler else None


@dataclass
class ClusterConfig:
    """Ranks of the trained model, and rollout workers that generate for them."""

    start: str = option(
        "auto",
        "auto: local, torchrun or srun; ray: rollout workers in Ray.",
        choices=("auto", "ray"),
    )
    placement: str | None = option(
        None,
        "colocated: ranks generate; disaggregated: rollout workers (grpo); null: by mode.",
        choices=("colocated", "disaggregated"),
    )
    num_rollout_workers: int | None = option(None, "Rollout workers; null: number of engines.", minimum=1)
    max_restarts: int = option(20, "Rollout workers per rank that may be replaced.", minimum=0)
    num_threads: int | None = option(None, "CPU threads per rank; null: OMP_NUM_THREADS, or cores / ranks.", minimum=1)
    deadlines: DeadlinesConfig = option(DeadlinesConfig(), "Deadlines of collective operations.")


@dataclass
class RecipeConfig:
    """Complete configuration of a recipe."""

    train: TrainConfig = option(TrainConfig(), "Training.")
    policy: PolicyConfig = option(PolicyConfig(), "The trained model.")
    rollout: RolloutConfig = option(RolloutConfig(), "Generation of completions (grpo).")
    validation: ValidationConfig = option(ValidationConfig(), "Validation.")
    logging: LoggingConfig = option(LoggingConfig(), "Logging.")
    profiler: ProfilerConfig = option(ProfilerConfig(), "Profiling.")
    cluster: ClusterConfig = option(ClusterConfig(), "Rollout workers, threads and deadlines.")
    custom: dict[str, Any] = option({}, "Free keys for your dataset script.")
    mode: str = option(
        "disaggregated", "disaggregated: separate GPUs for the engines; colocated: the policy's.", choices=MODES
    )
