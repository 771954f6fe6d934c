"""The parts of a run, made from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from transformers import AutoTokenizer

from rlinf.checkpoints.checkpoint import on_rank_zero
from rlinf.checkpoints.checkpoint_manager import Upload
from rlinf.checkpoints.upload import HubUpload, S3Upload
from rlinf.distributed.process_group import world_size
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import DPOLossFn, GRPOLossFn
from rlinf.models.base_weights import weights_digest
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.models.end_tokens import end_tokens
from rlinf.models.hf_model import load_config
from rlinf.models.loading import num_positions
from rlinf.recipes.completions import Answers, Completer, Generator
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import PackedRows, Rows, StreamedRows
from rlinf.recipes.dpo import DPOTrainer
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.packers import ChatPacker, Packer, PromptPacker
from rlinf.recipes.plan import fraction_of_engine, make_plan, why_no_engine
from rlinf.recipes.rewards import Rewards, make_rewards
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces, make_generator
from rlinf.recipes.rollouts import TorchGenerator, VllmGenerator
from rlinf.recipes.schedule import count_steps
from rlinf.recipes.sft import SFTTrainer
from rlinf.recipes.token_trainer import TokenTrainer
from rlinf.seeding import derive_seed

logger = logging.getLogger("rlinf")

TEST_FRACTION = 0.1
"""Fraction of the rows that are kept for validation, if nothing else is said."""
LOSS_LEVELS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum": "sequence_sum"}
"""``loss_type`` as ``GRPOLossFn`` names it."""


@dataclass
class RecipeData:
    """What a dataset script gives.

    Attributes:
        dataset: Rows to train on: a list, ``datasets.Dataset`` or ``datasets.IterableDataset``.
        packer: Turns them into tokens.
        reward_fns: Rewards of GRPO; None: the configuration names them.
        val_dataset: Rows of the validation; None: the first ones of ``dataset`` (``test_size``).
        val_packer: Turns them into tokens; None: ``packer``.
        places: Where rollout workers of the run may be; None: the ranks generate.
    """

    dataset: Any
    packer: Packer
    reward_fns: Any = None
    val_dataset: Any = None
    val_packer: Packer | None = None
    places: RolloutWorkerPlaces | None = None


def load_processor(name: str) -> Any:
    """Return the processor of a vision-language model, or the tokenizer of a language model."""
    model_config = load_config(name)
    if getattr(model_config, "vision_config", None) is not None:
        return load_vlm_processor(name, model_config)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{name}' has no usable tokenizer ({error}).") from error


def longest_row(config: RecipeConfig) -> int:
    """Return the most tokens of a row: ``policy.model_max_length``, or the positions of the model if they are fewer."""
    policy = config.policy
    declared = num_positions(load_config(policy.model_name_or_path).get_text_config())
    return min(policy.model_max_length, declared or policy.model_max_length)


def policy_settings(config: RecipeConfig, processor: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``HuggingFacePolicy``."""
    train, policy, rollout = config.train, config.policy, config.rollout
    method = train.train_policy
    longest = longest_row(config)
    is_grpo, rows_per_sample = method.type == "grpo", 2 if method.type == "dpo" else 1
    rows = batch_size(config) * rows_per_sample // world_size()
    micro_batch = max(1, min(method.mini_batch * rows_per_sample, rows))
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
        "max_tokens_per_microbatch": micro_batch * longest if train.sequence_packing else None,
        "sequence_packing": train.sequence_packing,
        "gradient_checkpointing": policy.model_gradient_checkpointing,
        "compile": train.compile,
        "report_entropy": config.logging.report_entropy,
        "lora": None if lora is None else lora.settings(),
        "device_map": None if policy.device == "cpu" else "auto",
        "cpu_offload": train.fsdp_offload,
        **_sharding(config),
        "seed": train.seed or 0,
        "temperature": method.temperature if is_grpo else 1.0,
        "max_new_tokens": rollout.max_response_length,
        "max_model_len": longest,
        "tokenizer": processor,
    }  # fmt: skip


def _sharding(config: RecipeConfig) -> dict[str, Any]:
    """Return how the ranks hold the model: shards of ``dp_shard_size`` ranks, or each rank the whole."""
    size = config.policy.parallelism.dp_shard_size
    if world_size() == 1:
        return {"sharding": "auto"}
    if size == 1:
        return {"sharding": "replicate"}
    return {"sharding": "fsdp2", "shard_size": size if size > 0 and world_size() % size == 0 else None}


