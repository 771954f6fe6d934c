"""``rlinf serve`` and ``model=remote``: a policy over the network acts as it does here, or is rejected in one sentence."""

import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_servers import in_a_thread
from websockets.sync.server import serve as serve_websocket

from rlinf.checkpoints.checkpoint import save_checkpoint
from rlinf.cli import main
from rlinf.commands.evaluate import evaluate
from rlinf.commands.open_checkpoint import open_checkpoint
from rlinf.commands.serve import PolicyRows, ServeConfig, _bound, metadata_of
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import make_env
from rlinf.errors import ConfigError, ManifestMismatchError, PolicyServerError
from rlinf.evaluation.evaluator import act_for_rows
from rlinf.evaluation.partial import PartialResults
from rlinf.models import build_policy
from rlinf.options import to_mapping
from rlinf.policy import Policy
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.validation import validate
from rlinf.report.compare_folders import compare_folders
from rlinf.serving import MessageError
from rlinf.serving.client import PolicyClient
from rlinf.serving.codec import decode, encode
from rlinf.serving.server import Limits, PolicyServer
from rlinf.serving.vla_eval import Hello
from rlinf.types import Observation

ENV = ["env=tabletop", "env.tasks=[reach,push]", "env.cameras=[front]", "env.max_episode_steps=12"]
EVALUATION = [
    "evaluation.num_episodes=6", "evaluation.num_envs=4", "evaluation.num_videos_per_task=0", "cluster.num_threads=1", "tracking.progress=false",
    "evaluation.greedy=false",
]  # fmt: skip


POLICY = ["model=openvla_tiny", "model.action_chunks_len=2", *ENV, *EVALUATION]


def make_checkpoint(folder: Path, seed: int) -> Path:
    config = build_config(compose_config([*POLICY, "output_dir=unused"]))
    env = make_env(config.env, 1, auto_reset=False)
    torch.manual_seed(seed)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    env.close()
    manifest = build_manifest(config, model, policy_version=seed)
    save_checkpoint(
        folder, model=model, optimizer=None, loop_state={"step": seed}, run_config=to_mapping(config), manifest=manifest
    )
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two policies of other weights."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    return [make_checkpoint(folder / f"rl_00000{seed}", seed) for seed in (1, 2)]


def rows_of(checkpoint) -> tuple[PolicyRows, dict]:
    """What ``rlinf serve`` makes of a checkpoint."""
    config = evaluation_of(checkpoint, "unused")
    opened = open_checkpoint(checkpoint, config, [])
    rows = PolicyRows(Policy(opened.policy.eval(), config), ServeConfig())
    return rows, metadata_of(opened, rows, ServeConfig())


def evaluation_of(checkpoint, output, *overrides):
    config = build_config(compose_config([*POLICY, f"output_dir={output}", *overrides]))
    return replace(config, checkpoint=str(checkpoint))


def remote(url, output="unused", *overrides, env=ENV):
    given = [f"model.url={url}", "model.timeout_s=20", "model.connect_timeout_s=60", f"output_dir={output}"]
    return build_config(compose_config(["model=remote", *env, *EVALUATION, *given, *overrides]))


@contextmanager
def serving(rows, metadata, port=0):
    """Serve in a thread; yield the URL."""
    limits = Limits(
        max_batch=16, batch_wait_s=0.05, max_message=2**24, max_prompt=4096, max_clients=40, infer_timeout_s=60
    )
    server = PolicyServer(rows.read, rows.read_named, rows.act, metadata, limits, Hello("p", 2, False, 1, execute=2))
    with in_a_thread(server, port=port) as (number, _):
        yield f"ws://127.0.0.1:{number}"


@pytest.fixture(scope="module")
def served(checkpoints):
    rows, metadata = rows_of(checkpoints[0])
    with serving(rows, metadata) as url:
        yield url, rows


def result_of(folder) -> dict:
    result = json.loads((Path(folder) / "result.json").read_text())
    assert result.pop("wall_s") > 0
    return result


