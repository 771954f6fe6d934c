"""A policy server in a thread of this process."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlinf.serving.server import PolicyServer


@contextmanager
def in_a_thread(
    server: PolicyServer, before_the_end: Callable[[], None] = lambda: None, port: int = 0
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Serve; yield the port and a function that stops the server."""
    bound = socket.create_server(("127.0.0.1", port))
    ready, handles = threading.Event(), {}

    async def run() -> None:
        handles["loop"], handles["stop"] = asyncio.get_running_loop(), asyncio.Event()
        await server.run(bound, ready.set, handles["stop"])

    def stop() -> None:
        handles["loop"].call_soon_threadsafe(handles["stop"].set)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(60)
        yield bound.getsockname()[1], stop
    finally:
        before_the_end()
        if thread.is_alive():
            stop()
        thread.join(60)
        assert not thread.is_alive()
