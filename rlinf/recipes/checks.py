"""Check a recipe for conflicting and unsupported keys before loading the data and the model."""

import re

from rlinf.errors import ConfigError
from rlinf.options import override_text
from rlinf.recipes.config import LOGGERS, RecipeConfig
from rlinf.tracking.tracker import check_wandb

_FSDP = "training shards weights by FSDP only; raise policy.parallelism.dp_shard_size instead"
_TENSOR = "engines shard weights by tensor parallelism only; raise rollout.parallelism.tp_size instead"
_GREEDY = "validation generates one completion per prompt, greedily"
_ADAPTERS = "LoRA trains only the adapters, which start without an effect and are scaled by lora_alpha / r"
NOT_DONE: dict[str, tuple[tuple, str]] = {
    "train.fp8.enable_fp8": ((False,), "training in 8 bits is not available"),
    "train.async_tp_enabled": ((False,), "tensor parallelism is not supported"),
    "train.train_policy.use_remote_reward": ((False,), "rewards are functions called in the training process"),
    "train.train_policy.positive_nll_coef": ((None,), "the loss has no negative log-likelihood term"),
    "train.train_policy.unbiased_loss_max_tokens": ((None,), "each completion's loss is normalised by its own length"),
    "train.train_policy.aipo_rho": ((None,), "completions are always generated with the current weights"),
    "train.fsdp_reduce_dtype": (("float32",), "gradients are summed in float32"),
    "policy.parallelism.tp_size": ((1,), _FSDP),
    "policy.parallelism.cp_size": ((1,), _FSDP),
    "policy.parallelism.ep_size": ((1,), _FSDP),
    "policy.parallelism.pp_size": ((1,), _FSDP),
    "policy.model_revision": ((None, ""), "only the latest revision is loaded; to use an older one, download it and set its folder"),
    "policy.enable_liger_kernel": ((False,), "Liger kernels are not used"),
    "policy.trainable_map": ((None,), "training updates either all weights or only adapters (policy.lora)"),
    "policy.lora.use_rslora": ((False,), _ADAPTERS),
    "policy.lora.modules_to_save": ((None,), _ADAPTERS),
    "policy.lora.init_lora_weights": ((True,), _ADAPTERS),
    "rollout.parallelism.cp_size": ((1,), _TENSOR),
    "rollout.parallelism.ep_size": ((1,), _TENSOR),
    "rollout.parallelism.pp_size": ((1,), _TENSOR),
    "rollout.parallelism.dp_shard_size": ((1, -1), _TENSOR),
    "rollout.parallelism.dp_replicate_size": ((1,), "the number of engines is rollout.parallelism.n_init_replicas"),
    "rollout.backend": (("vllm", "torch"), "this engine is not available"),
    "rollout.mode": (("sync",), "training waits for its completions"),
    "rollout.quantization": (("none", "mxfp4"), "rollouts use the trained weights"),
    "validation.temperature": ((0.0,), _GREEDY),
    "validation.repetition_penalty": ((1.0,), _GREEDY),
    "validation.n_generation": ((1,), _GREEDY),
    "profiler.enable_nsys": ((False,), "this profiler is not available"),
}  # fmt: skip
"""Accepted keys with their supported values, and the reason why all remaining values are rejected."""

_SAMPLED = "completions are sampled from the full distribution, because the loss is computed on it"
_GREEDY = "validation decodes greedily"
_ON_POLICY = "every batch is generated with the current weights"