@pytest.fixture(scope="module")
def local(checkpoints, tmp_path_factory):
    """The evaluation of the first checkpoint in this process."""
    folder = tmp_path_factory.mktemp("local") / "result"
    evaluate(evaluation_of(checkpoints[0], folder))
    return folder


# -- acting ------------------------------------------------------------------------------------------------------


def test_replies_do_not_depend_on_who_else_asks_and_are_those_of_an_evaluation(served):
    url, rows = served
    generator, model = np.random.default_rng(0), rows.policy.model
    prompts = ["reach the red block", "push it", "push the blue block to the left"]
    images = generator.integers(0, 256, (16, 64, 64, 3), dtype=np.uint8)
    seen = Observation({"front": images}, None, [prompts[row % 3] for row in range(16)])
    uniforms = generator.uniform(0.01, 0.99, (16, model.num_uniforms)).astype(np.float32)
    requests = [{"images": {"front": seen.images["front"][row]}, "prompt": seen.instruction[row]} for row in range(16)]
    for row in range(8):  # half are greedy
        requests[row] |= {"uniforms": uniforms[row], "temperature": 1.5}
    clients = [PolicyClient(url, 20, 20) for _ in requests]
    alone = [client.ask(request)["actions"] for client, request in zip(clients, requests, strict=True)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda pair: pair[0].ask(pair[1])["actions"], zip(clients, requests, strict=True)))
    for client in clients:
        client.close()
    assert np.array_equal(np.stack(alone), np.stack(together))
    with torch.no_grad():
        sampled = act_for_rows(model, seen.select(range(8)), uniforms[:8], 1.5)
        greedy = act_for_rows(model, seen.select(range(8, 16)), None, 1.0)
    assert np.array_equal(np.stack(alone), np.concatenate([sampled, greedy]))
    assert len(np.unique(np.stack(alone), axis=0)) > 8, "a control: observations differ"


