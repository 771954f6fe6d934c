"""Configuration dataclasses for a recipe's TOML or YAML file, which ``rlinf.recipes.load`` reads and checks."""

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

_REWARDS = "Reward name, list of names, or map from names to weights"


@dataclass
class DatasetConfig:
    """Where to read rows from; a dataset script may ignore it and read them elsewhere."""

    name: PathText = option("", "Dataset on the hub, folder, or jsonl, json, parquet or csv file.")
    subset: str = option("", "Subset (configuration) of the hub dataset.")
    revision: str = option("", "Branch, tag or commit of the hub dataset.")
    split: str | list[str] = option("train", "Split, or list of splits to concatenate.")
    test_size: int | float | None = option(
        None, "Validation rows to split off: a count, or a fraction below 1.0; null: 10 %.", minimum=0
    )
    streaming: bool = option(False, "Stream the dataset during training; needs train.max_num_steps.")
    skip_bad_rows: bool = option(False, "Skip and count unusable rows instead of raising an error.")


@dataclass
class OverlongRewardConfig:
    """Penalty for completions near the length limit."""

    enable_overlong_penalty: bool = option(False, "Subtract the overlong penalty from the reward.")
    buffer_length: int | None = option(
        None, "Tokens before the limit over which the penalty rises; null: a quarter of the limit.", minimum=1
    )
    penalty_factor: float = option(1.0, "Penalty at the limit.", minimum=0)


@dataclass
class TrainPolicyConfig:
    """Training method, with its data and loss."""

    type: str = option(
        "sft",
        "Training method; if missing, grpo if a GRPO key such as temperature is set, otherwise sft.",
        choices=TYPES,
    )
    dataset: DatasetConfig = option(DatasetConfig(), "Training data.")
    mini_batch: int | None = option(None, "Rows per pass on a rank; null: 2, or as the GPU's memory allows.", minimum=1)
    dataloader_shuffle: bool = option(True, "Shuffle the rows in every epoch, seeded by train.seed.")
    dataloader_num_workers: int = option(0, "Threads that prepare batches in advance.", minimum=0)
    enable_dataset_cache: bool = option(False, "Cache tokenized rows in main memory (ignored for streams).")

    # sft
    conversation_column_name: str = option("conversations", "Column with the messages (sft).")
    system_prompt: str = option("", "System message added to every conversation or prompt.")

    # dpo
    dpo_beta: float = option(0.1, "Beta in the DPO loss (Rafailov et al. 2023, eq. 7).", minimum=0)
    dpo_label_smoothing: float = option(0.0, "Assumed fraction of pairs with swapped labels.", minimum=0, below=0.5)

    # grpo
    variant: str = option(
        "grpo",
        "GRPO variant. gspo: sequence-level ratio; dapo: resample groups with equal rewards; rloo: leave-one-out baseline.",
        choices=VARIANTS,
    )
    prompt_column_name: str = option("", "Column with the prompt, as text or messages (grpo, dpo).")
    response_column_name: str = option("", "Column with the reference answer used by rewards.")
    reward_function: str | list[str] | dict[str, float] = option(["single_choice"], f"{_REWARDS}.")
    temperature: float = option(1.0, "Temperature for rollouts and the loss.", minimum=0)
    epsilon_low: float = option(0.2, "Clip the importance ratio below 1 - epsilon_low.", minimum=0)
    epsilon_high: float = option(0.2, "Clip the importance ratio above 1 + epsilon_high.", minimum=0)
    lower_bound_ratio: float = option(3.0, "Dual-clip bound for negative advantages; 0: disabled.", minimum=0)
    loss_type: str = option("token-mean", "How the loss is averaged over tokens and completions.", choices=LOSS_TYPES)
    unbiased_advantage: bool = option(False, "Skip the division of advantages by the group's std (Liu et al. 2025).")
    kl_beta: float = option(0.0, "Weight of the KL penalty to the initial policy; 0: no reference model.", minimum=0)
    mu_iterations: int = option(1, "Number of optimiser steps per batch of completions.", minimum=1)
    max_resamples: int = option(4, "Maximum number of times a group with equal rewards is resampled (dapo).", minimum=0)
    overlong_reward: OverlongRewardConfig = option(OverlongRewardConfig(), "Penalty for overlong completions.")