WITHOUT_EFFECT: dict[str, tuple[tuple, str]] = {
    "policy.parallelism.cp_rotate_method": ((), "context parallelism is not supported"),
    "policy.parallelism.pp_dynamic_shape": ((False,), "pipeline parallelism is not supported"),
    "policy.parallelism.pp_micro_batch_size": ((1,), "pipeline parallelism is not supported"),
    "rollout.parallelism.cp_rotate_method": ((), "context parallelism is not supported"),
    "rollout.parallelism.pp_dynamic_shape": ((False,), "pipeline parallelism is not supported"),
    "rollout.parallelism.pp_micro_batch_size": ((1,), "pipeline parallelism is not supported"),
    "redis": (("",), "no redis server is needed"),
    "eth_ips": (("",), "the launcher sets the addresses"),
    "train.deterministic": ((False,), "runs are bit-for-bit reproducible on CPUs with either value"),
    "train.optm_impl": (("fused",), "the fused optimiser is used where available"),
    "train.master_dtype": (("float32",), "the optimiser always updates float32 master weights"),
    "train.transfer_dtype": ((None,), "weights are sent to the rollout in train.param_dtype"),
    "train.fsdp_reshard_after_forward": (("default", "always"), "every layer is resharded after its forward pass"),
    "train.sync_weight_interval": ((1,), _ON_POLICY),
    "train.fp8.fp8_recipe": ((), "training in 8 bits is not available"),
    "train.fp8.quant_recipe": ((), "training in 8 bits is not available"),
    "train.train_policy.dataloader_prefetch_factor": ((None, 1), "one batch is prefetched"),
    "train.train_policy.min_filter_prefix_tokens": ((None,), "shared prefixes are also trained"),
    "train.train_policy.on_policy": ((True,), _ON_POLICY),
    "train.train_policy.allowed_outdated_steps": ((0,), _ON_POLICY),
    "train.train_policy.no_outdated_rollout": ((True,), _ON_POLICY),
    "rollout.quantization": (("none",), "mxfp4 weights are loaded in train.param_dtype"),
    "rollout.seed": ((None,), "train.seed is used"),
    "rollout.include_stop_str_in_output": ((False,), "training uses the generated tokens, not the text"),
    "rollout.vllm_use_flashinfer": ((False,), "the engine chooses its kernels"),
    "rollout.sampling_config.use_flashinfer": ((False,), "the engine chooses its kernels"),
    "rollout.sampling_config.top_k": ((-1, None), _SAMPLED),
    "rollout.sampling_config.top_p": ((1.0,), _SAMPLED),
    "rollout.sampling_config.repetition_penalty": ((1.0,), _SAMPLED),
    "validation.top_k": ((-1, None), _GREEDY),
    "validation.top_p": ((1.0, None), _GREEDY),
    "logging.report_mfu": ((True,), "MFU is always logged on GPUs"),
}
"""Ignored keys with the values that need no notice, and the reason printed for all remaining values."""


def check_recipe(config: RecipeConfig) -> None:
    """Raise ConfigError if a recipe has contradictory keys or leaves a required key empty."""
    _check_train(config)
    _check_ckpt(config)
    _check_batch(config)
    _check_validation(config)
    if config.train.train_policy.type == "grpo":
        _check_rollout(config)
    _check_cluster(config)


def _check_train(config: RecipeConfig) -> None:
    train, method = config.train, config.train.train_policy
    if not config.policy.model_name_or_path:
        raise ConfigError("policy.model_name_or_path is empty. Set policy.model_name_or_path=<folder or hub id>")
    betas = train.optm_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"train.optm_betas is {override_text(betas)}; expected two numbers in [0, 1). Set train.optm_betas=[0.9,0.999]"
        )
    warmup = train.optm_warmup_steps
    if isinstance(warmup, float) and warmup > 1:
        key = "train.optm_warmup_steps"
        raise ConfigError(f"{key} is {warmup}; expected a count, or a fraction up to 1.0. Set {key}={round(warmup)}")
    if method.dataset.streaming and train.max_num_steps is None:
        raise ConfigError("A stream (dataset.streaming=true) has no known length. Set train.max_num_steps=<steps>")
    unknown = [name for name in config.logging.logger if name.lower() not in LOGGERS]
    if unknown:
        raise ConfigError(
            f"logging.logger contains '{unknown[0]}'; expected {', '.join(LOGGERS)}. Set logging.logger=[wandb]"
        )
    if "wandb" in map(str.lower, config.logging.logger):
        check_wandb("logging.project_name", config.logging.project_name)
    lora = config.policy.lora
    if lora is not None and isinstance(lora.target_modules, str):
        names = ",".join(re.findall(r"\w*[^\W_]\w*", lora.target_modules)) or "q_proj,v_proj"
        raise ConfigError(
            f"policy.lora.target_modules is '{lora.target_modules}'; expected a list of names. Set 'policy.lora.target_modules=[{names}]'"
        )
    if lora is not None and lora.lora_dropout > 0 and method.type != "sft":
        raise ConfigError(
            f"policy.lora.lora_dropout is {lora.lora_dropout} with type={method.type}. Set policy.lora.lora_dropout=0"
        )