def test_the_raw_format_of_the_page_gets_the_same_actions_and_no_manifests(served):
    """The page's lines, with another address. Its first message is small; a client of ours asks for the manifests."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = next(block for block in page.split("```python\n") if block.startswith("import msgpack")).partition("```")[0]
    names = {"image": np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)}
    exec(code.replace("ws://127.0.0.1:8000", served[0]), names)
    client = PolicyClient(served[0], 20, 20)
    reply = client.ask({"images": {"front": names["image"]}, "prompt": "reach the red block"})
    client.close()
    assert np.array_equal(names["actions"], reply["actions"]) and names["actions"].any()
    own = client.metadata["rlinf"]
    assert {name: own[name] for name in names["about"]} == names["about"] and names["about"]["cameras"] == ["front"]
    assert own.keys() - names["about"].keys() == {"manifest", "present"}
    assert len(encode(names["about"])) < 1000 < 10_000 < len(encode(own))


def test_the_result_of_a_remote_evaluation_is_that_of_the_local_one(served, local, tmp_path):
    evaluate(remote(served[0], tmp_path / "remote"))
    assert result_of(tmp_path / "remote") == result_of(local)
    assert compare_folders(local, tmp_path / "remote").total.difference == 0
    evaluate(remote(served[0], tmp_path / "other", "seed=5"))
    assert result_of(tmp_path / "other") != result_of(local), "a control"
    manifest = json.loads((tmp_path / "remote" / "manifest.json").read_text())
    assert manifest["model"]["class"] == "OpenVLAForRLActionPrediction" and manifest["policy_version"] == 1


def test_play_takes_a_policy_elsewhere_and_its_episode_ends_as_in_the_evaluation(served, local, tmp_path, capsys):
    counted = result_of(local)["results"][1]
    words = [*ENV, *EVALUATION, "model=remote", f"model.url={served[0]}", "evaluation.video_size=32", "window=false"]
    assert main(["play", *words, "episode=1", f"output={tmp_path / 'one.mp4'}"]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    outcome = f"{'success' if counted['success'] else 'failure'} after {counted['num_env_steps']} env steps"
    assert line.startswith(f"episode 1: {counted['task']}, ")
    assert line.endswith(f"{outcome}, return {counted['episode_return']:.3g}")
    assert (tmp_path / "one.mp4").read_bytes()[4:8] == b"ftyp"


def test_a_result_names_what_the_server_runs_otherwise_than_the_checkpoint(checkpoints, tmp_path):
    config = evaluation_of(checkpoints[0], "unused", "model.precision=bf16")
    opened, settings = open_checkpoint(checkpoints[0], config, ["precision"]), ServeConfig(max_batch=4)
    rows = PolicyRows(Policy(opened.policy.eval(), config), settings)
    with serving(rows, metadata_of(opened, rows, settings)) as url:
        with pytest.raises(ManifestMismatchError, match=r"allow_mismatch=\[precision\]"):
            evaluate(remote(url, tmp_path / "out"))
        result = evaluate(remote(url, tmp_path / "out", "evaluation.allow_mismatch=[precision]"))
    said = " ".join(result.warnings)
    assert f"{url} calls its policy with 4 rows (max_batch), but evaluations use 16" in said
    assert 'precision: saved "fp32", present "bf16"' in said
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["precision"] == "bf16"


def interrupted(folder) -> None:
    """Leave an evaluation behind that was killed after three episodes."""
    lines = (folder / "result.partial.jsonl").read_text().splitlines(keepends=True)
    (folder / "result.partial.jsonl").write_text("".join(lines[:4]))


@contextmanager
def killed_at_the_end(monkeypatch):
    """An evaluation that plays all episodes and does not write its result."""
    with monkeypatch.context() as patch:
        patch.setattr("rlinf.commands.evaluate.write_result", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            yield


def test_an_interrupted_evaluation_goes_on_with_the_same_server_only(checkpoints, served, local, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with killed_at_the_end(monkeypatch):
        evaluate(remote(served[0], out))
    interrupted(out)
    rows, metadata = rows_of(checkpoints[0])
    for changed in ({"digest": "other"}, {"max_batch": 8}):
        with serving(rows, {"rlinf": metadata["rlinf"] | changed}) as url:
            with pytest.raises(ConfigError, match=r"3 results .* different conditions \(server\)"):
                evaluate(remote(url, out))
    with serving(rows, metadata) as url:  # at another address
        evaluate(remote(url, out, "model.timeout_s=600", "model.connect_timeout_s=7"))
    assert result_of(out) == result_of(local)


def test_an_evaluation_of_a_server_that_tells_nothing_says_so_also_where_it_is_continued(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with foreign({"actions": np.zeros((5, 2))}) as url:
        with killed_at_the_end(monkeypatch):
            evaluate(remote(url, out, *FOREIGN))
        interrupted(out)
        result = evaluate(remote(url, out, *FOREIGN))
    assert result.episodes == 6 and all(row.num_env_steps == 12 for row in result.results)
    assert any(f"{url} does not describe its policy" in warning for warning in result.warnings)
    assert any("during the 3 episodes of earlier processes" in warning for warning in result.warnings)


def test_vla_eval_counts_the_episodes_of_our_evaluation(checkpoints, tmp_path):
    vla_eval = pytest.importorskip("vla_eval", reason="pip install vla-eval==0.8.0")
    config = evaluation_of(checkpoints[0], tmp_path / "ours", "evaluation.greedy=true", "evaluation.num_episodes=4")
    ours = evaluate(config)
    settings = {"tasks": ["reach", "push"], "cameras": ["front"], "max_episode_steps": 12}
    benchmark = "fixtures.vla_eval_tabletop:Tabletop"
    entry = {"benchmark": benchmark, "episodes_per_task": 2, "params": {"settings": settings}}
    work = {"benchmarks": [entry], "render": "cpu", "output_dir": str(tmp_path)}
    with serving(*rows_of(checkpoints[0])) as url:
        (theirs,) = vla_eval.run(work, server_url=f"{url}/vla-eval", no_save=True, docker=False)
    episodes = [(each["steps"], each["metrics"]) for task in theirs["tasks"] for each in task["episodes"]]
    found = [(steps, its["success"], round(its["episode_return"], 5)) for steps, its in episodes]
    in_their_order = sorted(ours.results, key=lambda row: row.spec.task_id)
    assert found == [(row.num_env_steps, row.success, round(row.episode_return, 5)) for row in in_their_order]
    assert len({row.episode_return for row in ours.results}) == 4, "a control: episodes differ"


def start_command(checkpoint, port):
    words = ["serve", f"checkpoint={checkpoint}", f"port={port}", "cluster.num_threads=1"]
    return subprocess.Popen([sys.executable, "-m", "rlinf", *words], stdout=subprocess.PIPE, text=True)


def memory_of(server, name) -> float:
    """MiB of a process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_prompt_of_any_length_is_refused_before_it_costs_anything_and_other_clients_have_their_actions(checkpoints):
    port = free_port()
    server, url = start_command(checkpoints[0], port), f"ws://127.0.0.1:{port}"
    request = {"images": {"front": np.zeros((64, 64, 3), np.uint8)}, "prompt": "go"}
    try:
        other = PolicyClient(url, 60, 300)
        usual, before = other.ask(request)["actions"], memory_of(server, "VmRSS")
        for prompt, said in (
            ("go there " * 600, "has 5400 bytes; expected at most 4096 (the server's max_prompt_bytes)"),
            ("go there " * 2**16, "expected at most 4096 (the server's max_prompt_bytes)"),
            (b"go there " * 600, "The prompt has 5400 bytes; expected at most 4096"),  # as openpi's DROID may send it
            ("x y " * 1000, "the language model supports 256 positions"),
            ("x" * (2**26 - 2**15), "does not accept messages of 64.0 MiB"),  # together with the image below 64 MiB
            ("x" * 2**26, "does not accept messages of 64.0 MiB"),
        ):
            with closing(PolicyClient(url, 60, 60)) as hostile, pytest.raises(PolicyServerError) as error:
                hostile.ask(request | {"prompt": prompt})
            assert said in str(error.value)
            assert np.array_equal(other.ask(request)["actions"], usual)
        assert memory_of(server, "VmHWM") - before < 70
    finally:
        server.kill()
        server.wait(60)


