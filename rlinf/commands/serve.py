"""Policy server: opens a checkpoint as an evaluation does, then serves actions over the network."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rlinf.commands.open_checkpoint import Opened, open_local
from rlinf.commands.serve_config import ServeConfig
from rlinf.config.saved_code import env_overrides
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs import ENVS
from rlinf.errors import ConfigError, reject
from rlinf.evaluation.evaluator import act_for_rows
from rlinf.files import Json
from rlinf.models.embodiment.modules.ranges import GARBAGE
from rlinf.models.precision import autocast, evaluation_mode
from rlinf.options import override_text
from rlinf.policy import Policy
from rlinf.seeding import seed_everything
from rlinf.serving import MessageError
from rlinf.serving.layouts import ROBOTS, MessageLayout, check_layout, layout_of
from rlinf.serving.server import BATCH, Limits, PolicyServer
from rlinf.serving.vla_eval import PATH, Hello
from rlinf.types import Observation

logger = logging.getLogger("rlinf")

PROTOCOL = 1
"""Version of rlinf's extensions of openpi's protocol: metadata, batches, random numbers."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class RequestRow:
    """A validated observation, and the uniform random numbers ``[U]`` for sampling its actions (None: greedy)."""

    observation: Observation
    uniforms: np.ndarray | None
    temperature: float


class PolicyRows:
    """Validates requests for a policy, and runs them in batches."""

    def __init__(self, policy: Policy, settings: ServeConfig) -> None:
        self.policy, self.num_rows, self.max_prompt = policy, settings.max_batch, settings.max_prompt_bytes
        names = settings.cameras or policy.cameras
        self.layout, self.named = layout_of(settings.keys, names), layout_of("rlinf", names)
        self.state_dim = ENVS.get(policy.config.env.name).state_width(policy.config.env) or 0
        self.reads_state = policy.model.reads_state(policy.model.config)
        self.state_range = getattr(policy.model, "state_range", None) if self.reads_state else None
        self.num_states = self.num_far = 0

    def read(self, request: Mapping[str, Any]) -> RequestRow:
        """Validate a request in the layout of ``settings.keys``; raise MessageError or ConfigError."""
        return self._row(self.layout, request)

    def read_named(self, request: Mapping[str, Any]) -> RequestRow:
        """Validate a vla-eval request; raise as ``read`` does."""
        return self._row(self.named, request)

    def _row(self, layout: MessageLayout, request: Mapping[str, Any]) -> RequestRow:
        size = self.policy.config.env.image_size
        parts = layout.read(request, self.policy.cameras, self.reads_state, size, self.max_prompt)
        if not isinstance(parts["instruction"], str):
            raise MessageError(f"The prompt is a {type(parts['instruction']).__name__}; expected text")
        prompt = parts["instruction"]
        # `Policy.rows` rejects an empty instruction, but an audit sends one to measure the policy without it.
        rows, _ = self.policy.rows({**parts, "instruction": prompt.strip() or "nothing"})
        rows = replace(rows, instruction=[prompt])
        if self.state_range is not None:
            self._note(rows.state)
        uniforms, temperature = request.get("uniforms"), request.get("temperature", 1.0)
        if uniforms is not None:
            uniforms = np.asarray(uniforms, dtype=np.float32)
            count = self.policy.model.num_uniforms
            if uniforms.shape != (count,) or not ((uniforms > 0) & (uniforms < 1)).all():
                raise MessageError(
                    f"uniforms have the shape {list(uniforms.shape)}; expected [{count}] numbers in (0, 1)"
                )
        if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
            raise MessageError(f"temperature is {temperature!r}; expected a number above 0")
        return RequestRow(rows, uniforms, float(temperature))

    @property
    def largest_message(self) -> int:
        """Size of ``max_batch`` observations in bytes, allowing 64 KiB each in addition to the images."""
        policy = self.policy
        images = len(policy.cameras) * 3 * policy.config.env.image_size**2
        return self.num_rows * (images + 8 * policy.model.num_uniforms + 2**16)

    def act(self, rows: Sequence[RequestRow]) -> list[np.ndarray | Exception]:
        """Return each row's actions, float32 ``[C, D]``, which are independent of the other rows; or an error if its prompt is too long."""
        batches: dict[tuple[bool, float], list[int]] = {}
        results: dict[int, np.ndarray | Exception] = {}
        model = self.policy.model
        for index, row in enumerate(rows):
            # Check each prompt before batching, so that a bad one fails only its own request.
            try:
                model.prompt_lengths(row.observation)
                batches.setdefault((row.uniforms is None, row.temperature), []).append(index)
            except ConfigError as error:
                results[index] = error
        with evaluation_mode(model), autocast(model, self.policy.config.model.precision):
            for (is_greedy, temperature), indices in batches.items():
                observation = Observation.concatenate([rows[index].observation for index in indices])
                uniforms = None if is_greedy else np.stack([rows[index].uniforms for index in indices])
                actions = act_for_rows(model, observation, uniforms, temperature, self.num_rows)
                results |= zip(indices, actions, strict=True)
        return [results[index] for index in range(len(rows))]

    def _note(self, state: np.ndarray) -> None:
        """Count out-of-range states; raise MessageError for values in wrong units."""
        far = bool(self.state_range.far(state)[0])
        self.num_states, self.num_far = self.num_states + 1, self.num_far + far
        if far:
            text, widths = self.state_range.farthest(state)
            # Warn at 1, 2, 4, ... such states; otherwise a robot outside its range would flood the log.
            if self.num_far & (self.num_far - 1) == 0:
                logger.warning("%d of %d states are far beyond the statistics: %s", self.num_far, self.num_states, text)
            if widths > GARBAGE:
                raise MessageError(f"{text} Required: a measurement in the units of the policy's training data")

    def warm_up(self) -> None:
        """Run one call on a black image, because the first call may compile for longer than clients wait."""
        config = self.policy.config.env
        images = {
            name: np.zeros((1, config.image_size, config.image_size, 3), np.uint8) for name in self.policy.cameras
        }
        state = np.zeros((1, self.state_dim), np.float32) if self.state_dim else None
        self.act([RequestRow(Observation(images, state, ["stand still"]), None, 1.0)])


