"""Generation backend based on vLLM. vLLM is needed only to construct its classes."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlinf.distributed.process_group import rank
from rlinf.engines.vllm_engine import EngineSpec, GenerateRequest, VllmEngine, check_temperature
from rlinf.engines.weight_transfer import WeightSource
from rlinf.errors import ConfigError
from rlinf.llm.batch_checks import verify_right_padding, verify_text_only, verify_token_ids
from rlinf.llm.batched_data_dict import Batch, BatchedDataDict, tokens_and_mask
from rlinf.llm.generation_interface import (
    SEEDS_KEY,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    generation_output,
)
from rlinf.llm.hf_generation import SamplingConfig, media_tokens, reject_other_names, verify_sampling_tokens
from rlinf.llm.hf_model import check_tensor_parallel, load_config
from rlinf.options import from_mapping
from rlinf.seeding import derive_seed

TIMEOUT_S = 600.0
IMAGE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Model types for which images are supported, as tensors in ``IMAGE_INPUTS``."""
IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
BANNED_BIAS = -100.0
"""vLLM's minimum logit bias, which makes the probability 0 in float32."""


class VllmGenerationWorker:
    """Owns one engine with one model. It is a plain class that can become a Ray actor: ``ray.remote(VllmGenerationWorker)``.

    Raises MissingDependencyError if vLLM is not installed, and ConfigError if a setting is out of bounds or an engine argument has two
    different values.

    Args:
        model_name: Folder or hub id of a causal language model.
        **kwargs: Keys in ``VllmConfig``; all remaining keys, flat or in ``vllm_cfg``, are engine arguments. ``timeout_s`` is the deadline
            for each engine reply. ``seed`` (default 0) and this process's rank determine the random numbers, even across engine
            restarts; use a different seed for each actor.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        self.settings = {name: value for name, value in kwargs.items() if name in GenerationConfig.__annotations__}
        sampling_config(self.settings)
        engine_args = engine_arguments(kwargs)
        self.seed, self.num_drawn = engine_args.pop("seed", 0), 0
        timeout_s = engine_args.pop("timeout_s", TIMEOUT_S)
        self.model_name, self.num_gpus = model_name, engine_args.get("tensor_parallel_size", 1)
        self.trust_remote_code = engine_args.get("trust_remote_code", False)
        if torch.cuda.is_available():
            engine_args.setdefault("enable_sleep_mode", True)
        spec = EngineSpec(model=model_name, engine_args=engine_args, num_threads=torch.get_num_threads())
        self.engine = VllmEngine(spec, timeout_s=timeout_s)

    def start(self) -> None:
        """Start the engine. Idempotent. Raise ConfigError for settings that are invalid for the model."""
        verify_sampling_tokens(sampling_config(self.settings), self.vocab_size)
        if self.num_gpus > 1:
            check_tensor_parallel(self.model_config, self.num_gpus, "tensor_parallel_size")
        self.engine.start()
        self.engine.wake()

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        greedy: bool = False,
        seeds: list[int] | None = None,
        images: Sequence[Mapping[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per row, without media tokens.

        ``logprobs`` refer to the distribution after temperature, penalty, allowed tokens, and (if sampled) top-k and top-p. Raise
        ConfigError if vLLM rejects or would replace a setting, a prompt is too long, or a token is not in the vocabulary. Raise
        EngineError if the engine failed or missed its deadline.

        Args:
            input_ids, attention_mask: Right-padded prompts, int64 ``[B, S]``; without a mask, every token is used.
            seeds: One seed per row; None uses the worker's next seeds.
            images: ``IMAGE_INPUTS`` for each row, empty for text; None if all rows are text.
        """
        unknown = sorted(set(kwargs) - set(GenerationConfig.__annotations__))
        if unknown:
            raise ConfigError(f"generate got {unknown}; known: {', '.join(GenerationConfig.__annotations__)}")
        settings = self.settings | kwargs
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        batch = {"input_ids": input_ids, "attention_mask": mask}
        verify_token_ids(batch)
        verify_right_padding(batch, raise_error=True)
        prompts = [row[:length].tolist() for row, length in zip(input_ids, mask.bool().sum(-1), strict=True)]
        sampling = sampling_arguments(settings, greedy)
        verify_sampling_tokens(sampling_config(settings), self.vocab_size)
        banned = media_tokens(self.model_config)
        # Exclude media tokens, because completions contain no media and the engine would look for their tensors.
        if banned and "allowed_token_ids" not in sampling:
            sampling["logit_bias"] = dict.fromkeys(banned, BANNED_BIAS)
        request = GenerateRequest([{"prompt_token_ids": ids} for ids in prompts], sampling)
        for prompt, tensors in zip(request.prompts, images or [], strict=images is not None):
            if tensors:
                prompt["image"] = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        if sampling["temperature"] == 0:
            request.greedy_temperature = settings.get("temperature")
        elif seeds is not None:
            request.seeds = seeds
        else:
            first, self.num_drawn = self.num_drawn, self.num_drawn + len(prompts)
            request.seeds = [derive_seed(self.seed, "vllm", rank(), draw) for draw in range(first, self.num_drawn)]
        result = self.engine.generate(request)
        responses = [torch.tensor(ids, dtype=torch.long) for ids in result.token_ids]
        logprobs = [torch.tensor(values, dtype=torch.float32) for values in result.logprobs]
        return generation_output(
            [torch.tensor(ids) for ids in prompts], responses, logprobs, settings.get("pad_token_id") or 0
        )

    def update_weights(self, weights_handle: WeightSource) -> int:
        """Load weights from a ``WeightBuffer`` handle (from any process) or a ``MergedWeights``; return their version.

        Raise WeightsRejectedError if tensors are damaged or missing; if missing, the old weights remain.
        """
        return self.engine.update_weights(weights_handle)

    def sleep(self) -> bool:
        """Release the GPU memory until the next request; return whether it was released, which is always False on the CPU."""
        return self.engine.sleep()

    def stop(self) -> None:
        """Stop the engine."""
        self.engine.close()

    @cached_property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self.model_config.get_text_config().vocab_size

    @cached_property
    def model_config(self) -> Any:
        """The model's transformers configuration."""
        return load_config(self.model_name, self.trust_remote_code)