def test_a_prompt_that_is_too_long_is_refused_alone_and_the_rows_beside_it_share_their_call(served, monkeypatch):
    rows, calls = served[1], []
    act = rows.policy.model.predict_action_batch
    monkeypatch.setattr(rows.policy.model, "predict_action_batch", lambda **given: calls.append(1) or act(**given))
    image = np.zeros((64, 64, 3), np.uint8)
    prompts = ["go", "x y " * 1000, "go", "go"]
    first, rejected, *others = rows.act([rows.read({"images": {"front": image}, "prompt": each}) for each in prompts])
    assert isinstance(rejected, ConfigError) and "256 positions" in str(rejected) and len(calls) == 1
    assert all(np.array_equal(each, first) for each in others)


def test_more_observations_than_a_call_has_rows_are_asked_for_in_several_messages(served, monkeypatch):
    """A message is then never longer than the server reads by itself."""
    url, rows = served
    policy, sizes = build_policy(remote(url)), []
    ask = policy.client.ask
    monkeypatch.setattr(policy.client, "ask", lambda message: sizes.append(len(encode(message))) or ask(message))
    images = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), dtype=np.uint8)
    observation = Observation({"front": images}, None, ["go"] * 40)
    actions = policy.predict_action_batch(do_sample=False, observation=observation).actions
    assert np.array_equal(actions, act_for_rows(rows.policy.model, observation, None, 1.0))
    assert len(sizes) == 3 and max(sizes) <= rows.largest_message


