"""Server in the engine's process that executes commands from ``VllmEngine``."""

import gc
import os
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoConfig

from rlinf.engines.vllm_engine import (
    GREEDY_TEMPERATURE,
    EngineError,
    EngineSpec,
    GenerateRequest,
    GenerateResult,
    check_temperature,
    kv_cache_bytes,
)
from rlinf.engines.vllm_weights import LanguageModelNames, TensorNames, call_loader, keep_names
from rlinf.engines.vllm_worker import MODEL_CLASS, WorkerExtension, register
from rlinf.engines.weight_handle import TensorSpec, WeightsHandle, WeightsRejectedError
from rlinf.engines.weight_transfer import WeightReceiver
from rlinf.errors import ConfigError

CPU_CACHE_BYTES = 4 * 1024**3
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's ``compilation_config``: no compiler, and one CUDA graph per batch size for decoding steps."""
CPU_NUM_SEQUENCES = 256
"""Default for ``max_num_seqs``; sequences that exceed the cache size wait."""


class VllmServer(WeightReceiver):
    """Owns a ``vllm.LLM``, with one method per command."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM
        from vllm.exceptions import VLLMError

        defaults = {"logprobs_mode": "processed_logprobs", "disable_log_stats": True}
        arguments = defaults | graph_arguments(spec.engine_args, torch.cuda.is_available())
        arguments["logits_processors"] = [GREEDY_TEMPERATURE, *spec.engine_args.get("logits_processors", ())]
        with tempfile.TemporaryDirectory() as folder:
            model = spec.model
            super().__init__(0 if spec.model_class is None else None)
            if spec.model_class is not None:
                # With tensor parallelism, worker processes read the class from the environment.
                os.environ[MODEL_CLASS] = spec.model_class
                arguments["worker_extension_cls"] = f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"
                model_class = register(spec.model_class)
                config = model_class.config_of(spec.config)
                config.architectures = [model_class.__name__]
                config.save_pretrained(folder)
                model = folder
                # Each policy prompt starts with a new image, so prefixes cannot be reused.
                arguments = {"load_format": "dummy", "enable_mm_embeds": True, "mm_processor_cache_gb": 0,
                             "enable_prefix_caching": False} | arguments  # fmt: skip
            else:
                arguments |= language_model_arguments(model, arguments)
            try:
                self.llm = LLM(**{"model": model, "skip_tokenizer_init": True} | arguments)
            except (VLLMError, ValueError, TypeError, OSError) as error:
                raise ConfigError(
                    f"vLLM rejects '{spec.model or spec.model_class}': {error}. The settings were {arguments}. "
                    f"Set {spec.settings_key}.<setting>=<different value>"
                ) from error
        self.spec, self._is_loading = spec, False
        self.model_config = config = self.llm.llm_engine.model_config.hf_config
        self.vocab_size = config.get_text_config().vocab_size
        is_registered = spec.model_class is not None
        self.reads_images = not is_registered and getattr(config, "vision_config", None) is not None
        self.names = TensorNames(model_class.required_tensors(config)) if is_registered else LanguageModelNames(config)
        self.llm.collective_rpc(keep_names, args=(self.names,))

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate completions for a batch of prompts."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        if self.version is None:
            raise EngineError("The vLLM engine has no complete weights. Call update_weights before generate")
        self._check(request)
        prompts = [self._input(prompt) for prompt in request.prompts]
        seeds = request.seeds or [None] * len(prompts)
        extra = None if request.greedy_temperature is None else {GREEDY_TEMPERATURE: request.greedy_temperature}
        try:
            common = {"logprobs": 0, "detokenize": False, "extra_args": extra, **request.sampling}
            sampling = [SamplingParams(seed=seed, **common) for seed in seeds]
            outputs = [output.outputs[0] for output in self._run(prompts, sampling)]
        except (VLLMClientError, ValueError) as error:
            raise ConfigError(
                f"vLLM rejects a prompt or its settings {request.sampling}: {error}. If a prompt is too long, pass shorter ones "
                f"or set {self.spec.settings_key}.max_model_len=<more than {self.max_model_len}>"
            ) from error
        wanted = request.sampling.get("min_tokens", 0)
        shortest = min((len(output.token_ids) for output in outputs), default=wanted)
        if shortest < wanted:
            raise ConfigError(
                f"max_model_len={self.max_model_len} leaves {shortest} tokens after a prompt; expected {wanted}. "
                f"Set {self.spec.settings_key}.max_model_len={self.max_model_len + wanted - shortest}"
            )
        token_ids = [list(output.token_ids) for output in outputs]
        steps = [zip(output.logprobs, output.token_ids, strict=True) for output in outputs]
        logprobs = [[entries[token].logprob for entries, token in row] for row in steps]
        return GenerateResult(token_ids, logprobs, self.version)

    def _input(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return a prompt in the format for ``llm.generate`` or, with ``reads_images``, in the renderer's format."""
        tensors = {name: torch.from_numpy(array) for name, array in prompt.get("image", {}).items()}
        if self.reads_images:
            from rlinf.engines.vllm_requests import engine_input

            return engine_input(prompt["prompt_token_ids"], tensors, self.model_config)
        images = {"multi_modal_data": {"image": tensors}} if tensors else {}
        return {"prompt_token_ids": prompt["prompt_token_ids"], **images}

    def _run(self, prompts: list[dict[str, Any]], sampling: list[Any]) -> list[Any]:
        """Return vLLM's output for each prompt."""
        from vllm import RequestOutput

        # Bypass vLLM's renderer, which would require raw images and preprocess them again.
        if self.reads_images:
            return self.llm._render_and_run_requests(iter(prompts), sampling, RequestOutput, use_tqdm=False)
        return self.llm.generate(prompts, sampling, use_tqdm=False)

    def sleep(self, keep_weights: bool) -> int | None:
        """Release the GPU memory; return the version of the retained weights, or None if they are discarded."""
        self.llm.sleep(level=1 if keep_weights else 2)
        self._version = self._version if keep_weights else None
        return self._version

    def wake(self, _: object) -> None:
        """Reallocate the GPU memory."""
        self.llm.wake_up()

    def check(self, manifest: Mapping[str, TensorSpec]) -> None:
        """See ``WeightReceiver.check``."""
        if self._is_loading:
            raise EngineError("An earlier push was interrupted, and vLLM cannot reload partially loaded layers.")
        self.names.check(manifest)

    def receive(self, handle: WeightsHandle) -> None:
        """Make every worker open the bucket and load it."""
        if not self._is_loading:
            self._is_loading = True
            self.llm.collective_rpc(call_loader, args=("start", self._manifest))
        self.llm.collective_rpc(call_loader, args=("load", handle))
        # Open it again to verify that the sender has not rewritten the bucket while the workers read it.
        try:
            handle.open(self._mapped)
        except WeightsRejectedError as error:
            raise EngineError(f"The weights were rewritten while vLLM loaded them: {error}") from error

    def finish(self, is_complete: bool) -> None:
        """Clear every cache that depends on the weights."""
        if not self._is_loading:  # no trained tensors
            return
        missing = self.llm.collective_rpc(call_loader, args=("finish",))[0]
        self._is_loading = False
        if missing and is_complete:
            raise EngineError(
                f"vLLM left {len(missing)} parameters of '{self.spec.model or self.spec.model_class}' without new weights: "
                f"{', '.join(missing[:8])}. It cannot update weights of this architecture"
            )
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        # Drop all views, because the sender may free the shared memory from now on.
        gc.collect()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens per prompt and response together."""
        return self.llm.llm_engine.model_config.max_model_len

    def _check(self, request: GenerateRequest) -> None:
        """Raise ConfigError for requests that vLLM would process incorrectly, or reject without a usable message."""
        check_temperature(request.sampling.get("temperature"), self.spec.temperature_key)
        ids = [prompt["prompt_token_ids"] for prompt in request.prompts]
        unknown = sorted({token for row in ids for token in row if not 0 <= token < self.vocab_size})
        if unknown:
            raise ConfigError(
                f"The prompts have the token ids {unknown[:8]}; expected 0 to {self.vocab_size - 1}, the vocab_size="
                f"{self.vocab_size} of '{self.spec.model or self.spec.model_class}'. Use the model's own tokenizer"
            )
        longest = max(map(len, ids), default=0)
        if longest >= self.max_model_len:
            raise ConfigError(
                f"vLLM rejects a prompt of {longest} tokens, because it leaves no tokens for a response within max_model_len="
                f"{self.max_model_len}. Pass shorter prompts or set {self.spec.settings_key}.max_model_len=<more than {longest}>"
            )


def graph_arguments(engine_args: Mapping[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Return ``engine_args`` with ``enforce_eager`` set; on a GPU, decoding uses CUDA graphs unless it is true."""
    # A graph replays the eager kernels, so log-probabilities still pass the parity gate. vLLM's default would also compile the model
    # into different kernels, which takes a minute at each start.
    eager = engine_args.get("enforce_eager")
    arguments = {**engine_args, "enforce_eager": not on_gpu if eager is None else eager}
    if not arguments["enforce_eager"]:
        arguments.setdefault("compilation_config", dict(DECODE_GRAPHS))
    return arguments


