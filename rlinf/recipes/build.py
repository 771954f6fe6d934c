"""Build the components of a run from its configuration."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from rlinf.checkpoints.checkpoint import on_rank_zero
from rlinf.distributed.process_group import world_size
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.end_tokens import end_tokens
from rlinf.llm.hf_model import load_config
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import DPOLossFn, GRPOLossFn
from rlinf.models.base_weights import weights_digest
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.completions import Completer, CompletionValidation, Generator
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import PackedRows, Rows, StreamedRows
from rlinf.recipes.dpo import DPOTrainer
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.packers import ChatPacker, Packer, PromptPacker
from rlinf.recipes.plan import fraction_of_engine, longest_row, make_plan, num_steps, rows_per_pass, why_no_engine
from rlinf.recipes.rewards import Rewards, make_rewards
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces, make_generator
from rlinf.recipes.rollouts import TorchGenerator, VllmGenerator
from rlinf.recipes.samples import Row
from rlinf.recipes.sft import SFTTrainer
from rlinf.recipes.token_trainer import TokenTrainer
from rlinf.recipes.upload import HubUpload, S3Upload, Upload
from rlinf.seeding import derive_seed

logger = logging.getLogger("rlinf")

TEST_FRACTION = 0.1
"""Fraction of the rows held out for validation by default."""
LOSS_LEVELS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum": "sequence_sum"}
"""Recipe values of ``loss_type`` and their names in ``GRPOLossFn``."""


@dataclass
class RecipeData:
    """Data and rewards of a dataset script.

    Attributes:
        dataset: Training rows: a list, ``datasets.Dataset`` or ``datasets.IterableDataset``.
        reward_fns: Rewards for GRPO; None uses the rewards in the configuration.
        val_dataset: Validation rows; None splits off the first rows of ``dataset`` (``test_size``).
        val_data_packer: Packer for the validation rows; None uses ``data_packer``.
        places: Placement of the rollout workers; None if the ranks themselves generate.
    """

    dataset: Any
    data_packer: Packer
    reward_fns: Any = None
    val_dataset: Any = None
    val_data_packer: Packer | None = None
    places: RolloutWorkerPlaces | None = None


def load_processor(name: str) -> Any:
    """Load a vision-language model's processor, or a language model's tokenizer."""
    model_config = load_config(name)
    if getattr(model_config, "vision_config", None) is not None:
        return load_vlm_processor(name, model_config)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{name}' has no usable tokenizer ({error}).") from error


def policy_settings(config: RecipeConfig, processor: Any) -> dict[str, Any]:
    """Return the keyword arguments for ``HuggingFacePolicy``."""
    train, policy, rollout = config.train, config.policy, config.rollout
    method = train.train_policy
    longest = longest_row(config)
    rows_per_sample = 2 if method.type == "dpo" else 1
    rows = config.batch_size * rows_per_sample // world_size()
    given = rows_per_pass(config, torch.cuda.is_available())
    micro_batch = None if given is None else max(1, min(given * rows_per_sample, rows))
    lora = policy.lora
    return {
        "torch_dtype": train.param_dtype,
        "learning_rate": train.optm_lr,
        "weight_decay": train.optm_weight_decay,
        "optimizer": train.optm_name,
        "betas": list(train.optm_betas),
        "epsilon": train.epsilon,
        "max_grad_norm": train.optm_grad_norm_clip or 1e9,
        "micro_batch_size": micro_batch,
        "max_tokens_per_microbatch": micro_batch * longest if micro_batch and train.sequence_packing else None,
        "sequence_packing": train.sequence_packing,
        "gradient_checkpointing": policy.model_gradient_checkpointing,
        "compile": train.compile,
        "report_entropy": config.logging.report_entropy,
        "lora": None if lora is None else lora.settings(),
        "device_map": None if policy.device == "cpu" else "auto",
        "cpu_offload": train.fsdp_offload,
        **_sharding(config),
        "seed": train.seed or 0,
        "temperature": method.temperature if config.is_grpo else 1.0,
        "max_new_tokens": rollout.max_response_length,
        "max_model_len": longest,
        "tokenizer": processor,
    }  # fmt: skip


def _sharding(config: RecipeConfig) -> dict[str, Any]:
    """Return the model's sharding settings: sharded over ``dp_shard_size`` ranks, or one full copy per rank."""
    size = config.policy.parallelism.dp_shard_size
    if world_size() == 1:
        return {"sharding": "auto"}
    if size == 1:
        return {"sharding": "replicate"}
    return {"sharding": "fsdp2", "shard_size": size if size > 0 and world_size() % size == 0 else None}


