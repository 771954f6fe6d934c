"""The process of a vLLM engine: ``python -m rlinf.models.generation.vllm_server <socket> <parent>``."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlinf.distributed.weight_handle import WeightsHandle, WeightsRefusedError, check_manifest
from rlinf.errors import ConfigError
from rlinf.models.generation.vllm_engine import EngineError, EngineSpec, GenerateRequest, GenerateResult


class VllmServer:
    """Owns ``vllm.LLM``.

    Args:
        spec: What to build.

    Raises:
        ConfigError: vLLM refuses the settings.
    """

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM, ModelRegistry
        from vllm.exceptions import VLLMError

        arguments = {"enforce_eager": True, "logprobs_mode": "processed_logprobs", "disable_log_stats": True} | spec.engine_args
        with tempfile.TemporaryDirectory() as folder:
            model = spec.model
            self.version: int | None = 0
            if spec.twin is not None:
                module, _, name = spec.twin.partition(":")
                twin = getattr(importlib.import_module(module), name)
                ModelRegistry.register_model(name, twin)
                config = twin.config_of(spec.config)
                config.architectures = [name]
                config.save_pretrained(folder)
                model, self.version = folder, None
                # A policy's prompts begin with a new image at every step: nothing there to reuse.
                arguments = {"load_format": "dummy", "enable_mm_embeds": True, "mm_processor_cache_gb": 0,
                             "enable_prefix_caching": False} | arguments  # fmt: skip
            try:
                self.llm = LLM(model=model, skip_tokenizer_init=True, **arguments)
            except (VLLMError, ValueError, TypeError, OSError) as error:
                raise ConfigError(f"vLLM refuses these settings {arguments}: {error}") from error
        config = self.llm.llm_engine.model_config.hf_config
        self.required = twin.required_tensors(config) if spec.twin is not None else required_tensors(config)

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer a batch of prompts."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        if self.version is None:
            raise EngineError("The vLLM engine has no weights yet: update_weights comes before generate")
        prompts = []
        for prompt in request.prompts:
            prompts.append({"prompt_token_ids": prompt["prompt_token_ids"]})
            if "image" in prompt:
                tensors = {name: torch.from_numpy(array) for name, array in prompt["image"].items()}
                prompts[-1]["multi_modal_data"] = {"image": tensors}
        seeds = request.seeds or [None] * len(prompts)
        try:
            sampling = [SamplingParams(logprobs=0, detokenize=False, seed=seed, **request.sampling) for seed in seeds]
            outputs = [output.outputs[0] for output in self.llm.generate(prompts, sampling, use_tqdm=False)]
        except (VLLMClientError, ValueError) as error:
            raise ConfigError(f"vLLM refuses a prompt or its settings {request.sampling}: {error}") from error
        return GenerateResult(
            token_ids=[list(output.token_ids) for output in outputs],
            logprobs=[
                [chosen[token].logprob for chosen, token in zip(output.logprobs, output.token_ids, strict=True)]
                for output in outputs
            ],
            version=self.version,
        )

    def update_weights(self, handle: WeightsHandle) -> int:
        """Replace all weights, then empty every cache that depends on them."""
        check_manifest(handle.manifest, self.required)
        self.version = None  # until all is done
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(handle.open().items())})
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        gc.collect()  # the sender may rewrite the shared memory now
        self.version = handle.version
        return self.version


def required_tensors(config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a language model of transformers by name, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return dict(model.state_dict(keep_vars=True))


def serve(connection: Connection) -> None:
    """Answer commands until ``stop`` or the end of the parent."""
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
                answer = "ok", server.version
            else:
                answer = "ok", getattr(server, command)(payload)
        except WeightsRefusedError as error:
            answer = "refused", str(error)
        except ConfigError as error:
            answer = "config", str(error)
        except EngineError as error:
            answer = "error", str(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent reports it)
            answer = "error", f"The vLLM engine failed at '{command}': {error}\n{traceback.format_exc()}"
        connection.send(answer)


def end_with(parent: int) -> None:
    """End this process and all of its own as soon as the parent is gone, whatever this process is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    end_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads and exit handlers are not waited for
