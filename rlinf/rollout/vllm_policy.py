"""A rollout policy that samples actions with vLLM, alongside the torch model being trained."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rlinf.engines.gpu_fraction import SEPARATE_GPU_FRACTION
from rlinf.engines.vllm_engine import EngineSpec, GenerateRequest, VllmEngine, kv_cache_bytes
from rlinf.engines.weight_handle import WeightBuckets
from rlinf.errors import ConfigError, RLinfError
from rlinf.models.base_weights import base_tensors, trained_names
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.lora import MergedWeights
from rlinf.rollout.config import VllmOptions
from rlinf.types import ActionPrediction, Observation

SEED_BITS = 24
"""Number of random bits in a float32 in (0, 1)."""


class VllmPolicy:
    """Sample action tokens in a vLLM engine. The torch model preprocesses images and computes values.

    ``model`` is unsharded; its weights are sent to the engine. A call has at most ``num_envs`` rows. If ``model`` is a replica of a
    different model, ``trained`` lists the tensors changed by training; None uses ``trained_names(model)``.
    """

    predicts_values = False  # vLLM does not run a value head, so ``predict_values`` uses the torch model

    def __init__(
        self,
        model: ActionModel,
        options: VllmOptions,
        num_envs: int,
        num_threads: int = 1,
        trained: Collection[str] | None = None,
    ) -> None:
        self.model = model
        self.trained = trained_names(model) if trained is None else trained
        self.adapter = adapter_of(model)
        self.adapter.check(model.config)
        self.buckets = WeightBuckets()
        self.version: int | None = None
        self.engine = VllmEngine(
            EngineSpec(
                model_class=self.adapter.model_class,
                config=self.adapter.engine_config(model),
                engine_args=engine_arguments(model, options, num_envs),
                num_threads=num_threads,
                settings_key="rollout.vllm",
                temperature_key="rollout.temperature",
            ),
            timeout_s=options.timeout_s,
        )
        tokenizer: Any = model.action_tokenizer
        self.allowed_token_ids = list(range(tokenizer.first_token, tokenizer.vocab_size))

    def update_weights(self, version: int) -> None:
        """Send the torch model's weights to the engine, unless it already has this version."""
        # Reset first, because after a failed transfer the engine may contain parts of two versions.
        self.version = None
        if self.engine.version != version:
            weights = MergedWeights(self.model, version, self.buckets, self.trained, self.adapter.excluded)
            self.engine.update_weights(weights)
        self.version = version

    def sleep(self) -> None:
        """Free the engine's GPU memory until it receives weights or observations."""
        self.engine.sleep(keep_weights=len(self.trained) < len(list(base_tensors(self.model))))

    def close(self) -> None:
        self.engine.close()
        self.buckets.close()

    # The ``ActionModel`` interface used in rollouts.

    @property
    def num_logprobs(self) -> int:
        """``A``, the number of log-probabilities per policy call."""
        return self.model.num_logprobs

    @property
    def num_sampled(self) -> int:
        """``K``, the number of sampled tokens per policy call."""
        return self.model.num_sampled

    num_uniforms = 2  # a row's seed is built from two random numbers

    def resize_images(self, observation: Observation) -> Observation:
        return self.model.resize_images(observation)

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        return self.model.preprocess(observation)

    @torch.no_grad()
    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Tensor
    ) -> ActionPrediction:
        """Sample actions for ``B`` rows, with seeds from ``uniforms [B, 2]``; if not ``do_sample``, use the most likely tokens.

        In the result, ``logits`` are ``[B, A, 1]``, the engine's log-probabilities of the sampled tokens; ``values`` are 0.
        """
        num_tokens = self.num_logprobs
        sampling = {
            "max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True,
            "allowed_token_ids": self.allowed_token_ids, "temperature": temperature if do_sample else 0.0,
        }  # fmt: skip
        # Each row has its own seed, so that its actions do not depend on how vLLM forms batches.
        seeds = None if uniforms is None or not do_sample else row_seeds(uniforms)
        prompts = self.adapter.prompts(self.model, inputs)
        greedy_temperature = None if do_sample else temperature
        result = self.engine.generate(GenerateRequest(prompts, sampling, seeds, greedy_temperature))
        if result.version != self.version:
            raise RLinfError(f"The vLLM engine used weights of version {result.version}; expected {self.version}.")
        tokens = torch.tensor(result.token_ids, device=inputs["input_ids"].device)
        sequences = torch.cat([inputs["input_ids"], tokens], dim=1)
        logprobs = torch.tensor(result.logprobs, dtype=torch.float32, device=tokens.device)
        return ActionPrediction(
            self.model.decode_actions(sequences), sequences, logprobs[..., None], logprobs.new_zeros(len(tokens))
        )

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        """Return the engine's log-probabilities of the sampled tokens among the action tokens, float32 ``[B, A]``."""
        return prediction.logits.squeeze(-1)

    def predict_values(self, **inputs: Tensor) -> Tensor:
        """Return the torch model's values, float32 ``[B]``."""
        return self.model.predict_values(**inputs)


def adapter_of(model: ActionModel | type[ActionModel]) -> Any:
    """Return the class that adapts a model to vLLM; raise ConfigError if it or ``decode_actions`` is missing."""
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    if model.vllm_adapter is None:
        raise ConfigError(
            f"rollout.backend=vllm needs a policy that vLLM can run, but {name} does not declare a vllm_adapter. Set "
            "rollout.backend=torch"
        )
    if not model.implements("decode_actions"):
        raise ConfigError(
            f"rollout.backend=vllm needs decode_actions, which {name} does not implement. Set rollout.backend=torch"
        )
    return model.vllm_adapter


def engine_arguments(model: ActionModel, options: VllmOptions, num_envs: int) -> dict[str, Any]:
    """Convert the settings to arguments for ``vllm.LLM``."""
    text_config = model.config.text_config
    dtype = str(model.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype
    max_model_len = options.max_model_len or text_config.max_position_embeddings
    memory = options.kv_cache_memory_bytes
    if memory is None and not torch.cuda.is_available():
        memory = kv_cache_bytes(text_config, num_envs, max_model_len, getattr(torch, dtype))
    return {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": num_envs,
        "kv_cache_memory_bytes": memory,
        "gpu_memory_utilization": SEPARATE_GPU_FRACTION
        if options.gpu_memory_utilization is None
        else options.gpu_memory_utilization,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager,
        "enable_sleep_mode": torch.cuda.is_available() and options.sleep,
        "limit_mm_per_prompt": {"image": 1},
    }


def row_seeds(uniforms: Tensor) -> list[int]:
    """Convert random numbers ``[B, 2]`` in (0, 1) to seeds of ``2 * SEED_BITS`` bits."""
    high, low = (uniforms[:, :2].double() * 2**SEED_BITS).long().unbind(1)
    return ((high << SEED_BITS) + low).tolist()
