"""A policy behind a WebSocket: openpi's protocol at ``/``, vla-eval's at ``/vla-eval``, health at ``/healthz``."""

from __future__ import annotations

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
"""Key of a request that holds a list of requests; the reply has an axis of them before the others."""

PING_INTERVAL_S, PONG_TIMEOUT_S = 20, 120
"""A client that computes for a while answers no ping, so the limit is long."""
TRY_AGAIN_LATER = 1013
GOING_AWAY, INTERNAL_ERROR = 1001, 1011
IDLE_S = 60
"""A client that has asked nothing for so long makes room for another one, where ``max_clients`` are connected."""


@dataclass
class Limits:
    """What a client may ask for, see ``ServeConfig``."""

    max_batch: int
    batch_wait_s: float
    max_message: int
    max_prompt: int
    max_clients: int
    infer_timeout_s: float


@dataclass
class PolicyServer:
    """Answers requests of any number of clients.

    Args:
        read: A request as arrays and text -> the row of it, checked; raises ``MessageError`` or ``RLinfError``. Runs in any thread.
        read_named: The same for ``/vla-eval``, where each image has a name, and no robot's keys.
        act: Rows -> float32 ``[C, D]`` for each, or the exception that rejects it. Runs in a thread of its own, so that a long call
            delays nothing but actions.
        metadata: What a client is told first: plain values.
        chunks: How ``/vla-eval`` reads requests, and what it is told first.
        api_key: What clients must send as ``Authorization: Api-Key <key>``; None: nothing.
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
        """Serve until ``stop`` is set; then answer what has been asked, and return.

        Args:
            bound: A socket with its address, which nobody listens to yet, so that clients wait while a policy loads.
            on_listening: Called when clients can connect.
            stop: Set in the running loop.
        """
        self.batcher = Batcher(
            self.act, self.limits.max_batch, self.limits.batch_wait_s, num_clients=lambda: max(1, len(self._idle_since))
        )
        async with serve(
            self._connection,
            sock=bound,
            process_request=self._accepted,
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
        """Accept nobody else, let those who wait have their answers, and say goodbye."""
        self._closing = True
        server.close(close_connections=False)
        idle = [connection for connection, since in self._idle_since.items() if since is not None]
        await asyncio.gather(*(connection.close(GOING_AWAY) for connection in idle))
        await server.wait_closed()

    def _accepted(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer all but the WebSocket of a client that may ask; None: continue."""
        path = request.path.partition("?")[0]
        if path in HEALTH:
            text = "OK\n" if path == HEALTH[0] else json.dumps({"status": "ok"})
            return connection.respond(http.HTTPStatus.OK, text)
        if path not in ("/", vla_eval.PATH):
            places = f"/ (openpi), {vla_eval.PATH}, {HEALTH[0]}"
            return connection.respond(http.HTTPStatus.NOT_FOUND, f"{path} is unknown; there are {places}\n")
        if "Origin" in request.headers:  # which only browsers send
            return connection.respond(http.HTTPStatus.FORBIDDEN, "pages of a browser may not ask\n")
        if self.api_key is not None:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Api-Key {self.api_key}".encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "required: Authorization: Api-Key <key>\n")
        if len(self._idle_since) >= self.limits.max_clients and not self._make_room():
            text = f"{self.limits.max_clients} clients are connected (max_clients)\n"
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _make_room(self) -> bool:
        """Say goodbye to the client that has asked nothing for longest; return whether there is one that may go.

        A client of vla-eval stays: it counts an episode whose connection is closed as failed.
        """
        idle = {
            connection: since
            for connection, since in self._idle_since.items()
            if since is not None and connection.request.path.partition("?")[0] != vla_eval.PATH
        }
        longest = min(idle, key=idle.__getitem__, default=None)
        if longest is None or time.monotonic() - idle[longest] < IDLE_S:
            return False
        del self._idle_since[longest]
        goodbye = asyncio.ensure_future(longest.close(GOING_AWAY, "idle, and another client came"))
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
            self.batcher.wake()  # all who are left may have asked

    async def _messages(self, connection: ServerConnection) -> AsyncIterator[Any]:
        """Yield what a client asks, until it has made room for another one: what it still sends is not read."""
        async for message in connection:
            if connection not in self._idle_since:
                return
            self._idle_since[connection] = None
            yield message

    async def _speak_openpi(self, connection: ServerConnection) -> None:
        """Send the metadata, then one reply for each request; an error is a text, after which the connection ends."""
        left_out = () if MANIFESTS in connection.request.headers else ("manifest", "present")
        told = {name: value for name, value in self.metadata.get("rlinf", {}).items() if name not in left_out}
        await connection.send(encode({**self.metadata, "rlinf": told}))
        previous_s = None
        async for message in self._messages(connection):
            start = time.monotonic()
            try:
                reply = await self._reply(message)
            except BusyError as error:
                await connection.send(f"The server is busy: {error}")
                await connection.close(TRY_AGAIN_LATER)
                return
            except Exception as error:  # noqa: BLE001 whatever a policy raises goes to who asked
                await connection.send(self._told(error))
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
        rows, is_batch = await asyncio.to_thread(self._rows, message)
        actions, seconds = await self._act(rows)
        timing = {"infer_ms": 1000 * seconds}
        answer = np.stack(actions) if is_batch else actions[0]
        return {"actions": answer, "server_timing": dict(timing), "policy_timing": timing}

    def _rows(self, message: Any) -> tuple[list[Any], bool]:
        """Return the rows of a message, and whether it is a list of requests."""
        request = decode(message, self.limits.max_prompt)
        if not isinstance(request, dict):
            raise MessageError(f"The request is a {type(request).__name__}; required: a map")
        requests = request[BATCH] if BATCH in request else [request]
        if not isinstance(requests, list) or not requests or not all(isinstance(one, dict) for one in requests):
            raise MessageError(f"{BATCH} is not a list of requests")
        if len(requests) > self.batcher.most_rows:
            raise MessageError(f"{BATCH} has {len(requests)} requests; required: at most {self.batcher.most_rows}")
        return [self.read(one) for one in requests], BATCH in request

    async def _act(self, rows: Sequence[Any], *, waits: bool = False) -> tuple[list[np.ndarray], float]:
        """Return a chunk for each row, and the seconds from the question to the answer."""
        start = time.monotonic()
        try:
            actions = await self.batcher.ask(rows, self.limits.infer_timeout_s, waits=waits)
        except TimeoutError:
            limit = f"infer_timeout_s={self.limits.infer_timeout_s:g}"
            raise TimeoutError(f"there was no action in time ({limit} of the server)") from None
        return actions, time.monotonic() - start

    async def _speak_vla_eval(self, connection: ServerConnection) -> None:
        """Answer each observation with one action of a chunk; an error leaves the connection open.

        vla-eval counts the episode of an error, and of a connection that is closed, as failed. So nobody is told that the server is
        busy: a client has one observation under way, and ``max_clients`` bounds how many there are.
        """
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
            except Exception as error:  # noqa: BLE001 whatever a policy raises goes to who asked
                reply = session.failed(self._told(error))
            if reply is not None:
                await connection.send(reply)
            self._idle_since[connection] = time.monotonic()
            if self._closing:
                await connection.close(GOING_AWAY)
                return

    def _told(self, error: Exception) -> str:
        """Return what a client is told of an error; the traceback of what nobody expected is logged here."""
        if not isinstance(error, MessageError | RLinfError | TimeoutError):
            logger.error("A request failed", exc_info=error)
        return f"{type(error).__name__}: {error}"