def test_a_server_that_is_killed_and_comes_back_changes_nothing_and_sigterm_ends_it(
    checkpoints, local, tmp_path, caplog, monkeypatch
):
    port = free_port()
    servers, add = [start_command(checkpoints[0], port)], PartialResults.add

    def add_and_kill(self, result):
        add(self, result)
        if len(servers) == 1:
            servers[0].kill()
            servers[0].wait(60)
            servers.append(start_command(checkpoints[0], port))

    monkeypatch.setattr(PartialResults, "add", add_and_kill)
    try:
        more = ["evaluation.num_envs=2", "model.connect_timeout_s=300"]  # the start of a command
        evaluate(remote(f"ws://127.0.0.1:{port}", tmp_path / "remote", *more))
        assert servers[0].returncode == -signal.SIGKILL and "waiting to reconnect" in caplog.text
        assert result_of(tmp_path / "remote") == result_of(local)
        servers[1].send_signal(signal.SIGTERM)
        printed, _ = servers[1].communicate(timeout=60)
        assert servers[1].returncode == 0
        line = next(line for line in printed.splitlines() if line.startswith("evaluate it: rlinf evaluate "))
        words = line.split()[4:]
        assert f"model.url=ws://127.0.0.1:{port}" in words and "env.max_episode_steps=12" in words
    finally:
        for server in servers:
            server.kill()
            server.wait(60)


def test_another_checkpoint_after_a_restart_ends_the_evaluation_with_both_digests(checkpoints):
    rows, metadata = rows_of(checkpoints[0])
    with serving(rows, metadata) as url:
        client = PolicyClient(url, 20, 20)
    other_rows, other = rows_of(checkpoints[1])
    with serving(other_rows, other, port=int(url.rpartition(":")[2])):
        with pytest.raises(PolicyServerError, match="a different policy") as error:
            client.ask({"images": {"front": np.zeros((64, 64, 3), np.uint8)}, "prompt": "go"})
        digests = [each["rlinf"]["digest"] for each in (metadata, other)]
        assert digests[0] != digests[1] and all(digest in str(error.value) for digest in digests)


# -- what does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "field"),
    [("env.max_episode_steps=13", "max_episode_steps"), ("env.image_size=32", "env.image_size"), ("env.cameras=[wrist]", "preprocessing.cameras")],
)  # fmt: skip
def test_an_env_that_the_policy_was_not_made_for_is_refused_as_with_its_checkpoint(served, changed, field, tmp_path):
    with pytest.raises(ManifestMismatchError, match=field) as error:
        evaluate(remote(served[0], tmp_path / "out", changed))
    assert "evaluation.allow_mismatch=[" in str(error.value)


