"""Check a recipe for conflicting and unsupported keys before loading the data and the model."""

import re
from operator import attrgetter

from rlinf.errors import reject
from rlinf.options import override_text, require_values
from rlinf.recipes.config import LOGGERS, NO_ROLLOUT_WORKERS, RecipeConfig
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
    for is_wrong, actual, required, fix in [*_rules(config), *(_grpo_rules(config) if config.is_grpo else [])]:
        if is_wrong:
            reject(actual, required, fix)
    method, lora = config.train.train_policy, config.policy.lora
    if "wandb" in map(str.lower, config.logging.logger):
        check_wandb("logging.project_name", config.logging.project_name)
    if lora is not None and method.type != "sft":
        no_dropout = ("policy.lora.lora_dropout", 0, "log-probabilities without dropout")
        require_values(config, f"train.train_policy.type={method.type}", no_dropout)
    if method.type == "dpo":
        no_rewards = ("validation.reward_function", None, "none, because validation scores pairs")
        require_values(config, "train.train_policy.type=dpo", no_rewards)
    if config.is_grpo and config.rollout.sampling_config.temperature is not None:
        equal = "an equal value, because the loss compares the log-probabilities"
        rule = ("rollout.sampling_config.temperature", method.temperature, equal)
        require_values(config, f"train.train_policy.temperature={method.temperature}", rule)
    _check_cluster(config)


def _rules(config: RecipeConfig) -> list[tuple[bool, str, str, str]]:
    """Return for each rule whether it is violated, the actual value, the requirement and the fix."""
    train, ckpt, method, lora = config.train, config.train.ckpt, config.train.train_policy, config.policy.lora
    betas, warmup = train.optm_betas, train.optm_warmup_steps
    longest, trained = config.validation.max_response_length, config.rollout.max_response_length
    unknown = [name for name in config.logging.logger if name.lower() not in LOGGERS]
    targets = lora.target_modules if lora is not None and isinstance(lora.target_modules, str) else ""
    names = ",".join(re.findall(r"\w*[^\W_]\w*", targets)) or "q_proj,v_proj"
    return [
        (not config.policy.model_name_or_path,
         "policy.model_name_or_path is empty", "a model", "policy.model_name_or_path=<folder or hub id>"),
        (config.policy.parallelism.dp_shard_size == 0,
         "policy.parallelism.dp_shard_size=0", "at least 1, or -1", "policy.parallelism.dp_shard_size=1"),
        (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas),
         f"train.optm_betas={override_text(betas)}", "two numbers in [0, 1)", "train.optm_betas=[0.9,0.999]"),
        (isinstance(warmup, float) and warmup > 1,
         f"train.optm_warmup_steps={warmup}", "a count, or a fraction up to 1.0", f"train.optm_warmup_steps={round(warmup)}"),
        (method.dataset.streaming and train.max_num_steps is None,
         "dataset.streaming=true, a stream", "a number of steps", "train.max_num_steps=<steps>"),
        (bool(unknown), f"logging.logger contains '{', '.join(unknown)}'", ", ".join(LOGGERS), "logging.logger=[wandb]"),
        (bool(targets), f"policy.lora.target_modules is '{targets}'",
         "a list of names", f"'policy.lora.target_modules=[{names}]'"),
        (ckpt.max_keep == 0, "train.ckpt.max_keep=0", "at least 1, or -1", "train.ckpt.enable_checkpoint=false"),
        (bool(ckpt.upload_s3) and not ckpt.s3_bucket,
         f"train.ckpt.upload_s3={ckpt.upload_s3} without a bucket", "a bucket", "train.ckpt.s3_bucket=<name>"),
        (ckpt.upload_hf and not ckpt.hf_repo_name,
         "train.ckpt.upload_hf=true without a repository", "a repository", "train.ckpt.hf_repo_name=<name>"),
        (config.validation.enable and longest not in (None, trained),
         f"validation.max_response_length={longest} with rollout.max_response_length={trained}", "equal values",
         f"rollout.max_response_length={longest}, or validation.max_response_length=null"),
    ]  # fmt: skip


def _grpo_rules(config: RecipeConfig) -> list[tuple[bool, str, str, str]]:
    method, rollout = config.train.train_policy, config.rollout
    key, buffer = "train.train_policy.overlong_reward.buffer_length", method.overlong_reward.buffer_length
    longest = min(rollout.max_response_length, config.policy.model_max_length)
    is_used = method.overlong_reward.enable_overlong_penalty or "overlong" in method.reward_function
    return [
        (rollout.n_generation < 2, f"rollout.n_generation={rollout.n_generation}", "at least 2", "rollout.n_generation=8"),
        (method.temperature == 0, "train.train_policy.temperature=0", "above 0", "train.train_policy.temperature=1.0"),
        (is_used and (buffer or 0) > longest,
         f"{key}={buffer}", f"at most {longest}, the length of a completion", f"{key}=null"),
    ]  # fmt: skip


def _check_cluster(config: RecipeConfig) -> None:
    """Raise ConfigError if rollout workers are requested but cannot run."""
    if (actual := config.cluster.workers_override) is None:
        return
    if not config.is_grpo:
        method = config.train.train_policy.type
        reject(f"{actual} with train.train_policy.type={method}", "grpo, which generates", NO_ROLLOUT_WORKERS)
    for key, fix in (("cluster.placement", "cluster.placement=null"), ("mode", "mode=disaggregated")):
        if attrgetter(key)(config) == "colocated":
            reject(f"{actual} with {key}=colocated", "one of them", f"{fix}, or {NO_ROLLOUT_WORKERS}")