def serve(config: RunConfig, settings: ServeConfig) -> None:
    """Serve a checkpoint or a public model until SIGTERM or Ctrl-C; raise ConfigError for an invalid address or camera names."""
    api_key = _api_key(settings)
    env, cameras = config.env, settings.cameras or config.env.cameras
    if settings.cameras is not None and (settings.keys in ROBOTS or len(cameras) != len(env.cameras)):
        actual = f"cameras={override_text(cameras)} with keys={settings.keys}"
        reject(actual, f"a name for each of {override_text(env.cameras)}, and keys=rlinf", "cameras=null")
    layout = layout_of(settings.keys, cameras)
    check_layout(settings.keys, layout, env.cameras, ENVS.get(env.name).state_width(env), "The policy", "keys=rlinf")
    # Bind first, listen last: an occupied port is reported before the policy loads, and no client connects until it is warm.
    with contextlib.closing(_bound(settings)) as bound:
        set_num_threads(config.cluster.num_threads, 1)
        seed_everything(config.seed)
        opened = open_local(config, config.evaluation.allow_mismatch)
        model = opened.policy.to(resolve_device(config.cluster.device, 1)).eval()
        rows = PolicyRows(Policy(model, config), settings)
        rows.warm_up()
        limits = Limits(
            settings.max_batch,
            settings.batch_wait_ms / 1000,
            settings.max_message_mib * 2**20 if settings.max_message_mib else max(2**23, rows.largest_message),
            settings.max_prompt_bytes,
            settings.max_clients,
            settings.infer_timeout_s,
        )
        chunk = model.action_chunks_len
        hello = Hello(
            f"rlinf {config.model.model_type} {opened.manifest.digest[:12]}",
            model.action_dim,
            rows.reads_state,
            len(rows.policy.cameras),
            min(settings.execute or chunk, chunk),
        )
        metadata = metadata_of(opened, rows, settings)
        server = PolicyServer(rows.read, rows.read_named, rows.act, metadata, limits, hello, api_key)
        try:
            asyncio.run(_until_signal(server, bound, partial(_announce, bound, opened, config)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise _taken(settings, error) from error
    print("stopped by a signal; all pending requests were completed", flush=True)


async def _until_signal(server: PolicyServer, bound: socket.socket, on_listening: Callable[[], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the next server can use the port immediately
    await server.run(bound, on_listening, stop)


def metadata_of(opened: Opened, rows: PolicyRows, settings: ServeConfig) -> Json:
    """Return the metadata that clients receive first, as plain values under one key, so that they do not clash with openpi's keys."""
    policy = rows.policy
    # Ignore the git revision, which changes even if only a comment was edited.
    present = replace(opened.present, git_revision=opened.manifest.git_revision)
    return {
        "rlinf": {
            "protocol": PROTOCOL,
            "manifest": opened.manifest.text(),
            "present": present.text(),
            "digest": opened.manifest.digest,
            "model_type": policy.config.model.model_type,
            "policy_version": opened.manifest.policy_version,
            "action_dim": policy.action_dim,
            "action_chunks_len": policy.action_chunks_len,
            "num_uniforms": policy.model.num_uniforms,
            "keys": settings.keys,
            "cameras": list(policy.cameras),
            "client_cameras": list(settings.cameras or policy.cameras),
            "image_size": policy.config.env.image_size,
            "state_dim": rows.state_dim if rows.reads_state else 0,
            "max_batch": settings.max_batch,
            "batch_key": BATCH,
        }
    }


def _api_key(settings: ServeConfig) -> str | None:
    """Return the key that clients must send; raise ConfigError for a public address without one."""
    name = settings.api_key_env
    if name is None:
        if settings.host not in LOOPBACK:
            actual = f"host={settings.host}, which other machines may reach, without a key"
            reject(actual, "a key", "api_key_env=RLINF_API_KEY and that variable, or host=127.0.0.1 and a tunnel")
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"api_key_env={name}, but this variable is not set. Set export {name}=<a long random text>")
    return key


def _bound(settings: ServeConfig) -> socket.socket:
    """Return a socket that is bound to the address but not listening yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Try without SO_REUSEADDR first: two servers that both set it could bind one address. Only a dead server's port needs it.
    for reuse in (0, 1):
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            bound.bind((settings.host, settings.port))
            return bound
        except OSError as error:
            bound.close()
            failure = error
    raise _taken(settings, failure) from failure


def _taken(settings: ServeConfig, error: OSError) -> ConfigError:
    actual = f"host={settings.host} port={settings.port} cannot be used ({error.strerror or error})"
    return ConfigError(f"{actual}. Set port=0 for any free port, or host=127.0.0.1")


def _announce(bound: socket.socket, opened: Opened, config: RunConfig) -> None:
    """Print the addresses, and the command that evaluates the policy there."""
    host, port = bound.getsockname()[:2]
    at = f"[{host}]" if ":" in host else host
    print(f"serving {opened.folder}, {config.model.model_type}, manifest {opened.manifest.digest[:12]}")
    print(
        f"openpi's protocol at ws://{at}:{port}, vla-eval's at ws://{at}:{port}{PATH}, health at http://{at}:{port}/healthz"
    )
    name = {"127.0.0.1": "127.0.0.1", "0.0.0.0": "<this machine>"}.get(host, at)
    overrides = env_overrides(config)
    if config.evaluation.allow_mismatch:  # the client must accept the same differences
        overrides += f" 'evaluation.allow_mismatch={override_text(config.evaluation.allow_mismatch)}'"
    print(f"evaluate it: rlinf evaluate model=remote model.url=ws://{name}:{port} {overrides}", flush=True)