def batch_size(config: RecipeConfig) -> int:
    """Return the rows of one step (answers, in GRPO) over all replicas."""
    parallelism = config.policy.parallelism
    replicas = parallelism.n_init_replicas * parallelism.dp_replicate_size
    return config.train.train_batch_per_replica * replicas


def describe_data(config: RecipeConfig, trainer: TokenTrainer) -> dict[str, Any]:
    """Return what determines the rows of a step."""
    method = config.train.train_policy
    dataset = method.dataset
    return {
        "type": method.type,
        "num_rows": len(trainer.rows) if isinstance(trainer.rows, PackedRows) else None,
        "batch_size": batch_size(config),
        "group_size": config.rollout.n_generation if method.type == "grpo" else 1,
        "seed": config.train.seed or 0,
        "shuffle": method.dataloader_shuffle,
        "streaming": isinstance(trainer.rows, StreamedRows),
        "dataset": {name: getattr(dataset, name) for name in ("name", "subset", "split", "revision")},
    }


def describe_model(policy: HuggingFacePolicy) -> dict[str, Any]:
    """Return which model a run started with, and what ends its answers (a collective call)."""
    name, settings = policy.model_name, cast(Any, policy.model).generation_config
    digest = on_rank_zero(lambda: weights_digest(name), f"read {name}")
    return {"policy.model_name_or_path": digest, "end_tokens": settings.eos_token_id}


def make_uploads(config: RecipeConfig) -> list[Upload]:
    """Return what takes a run's folders elsewhere, with credentials that work; made on one rank. Raise ConfigError if they do not work."""
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
    """Return the trainer of ``train.train_policy.type``.

    Raise ConfigError if the data are too few, a row cannot be used, or settings do not fit.
    """
    longest = longest_row(config)
    if longest < config.policy.model_max_length:
        given = config.policy.model_max_length
        logger.warning(
            "policy.model_max_length=%d is more than the model has: rows have at most %d tokens", given, longest
        )
    config = replace(config, policy=replace(config.policy, model_max_length=longest))
    packers = [data.packer] if data.val_packer is None else [data.packer, data.val_packer]
    for packer in packers:
        packer.setup(config, processor)
        if isinstance(packer, ChatPacker):
            packer.end_tokens = end_tokens(policy.model, processor)
    trainer = getattr(_Maker(config, policy, processor, data, stack), config.train.train_policy.type)()
    trainer.config = config
    return trainer


