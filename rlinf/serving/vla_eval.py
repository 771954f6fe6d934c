"""The five messages of vla-eval, protocol version 1, as its model servers speak them.

Its benchmarks ask for one action at a time, so a chunk is handed out by the server: one queue for each connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.serving import MessageError
from rlinf.serving.codec import encode_named

PATH = "/vla-eval"
VERSION = 1
FIELDS = ("type", "payload", "seq", "timestamp")


@dataclass(frozen=True)
class Hello:
    """What a client is told first, and how many actions of a chunk it executes.

    Attributes:
        name: Of the policy; results of vla-eval keep it.
        reads_state: Benchmarks are asked to send a state.
        num_cameras: Benchmarks with a wrist camera are asked to send it where there are two or more.
        execute: Actions of a chunk until the policy is asked again.
    """

    name: str
    action_dim: int
    reads_state: bool
    num_cameras: int
    execute: int

    def payload(self, version: str) -> dict[str, Any]:
        """Return the payload of the server's hello; ``version`` is the client's harness version."""
        parameters = {"send_wrist_image": self.num_cameras > 1, "send_state": self.reads_state}
        return {
            "harness_version": version,
            "protocol_version": VERSION,
            "model_server": self.name,
            "capabilities": {},
            "observation_params": parameters,
            "action_spec": {"action": {"name": "action", "dims": self.action_dim, "format": "raw"}},
            "observation_spec": {"image": {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"}},
        }


class ClientSession:
    """One connection; the caller asks the policy in between: ``read``, perhaps ``take``, then ``reply``."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self._queue: deque[np.ndarray] = deque()
        self._answer: tuple[str, dict[str, Any]] | None = None
        self._acts = False
        self._seq = 0

    def read(self, message: Any) -> tuple[int, dict[str, Any] | None]:
        """Take a message; return its number, and the request to the policy if a new chunk is needed.

        Raise MessageError if it breaks the protocol.
        """
        self._answer, self._acts, self._seq = None, False, 0
        if not isinstance(message, dict) or any(name not in message for name in FIELDS):
            raise MessageError(f"The message is not a map with {', '.join(FIELDS)}")
        kind, payload, seq = message["type"], message["payload"], message["seq"]
        if not isinstance(payload, dict) or not isinstance(seq, int):
            raise MessageError(
                f"The payload is a {type(payload).__name__} and seq a {type(seq).__name__}; required: a map, a number"
            )
        self._seq = seq
        if kind == "hello":
            if payload.get("protocol_version") != VERSION:
                raise MessageError(f"protocol_version is {payload.get('protocol_version')}; required: {VERSION}")
            self._answer = "hello", self.hello.payload(str(payload.get("harness_version", "")))
        elif kind in ("episode_start", "episode_end"):
            self._queue.clear()
        elif kind == "observation":
            self._acts = True
            if not self._queue:
                return seq, request_of(payload)
        else:
            raise MessageError(f"The type is {kind!r}; required: hello, episode_start, observation or episode_end")
        return seq, None

    def take(self, chunk: np.ndarray) -> None:
        """Queue the first actions of a chunk ``[C, D]``."""
        self._queue.extend(chunk[: self.hello.execute])

    def reply(self, seq: int) -> bytes | None:
        """Return the answer to the message that was read last, or None if it has none."""
        if self._acts:
            self._answer = "action", {"actions": self._queue.popleft()}
        return None if self._answer is None else _message(*self._answer, seq)

    def failed(self, error: object) -> bytes:
        """Return the answer to a message that failed, and drop the queued actions."""
        self._queue.clear()
        return _message("error", {"error": f"observation_failed: {error}"}, self._seq)


def request_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return an observation of vla-eval under our own keys: ``images``, ``state``, ``prompt``."""
    state = payload.get("states", payload.get("state"))
    return {
        "images": payload.get("images"),
        "prompt": payload.get("task_description"),
        **({} if state is None else {"state": state}),
    }


def _message(kind: str, payload: Mapping[str, Any], seq: int) -> bytes:
    return encode_named({"type": kind, "payload": dict(payload), "seq": seq, "timestamp": time.time()})
