"""A Ray cluster that is lost, or that asks for a token, is one clear error."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rlinf.distributed.ray import cluster as ray_cluster
from rlinf.distributed.ray import watch as ray_watch
from rlinf.errors import ConfigError, RankError

grpc = pytest.importorskip("grpc", reason="not installed: grpcio; extra 'ray'")


class LostError(Exception):
    """Of Ray."""


@contextmanager
def listening():
    """Yield the address of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def ray_of(head: str, daemon: str) -> SimpleNamespace:
    """Return a stand-in for the module ``ray`` in a process that is connected to a cluster; its head answers once."""
    host, _, port = daemon.rpartition(":")
    found = [[{"NodeID": "a", "NodeManagerAddress": host, "NodeManagerPort": port}]]

    def nodes():
        if not found:
            raise LostError
        return found.pop()

    context = SimpleNamespace(get_node_id=lambda: "a", gcs_address=head)
    return SimpleNamespace(
        get_runtime_context=lambda: context, nodes=nodes, exceptions=SimpleNamespace(RayError=LostError)
    )


def closed_address() -> str:
    with listening() as address:
        return address


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("daemon", r"Ray's daemon on this machine \(raylet at 127.* has ended.*rlinf train resume="),
        ("head", "The head of the Ray cluster at 127.* has ended.*resume=.*RAY_gcs_rpc_server_reconnect_timeout_s=120"),
        (None, "Broken pipe"),
        ("user", "what the user can mend"),
    ],
)
def test_an_error_that_follows_from_a_lost_cluster_is_told_as_what_it_is(lost, message):
    error, expected = {
        "user": (ConfigError("what the user can mend"), ConfigError),
        None: (OSError("Broken pipe"), OSError),
    }.get(lost, (OSError("Broken pipe"), RankError))
    with listening() as here:
        gone = closed_address()
        ray = ray_of(gone if lost in ("head", "user") else here, gone if lost == "daemon" else here)
        with pytest.raises(expected, match=message), ray_watch.watched(ray):
            raise error


@pytest.mark.parametrize("answers", [False, True])
def test_a_head_that_is_silent_ends_the_process_with_its_name_and_the_way_on(monkeypatch, capsys, answers):
    monkeypatch.setattr(ray_watch, "POLL_S", 0.01)
    ended = threading.Event()
    monkeypatch.setattr(ray_watch.os, "_exit", lambda status: (ended.status.append(status), ended.set(), watch.end()))
    ended.status = []
    ray = ray_of("head.example:6379", "127.0.0.1:1")
    watch = ray_watch.ClusterWatch(ray)
    watch.limit_s = 0.3
    if answers:
        ray.nodes = list
    watch.start()
    assert ended.wait(1.0 if answers else 60.0) != answers
    watch.end()
    text = capsys.readouterr().err
    assert ended.status == ([] if answers else [1])
    assert ("RankError: The head of the Ray cluster at head.example:6379 has not replied for 0.3 s" in text) != answers


class Head(grpc.GenericRpcHandler):
    """Answers as the head of a cluster: to everybody, or to those with a token."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def service(self, call):
        def answer(_request, context):
            if self.token not in (
                None,
                dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer "),
            ):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b"id"

        assert call.method == "/ray.rpc.NodeInfoGcsService/GetClusterId"
        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def head(token: str | None):
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Head(token)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("asked", "mode", "token", "message"),
    [
        ("secret", None, None, "requires a token, but RAY_AUTH_MODE is ''.*RAY_AUTH_MODE=token RAY_ADDRESS=127"),
        ("secret", "token", "other", "rejected this machine.s token. Copy ~/.ray/auth_token"),
        ("secret", "token", None, "but .*auth_token does not exist. Copy that file .* or unset RAY_AUTH_MODE"),
        ("secret", "token", "secret", None),
        ("secret", "token", "file", None),
        (None, None, None, None),
        (None, "token", "any", None),
    ],
)
def test_a_cluster_that_asks_for_a_token_is_one_error_with_the_line_to_type(
    monkeypatch, tmp_path, asked, mode, token, message
):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if token == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret\n")
    elif token is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with head(asked) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        if message is None:
            assert ray_cluster.check_address("workers") == address
            return
        with pytest.raises(ConfigError, match=message):
            ray_cluster.check_address("workers")