@contextmanager
def foreign(reply, is_silent=False, asked=None):
    """A server of another project; ``reply`` None: it does not answer. Requests are appended to ``asked``."""

    def handle(connection):
        if not is_silent:
            connection.send(encode({}))
        for message in connection:
            if asked is not None:
                asked.append(decode(message))
            if reply is not None:
                connection.send(encode(reply) if isinstance(reply, dict) else reply)

    with serve_websocket(handle, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(30)


@pytest.mark.parametrize(
    ("keys", "env", "said"),
    [
        ("{image: [a, b], prompt: p}", [], "model.keys has 'b', which matches nothing in the observation: .* Remove 'b' from"),
        ("{image: a, state: s}", ["env.state=none"], "model.keys has 's', which matches nothing in the observation: .* no state"),
        ("{picture: a}", [], "no key 'model.keys.picture'.* Known: channels_first, image, prompt, state"),
        ("{image: 3}", [], "model.keys.image is '3'"),
        ("{image: a, prompt: a}", [], "names a for two parts"),
        ("{image: [[images, a]], state: images}", ["env.state=full"], "names images for two parts"),
        ("{}", [], "names nothing; expected"),
        ("{image: a, state: {s: 0}}", ["env.state=full"], "the width 0"),
        ("{image: a, state: {s: null, t: null}}", ["env.state=full"], "the width null; expected .* widths of at least 1"),
        ("{image: a, state: {s: 3, t: 4}}", ["env.state=full"], "a state of width 31; expected 7"),
        ("{image: a}", ["env.cameras=[front,wrist]"], r"at most 1, .* or env.cameras=\[front\]"),
        ("cup", [], "model.keys is 'cup'; expected rlinf, libero, aloha, droid, or {image"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused_before_anything_is_connected(keys, env, said):
    config = remote("ws://127.0.0.1:1", "unused", f"model.keys={keys}", "evaluation.greedy=true", *env)
    with pytest.raises(ConfigError, match=said) as error:
        validate(replace(config, output_dir=None), "evaluate")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words", [["model.keys={image: see, state: {arm: 30, grip: 1}, prompt: do}"],
                                   ["model.keys.image=see", "model.keys.state={arm: 30, grip: 1}", "model.keys.prompt=do"]])  # fmt: skip
def test_a_server_is_asked_under_the_keys_that_the_user_names(words, tmp_path):
    asked = []
    with foreign({"actions": np.zeros((3, 2))}, asked=asked) as url:
        evaluate(remote(url, tmp_path / "out", *FOREIGN[1:4], "env.state=full", *words))
    assert set(asked[0]) == {"see", "arm", "grip", "do"} and asked[0]["see"].shape == (64, 64, 3)
    assert (asked[0]["arm"].shape, asked[0]["grip"].shape) == ((30,), (1,)) and isinstance(asked[0]["do"], str)


FOREIGN = [
    "model.keys=libero", "model.action_token_len=2", "model.action_chunks_len=3", "evaluation.greedy=true", "env.state=none",
]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"actions": np.zeros((5, 7))}, r"\[5, 7\]; expected \[3, 2\].* Set model.action_token_len=7"),
        ({"actions": np.full((5, 2), np.nan)}, "6 values that are NaN"),
        ({"actions": np.zeros((2, 2))}, "chunks of 2 actions.* Set model.action_chunks_len=2"),
        ({"actions": np.zeros(2)}, r"\[2\]; expected \[3, 2\]"),
        ({"actions": [[0.0, 0.0]] * 3}, "no actions, but actions"),
        ({"state": np.zeros(2)}, "no actions, but state"),
        ("ValueError: no such key", "reports: ValueError: no such key"),
        (b"\xc1", "cannot be read"),
        (None, r"within 0.5 s \(model.timeout_s\)"),
    ],
)  # fmt: skip
def test_answers_that_do_not_fit_are_refused_by_server_and_key(reply, said, tmp_path):
    with foreign(reply) as url:
        with pytest.raises(PolicyServerError, match=said) as error:
            evaluate(remote(url, tmp_path / "out", *FOREIGN, "model.timeout_s=0.5"))
        assert url in str(error.value)


def test_settings_that_do_not_fit_a_server_of_another_project_are_refused(tmp_path):
    with foreign({"actions": np.zeros((5, 2))}) as url:
        for change, said in (
            ("model.keys=null", "not `rlinf serve`; expected model.keys"),
            ("model.action_token_len=7", "action_dim 7; expected 2.* Set model.action_token_len=2"),
            ("evaluation.greedy=false", "Set evaluation.greedy=true"),
        ):
            with pytest.raises(ConfigError, match=said):
                evaluate(remote(url, tmp_path / "out", *FOREIGN, change))


def test_servers_that_cannot_be_reached_or_say_nothing_are_named():
    url = f"ws://127.0.0.1:{free_port()}"
    with pytest.raises(PolicyServerError, match=r"model.connect_timeout_s") as error:
        PolicyClient(url, 1, 0.3)
    assert url in str(error.value) and "rlinf serve" in str(error.value)
    with (
        foreign({}, is_silent=True) as url,
        pytest.raises(PolicyServerError, match="the server sends the first message"),
    ):
        PolicyClient(url, 0.3, 1)
    with pytest.raises(ConfigError, match="Set e.g. model.url=ws://"):
        PolicyClient("here:8000", 1, 1)


