"""The client of a policy server: what it does if the server is busy, reads nothing, or has arrays in its metadata."""

import base64
import hashlib
import re
import socket
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.sync.server import serve

from rlinf.errors import PolicyServerError
from rlinf.serving.client import PolicyClient
from rlinf.serving.codec import encode

REPLY = encode({"actions": np.ones(2)})


@contextmanager
def serving(handle):
    """Call ``handle(connection, number)`` for each connection; yield the URL."""
    numbers = iter(range(1000))
    with serve(lambda connection: handle(connection, next(numbers)), "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(30)


def busy_until(first_free):
    """A server that has too much to do for its first connections, and says so as ours does."""

    def handle(connection, number):
        connection.send(encode({}))
        for _ in connection:
            if number >= first_free:
                connection.send(REPLY)
            else:
                connection.send("The server is busy: 16 observations or more are pending")
                connection.close(1013)

    return handle


def test_a_busy_server_is_asked_again_until_it_answers_and_named_in_time_if_it_stays_busy():
    with serving(busy_until(2)) as url:
        client = PolicyClient(url, 60, 60)
        assert client.ask({})["actions"].tolist() == [1, 1]
        client.close()
    said = r"busy for 0.3 s \(model.timeout_s\): .*Set model.timeout_s=3"
    with serving(busy_until(1000)) as url, pytest.raises(PolicyServerError, match=f"{url} .*{said}"):
        PolicyClient(url, 0.3, 60).ask({})


def test_metadata_with_arrays_are_compared():
    def handle(connection, number):
        connection.send(encode({"pose": np.zeros(2) if number < 2 else np.ones(2)}))
        for _ in connection:
            connection.send(REPLY)
            connection.close()

    with serving(handle) as url:
        client = PolicyClient(url, 60, 60)
        client.ask({}), client.ask({})
        said = r"a different policy than before.*\[1\., 1\.\].* instead of .*\[0\., 0\.\]"
        with pytest.raises(PolicyServerError, match=said):
            client.ask({})


def test_a_server_that_stops_reading_is_not_waited_for_for_ever():
    """The request is larger than what the system keeps for both sides."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            connection, _ = listening.accept()
            key = re.search(rb"Sec-WebSocket-Key: (\S+)", connection.recv(4096))[1]
            proof = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            connection.sendall(head + proof + b"\r\n\r\n" + b"\x82\x01\x80")  # then one frame: an empty map
            done.wait(60)
            connection.close()

        done = threading.Event()
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            client = PolicyClient(f"ws://127.0.0.1:{listening.getsockname()[1]}", 0.5, 60)
            with pytest.raises(PolicyServerError, match=r"did not read a request of 64.0 MiB within 0.5 s"):
                client.ask({"image": np.zeros(64 * 2**20, np.uint8)})
        finally:
            done.set()
            thread.join(60)