@dataclass
class CkptConfig:
    """Checkpoints, exports and uploads."""

    enable_checkpoint: bool = option(True, "Save checkpoints, which train.resume needs.")
    save_freq: int = option(20, "Steps between checkpoints.", minimum=1)
    save_freq_in_epoch: int = option(0, "Epochs between checkpoints; 0: use save_freq.", minimum=0)
    max_keep: int = option(5, "Number of newest checkpoints to keep, in addition to the best; -1: all.", minimum=-1)
    save_mode: str = option("async", "async: save in the background; sync: pause training.", choices=("async", "sync"))
    export_safetensors: bool = option(True, "Export every checkpoint as safetensors instead of only the last one.")
    chunk_bytes: int = option(4 * GIB, "Maximum size of a safetensors file.", minimum=1, maximum=2**50)
    merge_lora: bool = option(True, "Merge adapters into the exported weights; false: export a PEFT adapter folder.")
    upload_hf: bool = option(False, "Upload the final safetensors export to the hub; needs HF_TOKEN.")
    hf_repo_name: str | None = option(None, "Repository on the hub: name or owner/name.")
    upload_s3: bool | str = option(False, "Upload to S3: final (or true) or all checkpoints.", choices=UPLOADS)
    s3_bucket: str | None = option(None, "S3 bucket for uploads.")
    s3_prefix: str = option("outputs", "Prefix for object keys in the S3 bucket.")

    def __post_init__(self) -> None:
        self.upload_s3 = "final" if self.upload_s3 is True else self.upload_s3


@dataclass
class TrainConfig:
    """Training settings: optimiser, precision and run length."""

    train_policy: TrainPolicyConfig = option(TrainPolicyConfig(), "Method and data.")
    ckpt: CkptConfig = option(CkptConfig(), "Checkpoints.")
    resume: bool | PathText = option(False, "true or auto: newest checkpoint in output_dir; or a checkpoint folder.")
    epoch: int = option(1, "Number of passes over the dataset.", minimum=1)
    max_num_steps: int | None = option(None, "Maximum number of steps.", minimum=1)
    train_batch_per_replica: int = option(8, "Rows (in GRPO, completions) per step and replica.", minimum=1)
    output_dir: PathText = option("./outputs", "Parent folder for runs.")
    timestamp: str = option("", "Name of the run folder; empty: the current time.")
    seed: int | None = option(None, "Random seed; null: 0.", minimum=0, maximum=2**63 - 1)

    optm_name: str = option("AdamW", "Optimiser.", choices=("AdamW", "Adam"))
    optm_lr: float = option(1e-6, "Learning rate after the warmup.", minimum=0)
    optm_weight_decay: float = option(0.01, "Weight decay.", minimum=0)
    optm_betas: list[float] = option([0.9, 0.999], "Adam betas.")
    epsilon: float = option(1e-6, "Adam epsilon.", minimum=0)
    optm_grad_norm_clip: float = option(1.0, "Maximum gradient norm; 0: no clipping.", minimum=0)
    optm_warmup_steps: int | float = option(20, "Warmup steps: a count, or a float up to 1.0 as a fraction.", minimum=0)
    optm_decay_type: str = option("none", "Shape of the learning-rate decay.", choices=DECAYS)
    optm_decay_ratio: float | None = option(
        None, "Fraction of steps with learning-rate decay; null: all steps after the warmup.", minimum=0, maximum=1
    )
    optm_min_lr_factor: float = option(0.0, "Final learning rate as a fraction of optm_lr.", minimum=0, maximum=1)

    param_dtype: str = option("bfloat16", "Dtype of forward and backward passes and exports.", choices=DTYPES)
    fsdp_offload: bool = option(False, "Offload sharded weights, gradients and optimiser states to main memory.")
    compile: bool = option(False, "Compile the model's repeated layers with torch.compile.")
    sequence_packing: bool = option(False, "Concatenate rows instead of padding them; the loss does not change.")


@dataclass
class ParallelismConfig:
    """GPUs used by the trained model."""

    n_init_replicas: int = option(1, "Number of data-parallel replicas.", minimum=1)
    dp_shard_size: int = option(1, "Ranks to shard the weights over (FSDP2); -1: all remaining GPUs.", minimum=-1)
    dp_replicate_size: int = option(1, "Number of replicas of each shard group (HSDP).", minimum=1)

    @property
    def replicas(self) -> int:
        """Number of copies of the model."""
        return self.n_init_replicas * self.dp_replicate_size


