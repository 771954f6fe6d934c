"""The policy server with a policy of a few lines: protocols, batches, limits, and clients that break the rules."""

import asyncio
import json
import shlex
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from policy_servers import in_a_thread
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from rlinf.config.compose import compose_config
from rlinf.config.saved_code import env_overrides
from rlinf.config.schema import build_config
from rlinf.serving import MessageError
from rlinf.serving.codec import decode, encode, encode_named
from rlinf.serving.server import BATCH, Limits, PolicyServer
from rlinf.serving.vla_eval import PATH, Hello

CHUNK = np.arange(6, dtype=np.float32).reshape(3, 2)
SLOW = threading.Event()
"""Set: a request that says ``wait`` gets its answer."""


class Numbers:
    """Acts with the request's number plus ``CHUNK``, and remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.num_read = 0

    def read(self, request):
        if "prompt" not in request or request["prompt"] is None:
            raise MessageError("The observation has no prompt")
        if request["prompt"] == "read slowly":
            assert SLOW.wait(60)
        self.num_read += 1
        return request

    def act(self, rows):
        self.batches.append([float(np.sum(row.get("state", 0))) for row in rows])
        for row in rows:
            if row["prompt"] == "wait":
                assert SLOW.wait(60)
            if row["prompt"] == "break":
                raise ZeroDivisionError("a fault of the policy")
        return [CHUNK + number for number in self.batches[-1]]


@contextmanager
def serving(api_key=None, **limits):
    """Serve in a thread; yield the port, the policy and a function that stops the server."""
    policy = Numbers()
    SLOW.clear()
    usual = {"max_batch": 4, "batch_wait_s": 0.2, "max_message": 2**20, "max_prompt": 2**20, "max_clients": 20}
    limited = Limits(**usual | {"infer_timeout_s": 30} | limits)
    hello = Hello("numbers", 2, reads_state=True, num_cameras=1, execute=2)
    metadata = {"rlinf": {"digest": "abc"}}
    server = PolicyServer(policy.read, policy.read, policy.act, metadata, limited, hello, api_key)
    with in_a_thread(server, SLOW.set) as (port, stop):
        yield port, policy, stop


def until(condition) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_client(port, path="/", **arguments):
    return connect(f"ws://127.0.0.1:{port}{path}", compression=None, max_size=None, proxy=None, **arguments)


@contextmanager
def greeted(port, count=1):
    """Clients that have had the metadata; one alone is no list."""
    with ExitStack() as stack:
        clients = [stack.enter_context(open_client(port)) for _ in range(count)]
        for client in clients:
            client.recv(timeout=30)
        yield clients if count > 1 else clients[0]


def tell(client, request) -> None:
    client.send(encode(request))


def hear(client):
    """The next reply, or the text of an error."""
    said = client.recv(timeout=30)
    return said if isinstance(said, str) else decode(said)


def check_acts(client, number=0) -> None:
    """The next reply has the actions for a state of this number."""
    assert np.array_equal(hear(client)["actions"], CHUNK + number)


def check_closed(client, code) -> ConnectionClosed:
    with pytest.raises(ConnectionClosed) as closed:
        client.recv(timeout=30)
    assert closed.value.rcvd.code == code
    return closed.value


def ask(port, request):
    """The reply to a request over a connection of its own."""
    with greeted(port) as client:
        tell(client, request)
        return hear(client)


def health(port, path="/healthz"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def shared():
    """A server for the tests that leave nothing behind."""
    with serving() as (port, policy, _):
        yield port, policy


def test_metadata_come_first_then_a_reply_for_each_request(shared):
    with open_client(shared[0]) as client:
        assert hear(client) == {"rlinf": {"digest": "abc"}}
        for number in (1, 2):
            tell(client, {"prompt": "go", "state": np.float32([number])})
            reply = hear(client)
            assert np.array_equal(reply["actions"], CHUNK + number) and reply["actions"].dtype == np.float32
            assert set(reply) == {"actions", "server_timing", "policy_timing"}
            assert set(reply["server_timing"]) == ({"infer_ms"} if number == 1 else {"infer_ms", "prev_total_ms"})


def test_openpis_client_acts_and_its_broker_hands_out_a_whole_chunk(shared):
    clients = pytest.importorskip(
        "openpi_client.websocket_client_policy",
        reason="pip install --no-deps openpi-client==0.1.2 dm-tree typing_extensions",
    )
    from openpi_client.action_chunk_broker import ActionChunkBroker

    policy = clients.WebsocketClientPolicy("127.0.0.1", shared[0])
    assert policy.get_server_metadata() == {"rlinf": {"digest": "abc"}}
    broker = ActionChunkBroker(policy, action_horizon=len(CHUNK))
    for step in range(2 * len(CHUNK)):
        found = broker.infer({"prompt": "go", "state": np.float32([5, 0])})
        assert found["actions"].tolist() == (CHUNK[step % len(CHUNK)] + 5).tolist()
    with pytest.raises(RuntimeError, match="no prompt"):
        policy.infer({"state": 1.0})
    other = clients.WebsocketClientPolicy(f"ws://127.0.0.1:{shared[0]}/")
    assert other.infer({"prompt": "go"})["actions"].shape == CHUNK.shape, "the server continues"


def test_a_list_of_requests_is_answered_together(shared):
    requests = [{"prompt": "go", "state": float(number)} for number in range(6)]
    actions = ask(shared[0], {BATCH: requests})["actions"]
    assert np.array_equal(actions, np.stack([CHUNK + number for number in range(6)]))
    assert shared[1].batches[-2:] == [[0, 1, 2, 3], [4, 5]], "in calls of max_batch=4"
    assert f"{BATCH} has 65 requests; expected at most 64" in ask(shared[0], {BATCH: requests[:1] * 65})


@pytest.mark.parametrize(
    "message",
    ["text", b"\xc1", encode([1]), encode({}), encode({BATCH: []}), encode({BATCH: [3]}), encode({BATCH: {}}),
     b"\x81\xa6prompt" + b"\x81\xa1a" * 400 + b"\x01", encode({"prompt": "break"})],
    ids=["text", "no msgpack", "a list", "an empty map", "an empty batch", "a batch of numbers", "a batch of none", "a deep map",
         "a fault of the policy"],
)  # fmt: skip
def test_an_error_is_a_text_and_closes_one_connection_only(shared, message):
    with greeted(shared[0], 2) as (broken, other):
        broken.send(message)
        said = broken.recv(timeout=30)
        assert isinstance(said, str) and ": " in said and "Traceback" not in said and "File" not in said
        check_closed(broken, 1011)
        tell(other, {"prompt": "go", "state": 7.0})
        check_acts(other, 7)


def test_a_fault_of_one_request_does_not_spoil_the_batch():
    with serving(batch_wait_s=5) as (port, policy, _), greeted(port, 2) as (broken, whole):
        tell(broken, {"prompt": "break"})
        tell(whole, {"prompt": "go", "state": 3.0})
        assert "ZeroDivisionError" in hear(broken)
        check_acts(whole, 3)
        assert len(policy.batches[0]) == 2, "they were together at first"


def test_clients_that_ask_at_once_share_a_batch_and_one_alone_does_not_wait():
    with serving(batch_wait_s=60) as (port, policy, _):
        with greeted(port, 4) as clients:
            for number, client in enumerate(clients):
                tell(client, {"prompt": "go", "state": float(number)})
            for number, client in enumerate(clients):
                check_acts(client, number)
        assert [sorted(batch) for batch in policy.batches] == [[0.0, 1.0, 2.0, 3.0]]
        assert np.array_equal(ask(port, {"prompt": "go", "state": 9.0})["actions"], CHUNK + 9), "within 60 s"


def test_a_client_that_leaves_is_not_waited_for():
    with serving(batch_wait_s=60) as (port, _, _), greeted(port, 2) as (silent, asking):
        tell(asking, {"prompt": "go", "state": 1.0})
        with pytest.raises(TimeoutError):
            asking.recv(timeout=0.3)  # a control: it waits for the silent one
        silent.close()
        check_acts(asking, 1)


def test_health_is_answered_while_the_policy_computes_and_a_late_answer_is_an_error():
    with serving(infer_timeout_s=0.5, batch_wait_s=0) as (port, policy, _):
        with greeted(port) as client:
            tell(client, {"prompt": "wait"})
            until(lambda: policy.batches)
            assert health(port) == (200, "OK\n") and json.loads(health(port, "/health")[1]) == {"status": "ok"}
            assert "infer_timeout_s=0.5" in hear(client)
        SLOW.set()
        assert np.array_equal(ask(port, {"prompt": "go"})["actions"], CHUNK)


def test_a_message_that_is_too_large_is_closed_with_1009_and_others_are_served():
    with serving(max_message=10_000) as (port, _, _):
        most = (
            10_000 - len(encode({"prompt": ""})) - 2
        )  # text of this length has a header of three bytes instead of one
        ask(port, {"prompt": "x" * most})
        with greeted(port) as client:
            tell(client, {"prompt": "x" * (most + 1)})
            check_closed(client, 1009)
        assert np.array_equal(ask(port, {"prompt": "go"})["actions"], CHUNK)


def test_more_clients_than_allowed_are_refused_and_a_silent_one_of_vla_eval_keeps_its_place(monkeypatch):
    """It counts an episode whose connection is closed as failed."""
    for path in ("/", PATH):
        with serving(max_clients=1) as (port, _, _), open_client(port, path):
            with pytest.raises(InvalidStatus) as rejected:
                open_client(port)
            assert rejected.value.response.status_code == 503 and b"max_clients" in rejected.value.response.body
        monkeypatch.setattr("rlinf.serving.server.IDLE_S", 0)


def test_a_client_that_has_asked_nothing_for_long_makes_room_for_another(monkeypatch):
    with serving(max_clients=2, batch_wait_s=0) as (port, _, _), greeted(port, 2) as (idle, asking):
        tell(asking, {"prompt": "wait"})
        monkeypatch.setattr("rlinf.serving.server.IDLE_S", 0)
        with greeted(port) as third:
            assert "a new client" in check_closed(idle, 1001).rcvd.reason
            tell(third, {"prompt": "wait"})
            SLOW.set()
            check_acts(third)
        check_acts(asking)  # one that waits keeps its place


def test_a_client_that_has_made_room_is_not_served_again(monkeypatch):
    leave, close = threading.Event(), ServerConnection.close

    async def slow_close(connection, *reason):
        while not leave.is_set():
            await asyncio.sleep(0.01)
        await close(connection, *reason)

    with serving(max_clients=1, batch_wait_s=0) as (port, policy, _), greeted(port) as idle:
        monkeypatch.setattr("rlinf.serving.server.IDLE_S", 0)
        monkeypatch.setattr(ServerConnection, "close", slow_close)
        with greeted(port) as other, ExitStack() as at_the_end:
            at_the_end.callback(leave.set)
            tell(idle, {"prompt": "go"})
            tell(other, {"prompt": "go"})
            check_acts(other)
            with pytest.raises(TimeoutError):
                idle.recv(timeout=1)
            assert policy.num_read == 1


def test_a_request_that_takes_long_to_read_delays_nobody():
    with serving(batch_wait_s=0) as (port, _, _), greeted(port, 2) as (slow, other):
        tell(slow, {"prompt": "read slowly"})
        tell(other, {"prompt": "go", "state": 2.0})
        check_acts(other, 2)
        assert health(port)[0] == 200


def test_clients_of_vla_eval_wait_where_others_are_told_that_the_server_is_busy():
    """Its client does not ask again: it counts the episode as failed."""
    connection = pytest.importorskip("vla_eval.connection", reason="pip install vla-eval==0.8.0")

    async def play(port, state):
        async with connection.Connection(f"ws://127.0.0.1:{port}{PATH}") as client:
            await client.connect()
            await client.start_episode({"task": {"name": "go"}})
            return (await client.act({"task_description": "go", "states": [state]}))["actions"].tolist()

    with (
        serving(max_batch=1, batch_wait_s=0) as (port, policy, _),
        greeted(port, 2) as (many, other),
        ThreadPoolExecutor(2) as pool,
    ):
        tell(many, {BATCH: [{"prompt": "wait"}] * 16})
        until(lambda: policy.batches)  # 15 wait, and the row that the policy works on counts too
        waiting = [pool.submit(asyncio.run, play(port, state)) for state in (1.0, 2.0)]
        until(lambda: policy.num_read == 18)
        tell(other, {"prompt": "go"})
        assert "busy: 16 observations" in hear(other), "control"
        check_closed(other, 1013)
        assert not any(one.done() for one in waiting)
        SLOW.set()
        assert [one.result(30) for one in waiting] == [[1.0, 2.0], [2.0, 3.0]]


def test_the_key_is_asked_for_before_anything_else():
    with serving(api_key="secret") as (port, _, _):
        for headers in ({}, {"Authorization": "Api-Key secre"}, {"Authorization": "secret"}):
            with pytest.raises(InvalidStatus) as rejected:
                open_client(port, additional_headers=headers)
            assert rejected.value.response.status_code == 401
        with open_client(port, additional_headers={"Authorization": "Api-Key secret"}) as client:
            assert hear(client)
        assert health(port)[0] == 200


def test_pages_of_browsers_and_unknown_paths_are_refused(shared):
    for given, status in (({"origin": "http://example.org"}, 403), ({"path": "/other"}, 404)):
        with pytest.raises(InvalidStatus) as rejected:
            open_client(shared[0], **given)
        assert rejected.value.response.status_code == status
    with pytest.raises(urllib.error.HTTPError, match="404"):
        health(shared[0], "/config")


def test_a_server_that_stops_answers_who_waits_and_accepts_nobody_else():
    with serving() as (port, policy, stop), greeted(port, 2) as (idle, waiting):
        tell(waiting, {"prompt": "wait", "state": 2.0})
        until(lambda: policy.batches)
        stop()
        check_closed(idle, 1001)
        with pytest.raises(OSError):
            open_client(port)
        SLOW.set()
        check_acts(waiting, 2)
        check_closed(waiting, 1001)


def test_clients_that_vanish_cost_nothing(shared):
    port = shared[0]
    for _ in range(3):
        client = open_client(port)
        client.recv(timeout=30)
        client.send(encode({"prompt": "go"}))
        client.socket.close()
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GARBAGE\r\n\r\n")
    assert np.array_equal(ask(port, {"prompt": "go", "state": 4.0})["actions"], CHUNK + 4)


def message_of(kind, payload, seq=1):
    return encode_named({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0})


HELLO = message_of("hello", {"harness_version": "0.8.0", "protocol_version": 1})


def exchange(client, message):
    client.send(message)
    return hear(client)


def test_one_action_for_each_observation_and_a_new_chunk_when_an_episode_begins(shared):
    with open_client(shared[0], PATH) as client:
        hello = exchange(client, HELLO)
        assert hello["type"] == "hello" and hello["seq"] == 1
        assert hello["payload"]["protocol_version"] == 1 and hello["payload"]["model_server"] == "numbers"
        assert hello["payload"]["observation_params"] == {"send_wrist_image": False, "send_state": True}
        actions = []
        for seq, state in enumerate((0, 10, 20, 30)):
            payload = {"images": {}, "task_description": "go", "states": np.float64([state])}
            reply = exchange(client, message_of("observation", payload, seq))
            assert reply["type"] == "action" and reply["seq"] == seq
            actions.append(reply["payload"]["actions"].tolist())
        assert actions == [[0, 1], [2, 3], [20, 21], [22, 23]], "two of a chunk, then the policy is asked again"
        exchange(client, message_of("observation", payload, 4))
        client.send(message_of("episode_start", {"task": {}}, 5))
        assert exchange(client, message_of("observation", payload, 6))["payload"]["actions"].tolist() == [30, 31]


@pytest.mark.parametrize(
    ("message", "said"),
    [(message_of("observation", {"images": {}}), "no prompt"), (message_of("hello", {"protocol_version": 2}), "protocol_version"),
     (message_of("dance", {}), "'dance'"), (encode_named({"type": "hello"}), "payload"), (b"\xc1", "msgpack"),
     (message_of("observation", {"task_description": "break"}), "ZeroDivisionError")],
    ids=["no prompt", "version", "type", "fields", "no msgpack", "a fault of the policy"],
)  # fmt: skip
def test_an_error_of_vla_eval_leaves_the_connection_open(shared, message, said):
    with open_client(shared[0], PATH) as client:
        exchange(client, HELLO)
        reply = exchange(client, message)
        assert reply["type"] == "error" and said in str(reply)
        assert reply["payload"]["error"].startswith("observation_failed: ")
        assert exchange(client, message_of("observation", {"task_description": "go"}))["type"] == "action"


def test_vla_evals_client_sends_pictures_and_gets_actions(shared):
    connection = pytest.importorskip("vla_eval.connection", reason="pip install vla-eval==0.8.0")

    async def play():
        async with connection.Connection(f"ws://127.0.0.1:{shared[0]}{PATH}") as client:
            await client.start_episode({"task": {"name": "t"}})
            pixels = np.zeros((8, 8, 3), np.uint8)
            seen = {"images": {"a": pixels}, "task_description": "go", "states": np.ones(2)}
            found = [await client.act(seen) for _ in range(2)]
            with pytest.raises(RuntimeError, match="no prompt"):
                await client.start_episode({"task": {}})
                await client.act({"images": {"a": pixels}})
            await client.end_episode({"metrics": {"success": True}, "steps": 2, "elapsed_sec": 0.1})
            return client.server_info, found

    info, found = asyncio.run(play())
    assert info["model_server"] == "numbers"
    assert [action["actions"].tolist() for action in found] == [[2, 3], [4, 5]]


def test_the_command_that_evaluates_a_server_can_be_typed(tmp_path):
    """Its words, as a shell and Hydra read them, give the env of the policy, and the plug-ins that register it."""
    plugin = tmp_path / "an_env, or two.py"
    plugin.write_text("")
    given = ["env=gymnasium", "env.id=CartPole-v1", "env.kwargs={sutton_barto_reward: true, why: 'a, b'}",
             "env.instruction='keep it up'", f"plugins=['{plugin}']"]  # fmt: skip
    config = build_config(compose_config(["model=mlp", *given]))
    again = build_config(compose_config(["model=mlp", *shlex.split(env_overrides(config))]))
    assert again.env == config.env and again.env.kwargs["why"] == "a, b"
    assert again.plugins == config.plugins == [str(plugin)]