def describe_data(config: RecipeConfig, trainer: TokenTrainer) -> dict[str, Any]:
    """Return the settings that determine which rows each step reads; a resumed run must use the same values."""
    method = config.train.train_policy
    dataset = method.dataset
    return {
        "type": method.type,
        "num_rows": len(trainer.rows) if isinstance(trainer.rows, PackedRows) else None,
        "batch_size": config.batch_size,
        "group_size": config.group_size,
        "seed": config.train.seed or 0,
        "shuffle": method.dataloader_shuffle,
        "streaming": isinstance(trainer.rows, StreamedRows),
        "dataset": {name: getattr(dataset, name) for name in ("name", "subset", "split", "revision")},
    }


def describe_model(policy: HuggingFacePolicy) -> dict[str, Any]:
    """Return the initial model's digest and the end tokens for completions (a collective call)."""
    name, settings = policy.model_name, cast(Any, policy.model).generation_config
    digest = on_rank_zero(lambda: weights_digest(name), f"read {name}")
    return {"policy.model_name_or_path": digest, "end_tokens": settings.eos_token_id}


def make_uploads(config: RecipeConfig) -> list[Upload]:
    """Return the run's uploads (performed by one rank). Raise ConfigError if their credentials do not work."""
    ckpt = config.train.ckpt
    uploads: list[Upload] = []
    if ckpt.upload_hf:
        uploads.append(HubUpload(ckpt.hf_repo_name))
    if ckpt.upload_s3:
        uploads.append(S3Upload(ckpt.s3_bucket, ckpt.s3_prefix, every=ckpt.upload_s3 == "all"))
    return uploads


def make_trainer(
    config: RecipeConfig, policy: HuggingFacePolicy, processor: Any, data: RecipeData, stack: ExitStack
) -> TokenTrainer:
    """Build the recipe's trainer. Raise ConfigError for too little data, a bad row, or incompatible settings."""
    longest = longest_row(config)
    if longest < config.policy.model_max_length:
        requested = config.policy.model_max_length
        logger.warning("policy.model_max_length=%d exceeds the model's limit; using %d tokens", requested, longest)
    config = replace(config, policy=replace(config.policy, model_max_length=longest))
    for packer in filter(None, (data.data_packer, data.val_data_packer)):
        packer.setup(config, processor)
        # The model's generation config may list more end tokens than the processor.
        if isinstance(packer, ChatPacker):
            packer.end_tokens = end_tokens(policy.model, processor)
    trainer = getattr(_Maker(config, policy, processor, data, stack), config.train.train_policy.type)()
    trainer.config = config
    return trainer