class RayVirtualCluster:
    """Processes on one machine, one per accelerator. Despite its name, it does not use Ray.

    Raises ConfigError if more machines or GPUs are requested than exist. To place a worker in a Ray cluster, use
    ``ray.remote(VllmGenerationWorker).remote(model_name)``.
    """

    def __init__(self, bundle_ct_per_node_list: Sequence[int], use_gpus: bool = True) -> None:
        counts = bundle_ct_per_node_list
        if not isinstance(counts, Sequence) or len(counts) != 1 or counts[0] < 1:
            raise ConfigError(
                f"RayVirtualCluster got {counts}; expected a single number of processes. Use RayVirtualCluster([1])"
            )
        num_gpus = torch.cuda.device_count()
        if use_gpus and num_gpus < counts[0]:
            smaller = f"[{num_gpus}]" if num_gpus else f"{counts}, use_gpus=False"
            raise ConfigError(
                f"RayVirtualCluster({counts}) needs {counts[0]} GPUs, but torch sees {num_gpus or 'none'}. Use RayVirtualCluster({smaller})"
            )
        self._num_processes = counts[0]
        self.use_gpus = use_gpus

    def world_size(self) -> int:
        """Number of processes."""
        return self._num_processes


class VllmGeneration(GenerationInterface):
    """Generation backend with one vLLM engine.

    On a CPU, ``finish_generation`` discards the engine's pushed weights, so call ``update_weights`` again; on a GPU, the sleeping engine
    retains them. Raises MissingDependencyError if vLLM is not installed, and ConfigError if ``model_name`` is missing, ``backend`` is
    not vllm, or the cluster is too small.
    """

    def __init__(self, cluster: Any, config: Mapping[str, Any]) -> None:
        if config.get("backend", "vllm") != "vllm":
            raise ConfigError(f"VllmGeneration got backend='{config['backend']}'; expected backend='vllm'")
        if "model_name" not in config:
            raise ConfigError(f"VllmGeneration needs model_name=<folder or hub id>; the config has {sorted(config)}")
        num_gpus = engine_arguments(config).get("tensor_parallel_size", 1)
        if cluster is not None and num_gpus > cluster.world_size():
            raise ConfigError(
                f"tensor_parallel_size is {num_gpus}, but the cluster has {cluster.world_size()} processes. Pass "
                f"tensor_parallel_size={cluster.world_size()}"
            )
        self.worker = VllmGenerationWorker(**config)

    def prepare_for_generation(self, *args: object, **kwargs: object) -> None:
        """Start the engine. Idempotent."""
        self.worker.start()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per row with ``VllmGenerationWorker.generate``; start the engine if needed.

        Raise ConfigError if the batch has positions, or if it has images but the model type is not in ``IMAGE_FAMILIES``.
        """
        images, text_data = None, data
        if IMAGE_INPUTS[0] in data and self.worker.model_config.model_type in IMAGE_FAMILIES:
            images = images_of_rows(data)
            text_data = {name: value for name, value in data.items() if name not in IMAGE_INPUTS}
        verify_text_only(text_data, "VllmGeneration", "HuggingFaceGeneration")
        verify_token_ids(data)
        ids, mask = tokens_and_mask(data)
        seeds = data[SEEDS_KEY].tolist() if SEEDS_KEY in data else None
        output = self.worker.generate(ids, mask, greedy, seeds, images).to(ids.device)
        consumed = ("input_ids", "attention_mask", SEEDS_KEY, *output)
        extra = {name: value for name, value in data.items() if name not in consumed}
        return BatchedDataDict({**extra, **output})

    @property
    def temperature(self) -> float:
        """Temperature used for the log-probabilities."""
        return sampling_config(self.worker.settings).temperature

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self.worker.vocab_size

    def update_weights(self, weights_handle: WeightSource) -> int:
        """See ``VllmGenerationWorker.update_weights``."""
        return self.worker.update_weights(weights_handle)

    def finish_generation(self, *args: object, **kwargs: object) -> None:
        """Put the engine to sleep, with its weights in main memory; stop it on a CPU. Idempotent."""
        if not self.worker.sleep():
            self.worker.stop()

    def shutdown(self) -> None:
        """Stop the engine. Idempotent."""
        self.worker.stop()


def images_of_rows(data: Batch) -> list[dict[str, Tensor]]:
    """Return the ``IMAGE_INPUTS`` for each row in a batch, empty for text."""
    for name in IMAGE_INPUTS:
        if not isinstance(data.get(name), list):
            raise ConfigError(
                f"The batch has '{name}' as {type(data.get(name)).__name__}; expected a list with a tensor of images per row"
            )
    columns = [data[name] for name in IMAGE_INPUTS]
    return [dict(zip(IMAGE_INPUTS, row, strict=True)) if len(row[0]) else {} for row in zip(*columns, strict=True)]


def engine_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``vllm.LLM``: keys that are not in ``GenerationConfig``, and keys in ``vllm_cfg``."""
    settings = {*GenerationConfig.__annotations__, "vllm_cfg"}
    flat = {name: value for name, value in config.items() if name not in settings}
    nested = dict(config.get("vllm_cfg") or {})
    reject_other_names((*flat, *nested))
    for name in flat.keys() & nested.keys():
        if flat[name] != nested[name]:
            raise ConfigError(f"{name} is {flat[name]}, but {nested[name]} in vllm_cfg; expected one value")
    return flat | nested