def _check_ckpt(config: RecipeConfig) -> None:
    ckpt = config.train.ckpt
    if ckpt.max_keep == 0:
        raise ConfigError(
            "train.ckpt.max_keep is 0; expected at least 1, or -1. Set train.ckpt.enable_checkpoint=false"
        )
    if ckpt.upload_s3 and not ckpt.s3_bucket:
        raise ConfigError(f"train.ckpt.upload_s3={ckpt.upload_s3} needs a bucket. Set train.ckpt.s3_bucket=<name>")
    if ckpt.upload_hf and not ckpt.hf_repo_name:
        raise ConfigError("train.ckpt.upload_hf=true needs a repository. Set train.ckpt.hf_repo_name=<name>")


def _check_batch(config: RecipeConfig) -> None:
    """Raise ConfigError if a batch does not divide evenly over ranks and groups."""
    shards, batch = config.policy.parallelism.dp_shard_size, config.train.train_batch_per_replica
    if shards == 0:
        raise ConfigError("dp_shard_size is 0; expected at least 1, or -1. Set policy.parallelism.dp_shard_size=1")
    per_row = config.rollout.n_generation if config.train.train_policy.type == "grpo" else 1
    unit = per_row * max(1, shards)
    if batch % unit:
        parts = f"policy.parallelism.dp_shard_size={shards} ranks" + (
            f" in complete groups of rollout.n_generation={per_row}" if per_row > 1 else ""
        )
        fits, key = max(1, batch // unit) * unit, "train.train_batch_per_replica"
        raise ConfigError(
            f"{key}={batch} does not divide over {parts}; expected a multiple of {unit}. Set {key}={fits}"
        )


def _check_rollout(config: RecipeConfig) -> None:
    method, rollout = config.train.train_policy, config.rollout
    if rollout.n_generation < 2:
        raise ConfigError(
            f"rollout.n_generation is {rollout.n_generation}; expected at least 2. Set rollout.n_generation=8"
        )
    if method.temperature == 0:
        raise ConfigError(
            "train.train_policy.temperature is 0; expected above 0. Set train.train_policy.temperature=1.0"
        )
    key, buffer = "train.train_policy.overlong_reward.buffer_length", method.overlong_reward.buffer_length
    longest = min(rollout.max_response_length, config.policy.model_max_length)
    if method.overlong_reward.enable_overlong_penalty or "overlong" in method.reward_function:
        if (buffer or 0) > longest:
            raise ConfigError(f"{key} is {buffer}, but completions are at most {longest} tokens long. Set {key}=null")
    sampling = rollout.sampling_config.temperature
    if sampling not in (None, method.temperature):
        raise ConfigError(
            f"rollout.sampling_config.temperature={sampling}, but train.train_policy.temperature={method.temperature}; expected equal "
            f"values, because the loss compares the log-probabilities. Set rollout.sampling_config.temperature={method.temperature}"
        )


def _check_cluster(config: RecipeConfig) -> None:
    """Raise ConfigError if rollout workers are requested but cannot run."""
    cluster, method = config.cluster, config.train.train_policy.type
    settings = {"cluster.placement": (cluster.placement, "disaggregated"), "cluster.start": (cluster.start, "ray")}
    requests = [f"{key}={value}" for key, (value, requesting) in settings.items() if value == requesting]
    if cluster.num_rollout_workers is not None:
        requests.append(f"cluster.num_rollout_workers={cluster.num_rollout_workers}")
    if not requests:
        return
    fix = "cluster.start=auto cluster.placement=null cluster.num_rollout_workers=null"
    if method != "grpo":
        raise ConfigError(
            f"{requests[0]} with train.train_policy.type={method}; expected grpo, because rollout workers generate completions. Set {fix}"
        )
    placements = (("cluster.placement", cluster.placement, "null"), ("mode", config.mode, "disaggregated"))
    for key, value, fixed in placements:
        if value == "colocated":
            raise ConfigError(f"{requests[0]} with {key}=colocated; expected one of them. Set {key}={fixed}, or {fix}")


def _check_validation(config: RecipeConfig) -> None:
    longest, trained = config.validation.max_response_length, config.rollout.max_response_length
    if config.validation.enable and longest not in (None, trained):
        raise ConfigError(
            f"validation.max_response_length={longest}, but rollout.max_response_length={trained} limits all completions; expected equal "
            f"values. Set rollout.max_response_length={longest}, or validation.max_response_length=null"
        )
    if config.validation.reward_function and config.train.train_policy.type == "dpo":
        key, value = "validation.reward_function", override_text(config.validation.reward_function)
        raise ConfigError(f"{key}={value} in DPO, whose validation scores pairs; expected null. Set {key}=null")