@dataclass
class RolloutParallelismConfig(ParallelismConfig):
    """GPUs used for generation: n_init_replicas * tp_size."""

    n_init_replicas: int = option(1, "Number of engines.", minimum=1)
    tp_size: int = option(1, "Number of tensor-parallel GPUs per engine.", minimum=1)


@dataclass
class SamplingConfig:
    """Sampling settings for completions, in addition to `train.train_policy.temperature`."""

    temperature: float | None = option(None, "Must be null or equal to train.train_policy.temperature.", minimum=0)


@dataclass
class RolloutConfig:
    """Settings for generating completions."""

    backend: str = option("vllm", "vllm, falling back to torch where vLLM is missing; or torch.", choices=BACKENDS)
    parallelism: RolloutParallelismConfig = option(RolloutParallelismConfig(), "GPUs used by the engines.")
    sampling_config: SamplingConfig = option(SamplingConfig(), "Token sampling settings.")
    n_generation: int = option(16, "Number of completions per prompt (the group size).", minimum=1)
    batch_size: int = option(1, "Prompts per generation call.", minimum=1)
    max_response_length: int = option(2048, "Maximum number of tokens per completion.", minimum=1)
    gpu_memory_utilization: float | None = option(
        None, "Fraction of GPU memory reserved for the engine; null: automatic.", minimum=0, maximum=1
    )
    enable_chunked_prefill: bool = option(False, "Prefill long prompts in chunks.")
    enforce_eager: bool | None = option(None, "Disable CUDA graphs; null: disable them only on CPUs.")


@dataclass
class LoraConfig:
    """LoRA adapters (Hu et al. 2021)."""

    r: int = option(8, "Rank of the adapter matrices.", minimum=1)
    lora_alpha: int = option(8, "Scale the adapter's output by lora_alpha / r.", minimum=1)
    lora_dropout: float = option(0.0, "Dropout on the adapter's input; must be 0 for GRPO and DPO.", minimum=0, below=1)
    target_modules: list[str] | str | None = option(None, "Module name suffixes; null, all-linear: all linear layers.")

    def __post_init__(self) -> None:
        if self.target_modules == "all-linear":
            self.target_modules = None

    def settings(self) -> dict[str, Any]:
        """Return the settings as fields of ``rlinf.models.config.LoraConfig``."""
        return {
            "rank": self.r, "alpha": self.lora_alpha, "dropout": self.lora_dropout, "target_modules": self.target_modules
        }  # fmt: skip


@dataclass
class PolicyConfig:
    """The trained model."""

    model_name_or_path: PathText = option("", "Folder or hub id of a transformers model.")
    model_max_length: int = option(4096, "Maximum tokens per row, or per prompt plus completion.", minimum=2)
    model_gradient_checkpointing: bool | str = option(
        "auto", "Recompute activations in updates; auto: of as many layers as necessary.", choices=("auto", True, False)
    )
    device: str = option("auto", "auto: GPUs if available; cpu: run ranks as local processes.", choices=DEVICES)
    parallelism: ParallelismConfig = option(ParallelismConfig(), "GPUs used by the trained model.")
    lora: LoraConfig | None = option(None, "Train only LoRA adapters; null: train all weights.")


@dataclass
class LoggingConfig:
    """Metric loggers, in addition to `metrics.jsonl`, TensorBoard files and the console."""

    logger: list[str] = option([], "Additional loggers: wandb, which logs offline without WANDB_API_KEY.")
    project_name: str = option("rlinf", "Weights & Biases project name.")
    experiment_name: str | None = option(None, "Prefix for the Weights & Biases run name; null: output_dir.")
    log_interval: int = option(1, "Steps between console lines.", minimum=1)
    report_entropy: bool = option(False, "Log the mean token entropy; needs memory for two logit chunks.")

    def __post_init__(self) -> None:
        if self.experiment_name in ("None", ""):
            self.experiment_name = None