@dataclass
class _Maker:
    """Factory with one method per ``train.train_policy.type``."""

    config: RecipeConfig
    policy: HuggingFacePolicy
    processor: Any
    data: RecipeData
    stack: ExitStack

    def sft(self) -> SFTTrainer:
        """Build the supervised fine-tuning trainer."""
        config, method = self.config, self.config.train.train_policy
        train_rows, val_rows = self._split()
        rows = self._packed(train_rows, self.data.data_packer.sample)
        packer = self._val_packer
        validation = None if val_rows is None else self._in_order(val_rows, packer.sample)
        completion_validation = None
        if val_rows is not None and config.validation.reward_function:
            completer = self._completer(make_rewards(config.validation.reward_function))
            # The conversation contains the reference, so the prompt must come from a separate column.
            if method.prompt_column_name:
                packer = PromptPacker()
                packer.setup(config, self.processor)
            completion_validation = self._completion_validation(completer, val_rows, packer)
        return SFTTrainer(
            self.policy,
            rows,
            num_steps=self._num_steps(rows),
            batch_size=config.batch_size,
            validation_rows=validation,
            validation_batch_size=config.validation.batch_size,
            num_workers=method.dataloader_num_workers,
            completion_validation=completion_validation,
        )

    def dpo(self) -> DPOTrainer:
        """Build the direct preference optimisation trainer."""
        method = self.config.train.train_policy
        train_rows, val_rows = self._split()
        rows = self._packed(train_rows, self.data.data_packer.pair)
        if isinstance(rows, StreamedRows):
            raise ConfigError("DPO stores the reference log-probabilities of all rows, so it cannot stream them.")
        return DPOTrainer(
            self.policy,
            rows,
            num_steps=self._num_steps(rows),
            batch_size=self.config.batch_size,
            loss=DPOLossFn(beta=method.dpo_beta, label_smoothing=method.dpo_label_smoothing),
            validation_rows=None if val_rows is None else self._in_order(val_rows, self._val_packer.pair),
            validation_batch_size=self.config.validation.batch_size,
        )

    def grpo(self) -> GRPOTrainer:
        """Build the trainer for GRPO and its variants."""
        method, size = self.config.train.train_policy, self.config.rollout.n_generation
        train_rows, val_rows = self._split()
        rows = self._packed(train_rows, self.data.data_packer.prompt)
        completer = self._completer(
            make_rewards(self.data.reward_fns or method.reward_function, method.overlong_reward)
        )
        loss = GRPOLossFn(
            clip_range_low=method.epsilon_low,
            clip_range_high=method.epsilon_high,
            dual_clip=method.lower_bound_ratio if method.lower_bound_ratio > 0 else None,
            ratio_level="sequence" if method.variant == "gspo" else "token",
            loss_level=LOSS_LEVELS[method.loss_type],
            kl_coef=method.kl_beta,
        )
        scaling = "unscaled" if method.unbiased_advantage else "scaled"
        advantage = "leave_one_out" if method.variant == "rloo" else scaling
        max_resamples = method.max_resamples if method.variant == "dapo" else 0
        return GRPOTrainer(
            self.policy,
            rows,
            num_steps=self._num_steps(rows),
            batch_size=self.config.batch_size,
            groups=Groups(size, self.config.train.seed or 0, advantage, method.mu_iterations, max_resamples),
            loss=loss,
            completer=completer,
            completion_validation=None
            if val_rows is None
            else self._completion_validation(completer, val_rows, self._val_packer),
        )

    @property
    def _val_packer(self) -> Packer:
        return self.data.val_data_packer or self.data.data_packer

    def _split(self) -> tuple[Any, Rows | None]:
        """Return the training rows, and the validation rows or None without validation."""
        data = self.data
        if not self.config.validation.enable:
            return data.dataset, None
        if data.val_dataset is not None:
            return data.dataset, _as_rows(data.val_dataset)
        if is_streamed(data.dataset):
            raise ConfigError("A stream cannot be split. Pass val_dataset, or set validation.enable=false")
        val_rows, train_rows = split_rows(self.config, _as_rows(data.dataset))
        return train_rows, val_rows

    def _packed(self, dataset: Any, pack: Callable[[Row], Any]) -> PackedRows | StreamedRows:
        method = self.config.train.train_policy
        seed = derive_seed(self.config.train.seed or 0, "rows") if method.dataloader_shuffle else None
        skip = method.dataset.skip_bad_rows
        rows = (
            StreamedRows(dataset, pack, seed, skip)
            if is_streamed(dataset)
            else PackedRows(_as_rows(dataset), pack, seed, skip, in_memory=method.enable_dataset_cache)
        )
        rows.check()
        return rows

    def _in_order(self, dataset: Rows, pack: Callable[[Row], Any]) -> PackedRows:
        rows = PackedRows(dataset, pack, None, self.config.train.train_policy.dataset.skip_bad_rows)
        rows.check()
        return rows

    def _num_steps(self, rows: PackedRows | StreamedRows) -> int:
        if isinstance(rows, PackedRows):
            return num_steps(self.config, len(rows))
        if self.config.train.max_num_steps is None:
            raise ConfigError("A streamed dataset has no known length. Set train.max_num_steps=<steps>")
        return self.config.train.max_num_steps

    def _completion_validation(self, completer: Completer, dataset: Rows, packer: Packer) -> CompletionValidation:
        rows = self._in_order(dataset, packer.prompt)
        # A copy, because training and validation share the generator but may differ in batch size and rewards.
        val_completer = copy(completer)
        val_completer.batch_size = self.config.validation.batch_size or completer.batch_size
        if self.config.validation.reward_function:
            val_completer.rewards = make_rewards(self.config.validation.reward_function)
        return CompletionValidation(val_completer, [rows[index] for index in range(len(rows))])

    def _completer(self, rewards: Rewards) -> Completer:
        rollout, tokenizer = self.config.rollout, getattr(self.processor, "tokenizer", self.processor)
        generator = self._generator(tokenizer)
        self.stack.callback(generator.close)
        return Completer(
            generator,
            tokenizer,
            rewards,
            batch_size=rollout.batch_size * rollout.n_generation,
            max_new_tokens=rollout.max_response_length,
            end_tokens=end_tokens(self.policy.model, tokenizer),
        )

    def _generator(self, tokenizer: Any) -> Generator:
        """Return the generator for ``rollout.backend``, falling back to torch if vLLM is missing or does not support the model's inputs."""
        places, engine = self.data.places, _engine(self.config, self.policy, self.data.places)
        if places is not None:
            return make_generator(self.config, self.policy, tokenizer, engine, places)
        return TorchGenerator(self.policy) if engine is None else VllmGenerator(self.policy, engine)