def sampling_config(settings: Mapping[str, Any]) -> SamplingConfig:
    """Check generation settings as ``HuggingFaceGeneration`` does; None and missing keys use the defaults."""
    not_sampling = ("backend", "model_name")
    values = {key: value for key, value in settings.items() if value is not None and key not in not_sampling}
    if values.get("temperature") == 0:
        raise ConfigError("temperature=0 divides by 0. Pass temperature=1.0 and do_sample=False, or greedy=True")
    config = from_mapping(SamplingConfig, values)
    check_temperature(config.temperature, "temperature")
    return config


def sampling_arguments(settings: Mapping[str, Any], greedy: bool) -> dict[str, Any]:
    """Convert generation settings to arguments for ``vllm.SamplingParams``."""
    config = sampling_config(settings)
    greedy = greedy or not config.do_sample
    eos = config.eos_token_id
    values = {
        "max_tokens": config.max_new_tokens,
        "temperature": 0.0 if greedy else config.temperature,
        "top_p": None if greedy else config.top_p,
        "top_k": None if greedy else config.top_k,
        "repetition_penalty": config.repetition_penalty,
        "allowed_token_ids": config.allowed_token_ids,
        "stop_token_ids": [eos] if isinstance(eos, int) else eos,
        # The configured ids replace the model's end tokens.
        "ignore_eos": eos is not None,
    }
    return {name: value for name, value in values.items() if value is not None}