@dataclass
class _Maker:
    """Makes the trainers of a recipe, each by a method with the name of ``train.train_policy.type``."""

    config: RecipeConfig
    policy: HuggingFacePolicy
    processor: Any
    data: RecipeData
    stack: ExitStack

    def sft(self) -> SFTTrainer:
        """Make the trainer of supervised fine-tuning."""
        config, method = self.config, self.config.train.train_policy
        train_rows, val_rows = self._split()
        rows = self._packed(train_rows, self.data.packer.sample)
        packer = self._val_packer
        validation = None if val_rows is None else self._in_order(val_rows, packer.sample)
        answers = None
        if val_rows is not None and config.validation.reward_function:
            completer = self._completer(make_rewards(config.validation.reward_function))
            if method.prompt_column_name:  # a conversation holds the answer, its prompt has a column of its own
                packer = PromptPacker()
                packer.setup(config, self.processor)
            answers = self._answers(completer, val_rows, packer)
        return SFTTrainer(
            self.policy,
            rows,
            num_steps=self._num_steps(rows),
            batch_size=batch_size(config),
            validation_rows=validation,
            validation_batch_size=config.validation.batch_size,
            num_workers=method.dataloader_num_workers,
            answers=answers,
        )

    def dpo(self) -> DPOTrainer:
        """Make the trainer of direct preference optimisation."""
        method = self.config.train.train_policy
        train_rows, val_rows = self._split()
        rows = self._packed(train_rows, self.data.packer.pair)
        if isinstance(rows, StreamedRows):
            raise ConfigError("DPO keeps the reference log-probabilities of all rows, so it cannot stream its dataset.")
        return DPOTrainer(
            self.policy,
            rows,
            num_steps=self._num_steps(rows),
            batch_size=batch_size(self.config),
            loss=DPOLossFn(beta=method.dpo_beta, label_smoothing=method.dpo_label_smoothing),
            validation_rows=None if val_rows is None else self._in_order(val_rows, self._val_packer.pair),
            validation_batch_size=self.config.validation.batch_size,
        )

    def grpo(self) -> GRPOTrainer:
        """Make the trainer of group relative policy optimisation and its variants."""
        method, size = self.config.train.train_policy, self.config.rollout.n_generation
        train_rows, val_rows = self._split()
        rows = self._packed(train_rows, self.data.packer.prompt)
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
            num_steps=self._num_steps(rows, size),
            batch_size=batch_size(self.config),
            groups=Groups(size, self.config.train.seed or 0, advantage, method.mu_iterations, max_resamples),
            loss=loss,
            completer=completer,
            answers=None if val_rows is None else self._answers(completer, val_rows, self._val_packer),
        )

    @property
    def _val_packer(self) -> Packer:
        return self.data.val_packer or self.data.packer

    def _split(self) -> tuple[Any, Rows | None]:
        """Return the rows to train on, and the rows of the validation, if any."""
        data = self.data
        if not self.config.validation.enable:
            return data.dataset, None
        if data.val_dataset is not None:
            return data.dataset, _as_rows(data.val_dataset)
        if is_streamed(data.dataset):
            raise ConfigError(
                "A streamed dataset has no rows to split off. Give val_dataset, or set validation.enable=false"
            )
        val_rows, train_rows = split_rows(self.config, _as_rows(data.dataset))
        return train_rows, val_rows

    def _packed(self, dataset: Any, pack: Callable[[dict[str, Any]], Any]) -> PackedRows | StreamedRows:
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

    def _in_order(self, dataset: Rows, pack: Callable[[dict[str, Any]], Any]) -> PackedRows:
        rows = PackedRows(dataset, pack, None, self.config.train.train_policy.dataset.skip_bad_rows)
        rows.check()
        return rows

    def _num_steps(self, rows: PackedRows | StreamedRows, rows_per_sample: int = 1) -> int:
        train = self.config.train
        if isinstance(rows, StreamedRows):
            if train.max_num_steps is None:
                raise ConfigError(
                    "A streamed dataset does not tell how many rows it has. Set train.max_num_steps=<steps>"
                )
            return train.max_num_steps
        return count_steps(len(rows), train.epoch, batch_size(self.config), rows_per_sample, train.max_num_steps)

    def _answers(self, completer: Completer, dataset: Rows, packer: Packer) -> Answers:
        rows = self._in_order(dataset, packer.prompt)
        own = copy(completer)
        own.batch_size = self.config.validation.batch_size or completer.batch_size
        if self.config.validation.reward_function:
            own.rewards = make_rewards(self.config.validation.reward_function)
        return Answers(own, [rows[number] for number in range(len(rows))])

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
        """Return what generates with the engine of ``rollout.backend``; in torch where vLLM is not installed or cannot read the inputs."""
        places, engine = self.data.places, _engine(self.config, self.policy, self.data.places)
        if places is not None:
            return make_generator(self.config, self.policy, tokenizer, engine, places)
        return TorchGenerator(self.policy) if engine is None else VllmGenerator(self.policy, engine)


def _engine(
    config: RecipeConfig, policy: HuggingFacePolicy, places: RolloutWorkerPlaces | None
) -> dict[str, Any] | None:
    """Return the settings of the vLLM engine; None: torch generates."""
    rollout = config.rollout
    if not rollout.backend.startswith("vllm"):
        return None
    reason = why_no_engine(policy.model.config)
    if reason is not None:
        who = "The trained model generates" if places is None else "RolloutWorkers generate in torch"
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
    """Return the rows of the validation, by ``test_size``, and those to train on."""
    size = config.train.train_policy.dataset.test_size
    return rows.split_off(TEST_FRACTION if size is None else size)


def _as_rows(dataset: Any) -> Rows:
    return dataset if isinstance(dataset, Rows) else Rows(dataset)


def is_streamed(dataset: Any) -> bool:
    """Return whether a dataset is read row by row."""
    return not isinstance(dataset, Rows) and not hasattr(dataset, "__len__")