def _engine(
    config: RecipeConfig, policy: HuggingFacePolicy, places: RolloutWorkerPlaces | None
) -> dict[str, Any] | None:
    """Return the vLLM engine's settings, or None to generate in torch."""
    rollout = config.rollout
    if not rollout.backend.startswith("vllm"):
        return None
    reason = why_no_engine(policy.model.config)
    if reason is not None:
        who = "The trained model generates" if places is None else "Rollout workers generate in torch"
        logger.warning("rollout.backend=%s is not used: %s. %s", rollout.backend, reason, who)
        return None
    plan = make_plan(config, world_size()) if places is None else None
    return {
        "model_name": policy.model_name,
        "max_new_tokens": rollout.max_response_length,
        "temperature": policy.temperature,
        "eos_token_id": end_tokens(policy.model, policy.config.tokenizer),
        "seed": config.train.seed or 0,
        "vllm_cfg": {
            "tensor_parallel_size": rollout.parallelism.tp_size,
            "gpu_memory_utilization": fraction_of_engine(config, plan),
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enforce_eager": rollout.enforce_eager,
            "max_model_len": policy.config.max_model_len,
            "dtype": config.train.param_dtype,
        },
    }


def split_rows(config: RecipeConfig, rows: Rows) -> tuple[Rows | None, Rows]:
    """Split off ``test_size`` validation rows; return them and the training rows."""
    size = config.train.train_policy.dataset.test_size
    return rows.split_off(TEST_FRACTION if size is None else size)


def _as_rows(dataset: Any) -> Rows:
    return dataset if isinstance(dataset, Rows) else Rows(dataset)


def is_streamed(dataset: Any) -> bool:
    """Return whether a dataset is streamed, that is, has no known length."""
    return not isinstance(dataset, Rows) and not hasattr(dataset, "__len__")
