"""WebSocket server for a policy: openpi's protocol at ``/``, vla-eval's at ``/vla-eval``, health checks at ``/healthz``."""

import asyncio
import hmac
import http
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from rlinf.errors import RLinfError
from rlinf.serving import MANIFESTS, MessageError, vla_eval
from rlinf.serving.batcher import Batcher, BusyError
from rlinf.serving.codec import decode, encode

logger = logging.getLogger("rlinf")

HEALTH = ("/healthz", "/health")
BATCH = "rlinf/batch"
"""Key of a request that contains a list of requests; the reply's actions then have a leading batch axis."""

PING_INTERVAL_S, PONG_TIMEOUT_S = 20, 120
"""The limit is long, because a client does not respond to pings while it computes."""
TRY_AGAIN_LATER = 1013
GOING_AWAY, INTERNAL_ERROR = 1001, 1011
IDLE_S = 60
"""Seconds without a request after which a client may be disconnected, when ``max_clients`` are connected and a new one arrives."""


@dataclass
class Limits:
    """Limits on requests; see ``ServeConfig``."""

    max_batch: int
    batch_wait_s: float
    max_message: int
    max_prompt: int
    max_clients: int
    infer_timeout_s: float


@dataclass
class PolicyServer:
    """Serves a policy to any number of clients.

    Args:
        read: Converts a request (arrays and text) to a checked row; raises ``MessageError`` or ``RLinfError``. Runs in any thread.
        read_named: Like ``read``, but for ``/vla-eval``, where images have names and robots' keys are not used.
        act: Converts each row to float32 ``[C, D]``, or an exception that rejects the row. Runs in a separate thread, so a long
            call delays only actions.
        metadata: First message to a client, containing plain values.
        chunks: Settings and first message for ``/vla-eval``.
        api_key: Key required as ``Authorization: Api-Key <key>``, or None if no key is required.
    """

    read: Callable[[Mapping[str, Any]], Any]
    read_named: Callable[[Mapping[str, Any]], Any]
    act: Callable[[list[Any]], Sequence[np.ndarray | Exception]]
    metadata: Mapping[str, Any]
    limits: Limits
    chunks: vla_eval.Hello
    api_key: str | None = None
    _idle_since: dict[ServerConnection, float | None] = field(default_factory=dict)
    _goodbyes: set[asyncio.Future] = field(default_factory=set)
    _closing: bool = False

    async def run(self, bound: socket.socket, on_listening: Callable[[], None], stop: asyncio.Event) -> None:
        """Serve on a bound socket until ``stop``, then finish pending requests. ``on_listening`` is called once clients can connect."""
        self.batcher = Batcher(
            self.act, self.limits.max_batch, self.limits.batch_wait_s, num_clients=lambda: max(1, len(self._idle_since))
        )
        # The socket is bound early but starts listening only now, so that clients wait while a policy loads.
        async with serve(
            self._connection,
            sock=bound,
            process_request=self._accepted,
            # Images hardly compress, and deflate would cost milliseconds per request.
            compression=None,
            max_size=self.limits.max_message,
            max_queue=2,
            ping_interval=PING_INTERVAL_S,
            ping_timeout=PONG_TIMEOUT_S,
            server_header=None,
        ) as server:
            on_listening()
            await stop.wait()
            await self._drain(server)
        await self.batcher.close()

    async def _drain(self, server: Server) -> None:
        """Stop accepting connections, complete pending requests, and close."""
        self._closing = True
        server.close(close_connections=False)
        # Connections with a pending request are closed after their reply; see `_speak_openpi`.
        idle = [connection for connection, since in self._idle_since.items() if since is not None]
        await asyncio.gather(*(connection.close(GOING_AWAY) for connection in idle))
        await server.wait_closed()

    def _accepted(self, connection: ServerConnection, request: Request) -> Response | None:
        """Respond to all requests except permitted WebSocket handshakes, for which None continues the handshake."""
        path = request.path.partition("?")[0]
        if path in HEALTH:
            text = "OK\n" if path == HEALTH[0] else json.dumps({"status": "ok"})
            return connection.respond(http.HTTPStatus.OK, text)
        if path not in ("/", vla_eval.PATH):
            places = f"/ (openpi), {vla_eval.PATH}, {HEALTH[0]}"
            return connection.respond(http.HTTPStatus.NOT_FOUND, f"{path} is unknown; available: {places}\n")
        if "Origin" in request.headers:  # only browsers send this header; a web page must not control a robot
            return connection.respond(http.HTTPStatus.FORBIDDEN, "requests from web pages are not allowed\n")
        if self.api_key is not None:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Api-Key {self.api_key}".encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "required: Authorization: Api-Key <key>\n")
        if len(self._idle_since) >= self.limits.max_clients and not self._disconnect_idle():
            text = f"{self.limits.max_clients} clients are connected (max_clients)\n"
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _disconnect_idle(self) -> bool:
        """Disconnect the longest-idle client; return whether there was one. Spare vla-eval, where the episode would count as failed."""
        idle = {
            connection: since
            for connection, since in self._idle_since.items()
            if since is not None and connection.request.path.partition("?")[0] != vla_eval.PATH
        }
        longest = min(idle, key=idle.__getitem__, default=None)
        if longest is None or time.monotonic() - idle[longest] < IDLE_S:
            return False
        del self._idle_since[longest]
        # Stored in a set, because the event loop holds only weak references to tasks.
        goodbye = asyncio.ensure_future(longest.close(GOING_AWAY, "idle, and a new client needs the connection"))
        self._goodbyes.add(goodbye)
        goodbye.add_done_callback(self._goodbyes.discard)
        return True

    async def _connection(self, connection: ServerConnection) -> None:
        self._idle_since[connection] = time.monotonic()
        try:
            if connection.request.path.partition("?")[0] == vla_eval.PATH:
                await self._speak_vla_eval(connection)
            else:
                await self._speak_openpi(connection)
        except ConnectionClosed:
            pass
        finally:
            self._idle_since.pop(connection, None)
            self.batcher.wake()  # the remaining clients may all have pending requests

    async def _messages(self, connection: ServerConnection) -> AsyncIterator[Any]:
        """Yield a client's requests until it is disconnected as idle; later requests are not read."""
        async for message in connection:
            if connection not in self._idle_since:
                return
            self._idle_since[connection] = None
            yield message

    async def _speak_openpi(self, connection: ServerConnection) -> None:
        """Send the metadata, then one reply per request. An error is sent as a text frame, after which the connection is closed."""
        left_out = () if MANIFESTS in connection.request.headers else ("manifest", "present")
        facts = {name: value for name, value in self.metadata.get("rlinf", {}).items() if name not in left_out}
        await connection.send(encode({**self.metadata, "rlinf": facts}))
        previous_s = None
        async for message in self._messages(connection):
            start = time.monotonic()
            try:
                reply = await self._reply(message)
            except BusyError as error:
                await connection.send(f"The server is busy: {error}")
                await connection.close(TRY_AGAIN_LATER)
                return
            except Exception as error:  # noqa: BLE001 sent to the client
                await connection.send(self._error_text(error))
                await connection.close(INTERNAL_ERROR)
                return
            if previous_s is not None:
                reply["server_timing"]["prev_total_ms"] = 1000 * previous_s
            await connection.send(encode(reply))
            self._idle_since[connection] = time.monotonic()
            previous_s = self._idle_since[connection] - start
            if self._closing:
                await connection.close(GOING_AWAY)
                return

    async def _reply(self, message: Any) -> dict[str, Any]:
        # Decode in a thread, because this may take milliseconds during which other clients must be served.
        rows, is_batch = await asyncio.to_thread(self._rows, message)
        actions, seconds = await self._act(rows)
        timing = {"infer_ms": 1000 * seconds}
        # openpi's clients expect no batch axis unless they have sent a list.
        result = np.stack(actions) if is_batch else actions[0]
        return {"actions": result, "server_timing": dict(timing), "policy_timing": timing}

    def _rows(self, message: Any) -> tuple[list[Any], bool]:
        request = decode(message, self.limits.max_prompt)
        if not isinstance(request, dict):
            raise MessageError(f"The request is a {type(request).__name__}; expected a map")
        requests = request[BATCH] if BATCH in request else [request]
        if not isinstance(requests, list) or not requests or not all(isinstance(item, dict) for item in requests):
            raise MessageError(f"{BATCH} is not a list of requests")
        if len(requests) > self.batcher.most_rows:
            raise MessageError(f"{BATCH} has {len(requests)} requests; expected at most {self.batcher.most_rows}")
        return [self.read(item) for item in requests], BATCH in request

    async def _act(self, rows: Sequence[Any], *, waits: bool = False) -> tuple[list[np.ndarray], float]:
        start = time.monotonic()
        try:
            actions = await self.batcher.submit(rows, self.limits.infer_timeout_s, waits=waits)
        except TimeoutError:
            limit = f"infer_timeout_s={self.limits.infer_timeout_s:g}"
            raise TimeoutError(f"no action was ready in time (the server's {limit})") from None
        return actions, time.monotonic() - start

    async def _speak_vla_eval(self, connection: ServerConnection) -> None:
        """Reply to each observation with one action of a chunk; the connection remains open after an error."""
        # vla-eval treats an episode with an error as failed, so a busy server rejects no requests; `max_clients` bounds the queue.
        session = vla_eval.ClientSession(self.chunks)
        async for message in self._messages(connection):
            try:
                seq, request = session.read(await asyncio.to_thread(decode, message, self.limits.max_prompt))
                if request is not None:
                    row = await asyncio.to_thread(self.read_named, request)
                    actions, _ = await self._act([row], waits=True)
                    session.take(actions[0])
                reply = session.reply(seq)
            except MessageError as error:
                reply = session.failed(error)
            except Exception as error:  # noqa: BLE001 sent to the client
                reply = session.failed(self._error_text(error))
            if reply is not None:
                await connection.send(reply)
            self._idle_since[connection] = time.monotonic()
            if self._closing:
                await connection.close(GOING_AWAY)
                return

    def _error_text(self, error: Exception) -> str:
        """Return the error text for a client; log the traceback of an unexpected error."""
        if not isinstance(error, MessageError | RLinfError | TimeoutError):
            logger.error("A request failed", exc_info=error)
        return f"{type(error).__name__}: {error}"