def test_only_commands_that_act_take_a_policy_elsewhere(tmp_path):
    config = replace(remote("ws://127.0.0.1:1"), dataset=str(tmp_path / "demonstrations"))
    for command in ("evaluate", "collect", "diagnose"):
        validate(replace(config, output_dir=None), command)
    for command in ("train", "sft", "serve"):
        with pytest.raises(ConfigError, match=r"a remote one works only with.* Set model=openvla_tiny model.url=null"):
            validate(replace(config, output_dir=None), command)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=remote"], "model.url=null.* Set model.url=ws://"),
        (["model=openvla_tiny", "model.url=ws://a:1"], "Set model=remote"),
        (["model=remote", "model.url=ws://a:1", "model.is_lora=true"], "model.is_lora=true"),
        (["model=remote", "model.url=ws://a:1", "cluster.num_rollout_workers=2"], "cluster.num_rollout_workers=null"),
        (["model=remote", "model.url=ws://a:1", "model.keys=droid", "env.state=full"], "a state of width .*; expected 8"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(overrides, said):
    config = build_config(compose_config([*overrides, *ENV]))
    with pytest.raises(ConfigError, match=said):
        validate(replace(config, output_dir=None), "evaluate")


def test_the_command_refuses_open_addresses_taken_ports_and_names_that_do_not_fit(checkpoints, capsys, monkeypatch):
    monkeypatch.delenv("RLINF_TEST_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words, said in (
            (["host=0.0.0.0"], "Set api_key_env=RLINF_API_KEY and that variable, or host=127.0.0.1"),
            (["host=0.0.0.0", "api_key_env=RLINF_TEST_KEY"], "Set export RLINF_TEST_KEY="),
            ([f"port={taken.getsockname()[1]}"], "cannot be used (Address already in use). Set port=0"),
            (["cameras=[a,b]"], "a name for each of [front], and keys=rlinf"),
            (["keys=cup"], "one of rlinf, libero, aloha, droid"),
            (["max_batch=0"], "max_batch is 0; expected at least 1"),
        ):
            assert main(["serve", f"checkpoint={checkpoints[0]}", *words]) == 2
            assert said in capsys.readouterr().err
    assert main(["serve"]) == 2 and "needs a checkpoint" in capsys.readouterr().err
    with closing(_bound(ServeConfig(port=0))) as bound:
        assert bound.getsockname()[0] == "127.0.0.1", "unless an address is typed, only this machine can connect"
        with pytest.raises(ConfigError, match="cannot be used"):  # though nobody listens there yet
            _bound(ServeConfig(port=bound.getsockname()[1]))


def test_requests_that_do_not_fit_the_policy_are_refused_by_name(served):
    url, rows = served
    image = np.zeros((64, 64, 3), np.uint8)
    for request, said in (
        ({"images": {"front": image[:32]}, "prompt": "go"}, r"images['front'] has the shape [32, 64, 3]; expected"),
        ({"images": {"front": image.astype(np.int64)}, "prompt": "go"}, "is int64; expected uint8"),
        ({"images": {"wrist": image}, "prompt": "go"}, "no images['front']; found: wrist"),
        ({"images": {"front": image}, "prompt": 3}, "The prompt is a int"),
        ({"images": {"front": image}, "prompt": "go", "uniforms": np.zeros(3)}, "uniforms have the shape [3]"),
        ({"images": {"front": image}, "prompt": "go", "temperature": 0}, "temperature is 0"),
    ):
        with pytest.raises(PolicyServerError) as error:
            PolicyClient(url, 20, 20).ask(request)
        assert said in str(error.value)
    robot = PolicyRows(rows.policy, ServeConfig(keys="libero"))
    assert robot.read_named({"images": {"front": image}, "prompt": "go"}).observation.instruction == ["go"]
    with pytest.raises(MessageError, match="no observation/image"):
        robot.read({"images": {"front": image}, "prompt": "go"})
    names = PolicyRows(rows.policy, ServeConfig(cameras=["agentview"]))
    row = names.read({"images": {"agentview": image}, "prompt": "go"})
    assert list(row.observation.images) == ["front"] and row.observation.instruction == ["go"]
    unsaid = names.read({"images": {"agentview": image}, "prompt": ""})
    assert unsaid.observation.instruction == [""], "as an audit asks"
