"""The five messages of vla-eval's protocol, version 1, from the model server's side.

Benchmarks request one action at a time, so the server queues each chunk's actions per connection.
"""

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
    """Contents of the server's hello message, and the number of actions executed per chunk (``execute``).

    If ``reads_state``, benchmarks must send a state; if ``num_cameras`` is at least 2, also the wrist camera's image.
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
    """One connection. For each message, call ``read``, then ``take`` if a new chunk is needed, then ``reply``."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self._queue: deque[np.ndarray] = deque()
        self._reply: tuple[str, dict[str, Any]] | None = None
        self._acts = False
        self._seq = 0

    def read(self, message: Any) -> tuple[int, dict[str, Any] | None]:
        """Read a message; return its number, and a policy request if a new chunk is needed. Raise MessageError if malformed."""
        self._reply, self._acts, self._seq = None, False, 0
        if not isinstance(message, dict) or any(name not in message for name in FIELDS):
            raise MessageError(f"The message is not a map with {', '.join(FIELDS)}")
        kind, payload, seq = message["type"], message["payload"], message["seq"]
        if not isinstance(payload, dict) or not isinstance(seq, int):
            raise MessageError(
                f"The payload is of type {type(payload).__name__} and seq of type {type(seq).__name__}; expected a map and a number"
            )
        self._seq = seq
        if kind == "hello":
            if payload.get("protocol_version") != VERSION:
                raise MessageError(f"protocol_version is {payload.get('protocol_version')}; expected {VERSION}")
            self._reply = "hello", self.hello.payload(str(payload.get("harness_version", "")))
        elif kind in ("episode_start", "episode_end"):
            self._queue.clear()
        elif kind == "observation":
            self._acts = True
            if not self._queue:
                return seq, request_of(payload)
        else:
            raise MessageError(f"The type is {kind!r}; expected hello, episode_start, observation or episode_end")
        return seq, None

    def take(self, chunk: np.ndarray) -> None:
        """Queue the first actions of a chunk ``[C, D]``."""
        self._queue.extend(chunk[: self.hello.execute])

    def reply(self, seq: int) -> bytes | None:
        """Return the reply to the last message, or None if it needs none."""
        if self._acts:
            self._reply = "action", {"actions": self._queue.popleft()}
        return None if self._reply is None else _message(*self._reply, seq)

    def failed(self, error: object) -> bytes:
        """Return the reply to a failed message and discard the queued actions."""
        self._queue.clear()
        return _message("error", {"error": f"observation_failed: {error}"}, self._seq)


def request_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of a vla-eval observation to rlinf's: ``images``, ``state``, ``prompt``."""
    state = payload.get("states", payload.get("state"))
    return {
        "images": payload.get("images"),
        "prompt": payload.get("task_description"),
        **({} if state is None else {"state": state}),
    }


def _message(kind: str, payload: Mapping[str, Any], seq: int) -> bytes:
    return encode_named({"type": kind, "payload": dict(payload), "seq": seq, "timestamp": time.time()})
