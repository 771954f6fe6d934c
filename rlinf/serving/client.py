"""Client for openpi's protocol that waits for its server, reconnects, and verifies that the policy has not changed."""

import hashlib
import logging
import math
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from rlinf.errors import ConfigError, PolicyServerError, RejectedRequestError
from rlinf.serving import MANIFESTS, MessageError
from rlinf.serving.codec import decode, encode

logger = logging.getLogger("rlinf")

OPEN_TIMEOUT_S, PING_INTERVAL_S = 10, 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
MESSAGE_TOO_BIG, TRY_AGAIN_LATER = 1009, 1013
GOODBYE_S = 1
"""Maximum wait for the close frame after an error message from the server, in seconds."""
MAX_REPLY = 256 * 2**20
COME_BACK = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses returned by a server, or a proxy in front of it, that is not ready yet."""


class _BusyError(Exception):
    """The server is overloaded and requests a retry."""


class PolicyClient:
    """A connection to a served policy. A request contains all inputs for its reply, so it can be repeated.

    Raises ConfigError for an invalid URL or a rejected key, and PolicyServerError if no server with this protocol responds.

    Args:
        timeout_s: Maximum wait for a reply, for the metadata, and for a server that does not read or is busy.
        connect_timeout_s: Maximum wait for a server at the start and whenever the connection is lost.
        api_key: Sent as ``Authorization: Api-Key <key>`` unless it is None.

    Attributes:
        metadata, digest: The server's first message and its SHA-256, which identifies the served policy.
    """

    def __init__(self, url: str, timeout_s: float, connect_timeout_s: float, api_key: str | None = None) -> None:
        self.url, self.timeout_s, self.connect_timeout_s = url, timeout_s, connect_timeout_s
        self._headers = {MANIFESTS: "true"} | ({} if api_key is None else {"Authorization": f"Api-Key {api_key}"})
        self._connection: ClientConnection | None = None
        self.metadata: dict[str, Any] | None = None
        self.digest = ""
        self._connect(time.monotonic() + connect_timeout_s)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request, reconnecting if needed; raise RejectedRequestError or, on timeout, PolicyServerError."""
        data, deadline, busy_until, wait = encode(dict(request)), None, time.monotonic() + self.timeout_s, FIRST_WAIT_S
        while True:
            try:
                if self._connection is None:
                    self._connect(deadline or time.monotonic() + self.connect_timeout_s)
                self._connection.send(data)
                return self._read(self._connection.recv(timeout=self.timeout_s))
            except _BusyError as error:
                left = busy_until - time.monotonic()
                if left <= 0:
                    problem = f"has been busy for {self.timeout_s:g} s (model.timeout_s): {error}"
                    raise self._late(problem, "use fewer client processes") from None
                time.sleep(min(wait, left))
                wait = min(2 * wait, LONGEST_WAIT_S)
            except TimeoutError:
                self.close()  # a late reply must not be mistaken for the reply to the next request
                raise self._late(f"has not replied within {self.timeout_s:g} s (model.timeout_s)") from None
            except (ConnectionClosed, OSError) as error:
                # Requests have no side effects, so the loop repeats this one on a new connection.
                self.close()
                size, goodbye = f"{len(data) / 2**20:.1f} MiB", getattr(error, "rcvd", None)
                if isinstance(error.__cause__, BlockingIOError | ssl.SSLWantWriteError):
                    within = f"within {self.timeout_s:g} s (model.timeout_s)"
                    raise self._late(f"did not read a request of {size} {within}") from error
                if goodbye is not None and goodbye.code == MESSAGE_TOO_BIG:
                    fix = "Serve with a larger max_message_mib, or set evaluation.num_envs=1"
                    raise PolicyServerError(f"{self.url} does not accept messages of {size}. {fix}") from error
                logger.warning("The connection to %s was lost (%s); waiting to reconnect", self.url, error)
                deadline = deadline or time.monotonic() + self.connect_timeout_s
                self._wait(deadline, FIRST_WAIT_S, error)

    def _late(self, problem: str, other_fix: str = "check the server's log") -> PolicyServerError:
        return PolicyServerError(f"{self.url} {problem}. Set model.timeout_s={10 * self.timeout_s:g}, or {other_fix}")

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close_timeout = 1
            connection.close()

    def _read(self, message: str | bytes) -> dict[str, Any]:
        # In openpi's protocol, a text frame is an error message; the server then closes the connection.
        if isinstance(message, str):
            code = self._end_code()
            self.close()
            if code == TRY_AGAIN_LATER:
                raise _BusyError(message.strip())
            kind = PolicyServerError if message.startswith(TimeoutError.__name__) else RejectedRequestError
            raise kind(f"{self.url} reports: {message.strip()}")
        try:
            reply = decode(message)
        except MessageError as error:
            raise PolicyServerError(f"{self.url} sent an unreadable message: {error}") from error
        if not isinstance(reply, dict):
            kind = type(reply).__name__
            raise PolicyServerError(f"{self.url} sent a {kind}; expected a map, as sent by openpi's servers")
        return reply

    def _end_code(self) -> int | None:
        """Wait for the close frame and return its code, or None if the connection remains open."""
        try:
            self._connection.recv(timeout=GOODBYE_S)
        except ConnectionClosed as closed:
            return None if closed.rcvd is None else closed.rcvd.code
        except TimeoutError:
            pass
        return None

    def _connect(self, deadline: float) -> None:
        """Connect before ``deadline`` (monotonic clock), and compare the server with the previous one."""
        wait = FIRST_WAIT_S
        while True:
            try:
                metadata = self._open()
                break
            except InvalidURI as error:
                fix = "Set e.g. model.url=ws://127.0.0.1:8000"
                raise ConfigError(f"model.url='{self.url}' is not an address. {fix}") from error
            except InvalidStatus as error:
                status = error.response.status_code
                if status in (401, 403):
                    fix = "Set model.api_key_env=<variable with the server's key>"
                    raise ConfigError(f"{self.url} rejects the key (status {status}). {fix}") from error
                if status not in COME_BACK:
                    fix = "expected a policy. Set model.url=<address and path of a server>"
                    raise ConfigError(f"{self.url} replies with status {status}; {fix}") from error
                failure: Exception = error
            except (OSError, WebSocketException, _BusyError) as error:
                failure = error
            self._wait(deadline, wait, failure)
            wait = min(2 * wait, LONGEST_WAIT_S)
        # A policy is identified only by its metadata, because a proxy or a restart may move it to a different machine.
        digest = hashlib.sha256(encode(metadata)).hexdigest()
        if self.metadata is not None and digest != self.digest:
            self.close()
            before, now = _name(self.metadata), _name(metadata)
            if before == now:
                now += f" with a different {_differing(self.metadata, metadata)}"
            raise PolicyServerError(
                f"{self.url} serves a different policy than before: {now} instead of {before}; their episodes cannot be combined. "
                "Serve the first policy again, or restart the evaluation with output_dir=<a different folder>"
            )
        self.metadata, self.digest = metadata, digest

    def _open(self) -> dict[str, Any]:
        self._connection = connect(
            self.url,
            additional_headers=self._headers,
            compression=None,
            max_size=MAX_REPLY,
            proxy=None,  # a system-wide web proxy must not receive observations
            open_timeout=OPEN_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            ping_timeout=self.timeout_s,  # some servers do not respond to pings while they compute
        )
        seconds = math.floor(self.timeout_s)
        limit = struct.pack("ll", seconds, int(1e6 * (self.timeout_s - seconds)))
        # websockets has no timeout for sending, so set one on the socket (a timeval).
        self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            return self._read(self._connection.recv(timeout=self.timeout_s))
        except TimeoutError:
            self.close()
            raise PolicyServerError(
                f"{self.url} accepted the connection but did not send a message within {self.timeout_s:g} s (model.timeout_s); expected "
                "openpi's protocol, in which the server sends the first message. Set model.url=<address of a policy>"
            ) from None
        except ConnectionClosed:
            self.close()
            raise

    def _wait(self, deadline: float, seconds: float, error: Exception) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PolicyServerError(
                f"No policy is available at {self.url} after {self.connect_timeout_s:g} s (model.connect_timeout_s): {error}. "
                "Start it with rlinf serve checkpoint=<folder>, or set model.url=<its address>"
            ) from error
        time.sleep(min(seconds, left))


def _name(metadata: Mapping[str, Any]) -> str:
    facts = metadata.get("rlinf")
    return f"manifest {facts['digest']}" if isinstance(facts, dict) and "digest" in facts else str(dict(metadata))[:200]


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = (data.get("rlinf") if isinstance(data.get("rlinf"), dict) else data for data in (before, now))
    return ", ".join(sorted(name for name in {**old, **new} if encode(old.get(name)) != encode(new.get(name))))