def language_model_arguments(model: str, engine_args: dict[str, Any]) -> dict[str, Any]:
    """Return additional ``vllm.LLM`` arguments for a language model: dtype, cache size and image settings."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=engine_args.get("trust_remote_code", False))
    arguments: dict[str, Any] = {}
    # Set the dtype explicitly, because vLLM's auto converts float32 to 16 bits.
    if engine_args.get("dtype", "auto") == "auto":
        arguments["dtype"] = str(config.dtype or config.get_text_config().dtype or torch.float32).removeprefix("torch.")
    # On CPUs, gpu_memory_utilization would immediately allocate this fraction of main memory.
    if not torch.cuda.is_available() and engine_args.get("kv_cache_memory_bytes") is None:
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(config.get_text_config(), engine_args | arguments)
    # Images are already normalised, so vLLM must not normalise them again.
    if getattr(config, "vision_config", None) is not None:
        arguments |= {"skip_tokenizer_init": False, "mm_device_do_normalize": False, "mm_processor_cache_gb": 0,
                      "limit_mm_per_prompt": {"video": 0}}  # fmt: skip
    return arguments


def cpu_cache_bytes(text_config: Any, engine_args: dict[str, Any]) -> int:
    """Return a CPU cache's size in bytes: enough for all sequences, at most ``CPU_CACHE_BYTES``, but at least for one sequence."""
    dtype = getattr(torch, str(engine_args["dtype"]).removeprefix("torch."))
    max_model_len = engine_args.get("max_model_len") or text_config.max_position_embeddings
    num_sequences = engine_args.get("max_num_seqs", CPU_NUM_SEQUENCES)
    smallest, largest = (kv_cache_bytes(text_config, n, max_model_len, dtype) for n in (1, num_sequences))
    return max(smallest, min(largest, CPU_CACHE_BYTES))


def serve(connection: Connection) -> None:
    """Execute commands until ``stop`` arrives or the parent ends."""
    server = None
    while True:
        try:
            command, payload = connection.recv()
        except EOFError:
            return
        if command == "stop":
            return
        try:
            if command == "start":
                server = VllmServer(payload)
                reply = "ok", server.version
            else:
                reply = "ok", getattr(server, command)(payload)
        except (WeightsRejectedError, ConfigError, EngineError) as error:
            reply = "error", error
        except Exception as error:  # noqa: BLE001 (the parent reports it)
            message = f"The vLLM engine failed at '{command}': {error}\n{traceback.format_exc()}"
            reply = "error", EngineError(message)
        connection.send(reply)