@dataclass
class ValidationConfig:
    """Settings for validation during training."""

    enable: bool = option(False, "Validate during training.")
    val_before_train: bool = option(False, "Also validate before the first step.")
    freq: int = option(20, "Steps between validations.", minimum=1)
    batch_size: int | None = option(None, "Rows per forward pass on each rank; null: same as in training.", minimum=1)
    dataset: DatasetConfig = option(DatasetConfig(), "Validation data; without a name, split off the training data.")
    max_response_length: int | None = option(None, "Must be null or equal to rollout.max_response_length.", minimum=1)
    reward_function: str | list[str] | dict[str, float] | None = option(None, f"{_REWARDS}; null: as in GRPO.")


@dataclass
class SubProfilerConfig:
    """Which steps to record: `active_steps` steps, after `wait_steps` and `warmup_steps`."""

    active_steps: int = option(1, "Number of steps to record.", minimum=1)
    warmup_steps: int = option(1, "Profiler warmup steps after wait_steps, before recording.", minimum=0)
    wait_steps: int = option(1, "Number of steps to skip before the profiler warmup.", minimum=0)


@dataclass
class ProfilerConfig:
    """Profile a few steps, as `trainer.profile_steps` does in `rlinf train`."""

    enable_profiler: bool = option(False, "Write profile/trace_rank<rank>.json.gz.")
    sub_profiler_config: SubProfilerConfig = option(SubProfilerConfig(), "Which steps to record.")

    @property
    def steps(self) -> list[int] | None:
        """First and last recorded step, counted from 0; None if the profiler is disabled."""
        window = self.sub_profiler_config
        first = window.wait_steps + window.warmup_steps
        return [first, first + window.active_steps - 1] if self.enable_profiler else None


NO_ROLLOUT_WORKERS = "cluster.start=auto cluster.placement=null cluster.num_rollout_workers=null"
"""Overrides that request no rollout workers."""


@dataclass
class ClusterConfig:
    """Rollout workers, threads and deadlines."""

    start: str = option(
        "auto",
        "auto: start locally, or use the ranks of torchrun or srun; ray: run rollout workers in Ray.",
        choices=("auto", "ray"),
    )
    placement: str | None = option(
        None,
        "colocated: the ranks generate; disaggregated: rollout workers generate (grpo); null: follow mode.",
        choices=("colocated", "disaggregated"),
    )
    num_rollout_workers: int | None = option(None, "Number of rollout workers; null: one per engine.", minimum=1)
    max_restarts: int = option(20, "Maximum number of replaced rollout workers per rank.", minimum=0)
    num_threads: int | None = option(None, "CPU threads per rank; null: OMP_NUM_THREADS, or cores / ranks.", minimum=1)
    deadlines: DeadlinesConfig = option(DeadlinesConfig(), "Deadlines for collective operations.")

    @property
    def workers_override(self) -> str | None:
        """An override that requests rollout workers, with or without GPUs; None without any."""
        settings = {"placement": "disaggregated", "start": "ray", "num_rollout_workers": self.num_rollout_workers or 0}
        return next((f"cluster.{key}={value}" for key, value in settings.items() if getattr(self, key) == value), None)


@dataclass
class RecipeConfig:
    """A recipe's complete configuration."""

    train: TrainConfig = option(TrainConfig(), "Training.")
    policy: PolicyConfig = option(PolicyConfig(), "The trained model.")
    rollout: RolloutConfig = option(RolloutConfig(), "Generation of completions (grpo).")
    validation: ValidationConfig = option(ValidationConfig(), "Validation.")
    logging: LoggingConfig = option(LoggingConfig(), "Logging.")
    profiler: ProfilerConfig = option(ProfilerConfig(), "Profiling.")
    cluster: ClusterConfig = option(ClusterConfig(), "Rollout workers, threads and deadlines.")
    custom: dict[str, Any] = option({}, "Arbitrary keys for your dataset script.")
    mode: str = option(
        "disaggregated", "disaggregated: separate GPUs for the engines; colocated: the policy's.", choices=MODES
    )

    @property
    def is_grpo(self) -> bool:
        """Whether the model learns from its own completions."""
        return self.train.train_policy.type == "grpo"

    @property
    def group_size(self) -> int:
        """Number of completions per prompt in GRPO; otherwise 1."""
        return self.rollout.n_generation if self.is_grpo else 1

    @property
    def batch_size(self) -> int:
        """Number of rows (in GRPO, completions) per step across all replicas."""
        return self.train.train_batch_per_replica * self.policy.parallelism.replicas
