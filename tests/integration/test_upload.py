"""Uploads against a hub that runs here and against moto's S3: what arrives, what is rejected before training, what is tried again."""

import base64
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml

from rlinf.errors import CheckpointError, ConfigError
from rlinf.manifest import Manifest, hash_files, verify_files
from rlinf.recipes import upload as upload_module
from rlinf.recipes.checkpoints import RecipeCheckpoints
from rlinf.recipes.upload import S3Upload, model_card

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from chat_models import chat_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_secret_of_this_test"
MANIFEST = Manifest(
    {"rlinf": "0.2.0", "torch": "2.13.0"}, {"class": "LlamaForCausalLM"}, {}, {}, {}, {"state": "merged"}, "float32", {}, None,
    policy_version=7, seed=3, git_revision="abc",
)  # fmt: skip
RECIPE = {
    "policy": {"model_name_or_path": "owner/base-model"},
    "train": {"train_policy": {"type": "sft", "dataset": {"name": "owner/rows"}}},
}
STAMP = "20260101000000"


def finished_run(root: Path) -> tuple[Path, list[Path]]:
    """A run folder with a last checkpoint and the final export, as the manager hands them over."""
    run = root / "outputs" / "my-sft" / STAMP
    for name in ("checkpoints/step_7", "safetensors/final"):
        folder = run / name
        (folder / "trainer_state").mkdir(parents=True)
        (folder / "trainer_state" / "__0_0.distcp").write_bytes(b"shards")
        (folder / "config.yaml").write_text(yaml.safe_dump(RECIPE))
        (folder / "00000.safetensors").write_bytes(b"weights " * 9)
    state = {"format": 2, "loop_state": {"trainer": {"scores": {"step_5": 0.25, "step_7": 0.5}}}}
    (run / "checkpoints" / "step_7" / "state.json").write_text(json.dumps(state))
    folders = [run / "checkpoints" / "step_7", run / "safetensors" / "final"]
    for folder in folders:
        Manifest(**{**vars(MANIFEST), "files": hash_files(folder)}).save(folder)
    return run, folders


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that an upload needs.

    Attributes:
        calls: ``METHOD path`` of each request.
        files: Content by path in the repository.
        failures: Commits that are still to be rejected.
        role: Of the token.
        closes_after_whoami: It cannot be reached any more after it has said whose the token is.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.calls: list[str] = []
        self.files: dict[str, bytes] = {}
        self.created: list[dict] = []
        self.failures, self.role, self.closes_after_whoami = 0, "write", False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _HubHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _is_known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer({"error": "Invalid credentials"}, 401)
        return False

    def do_GET(self) -> None:
        hub = self.server
        hub.calls.append(f"GET {self.path}")
        if self._is_known() and self.path == "/api/whoami-v2":
            self._answer({"type": "user", "name": "me", "auth": {"accessToken": {"role": hub.role}}})
            if hub.closes_after_whoami:
                self.close_connection = True
                threading.Thread(target=lambda: (hub.shutdown(), hub.socket.close()), daemon=True).start()
        elif self.path != "/api/whoami-v2":
            self._answer({"error": "not here"}, 404)

    def do_POST(self) -> None:
        hub = self.server
        hub.calls.append(f"POST {self.path}")
        body = self._body()
        if not self._is_known():
            return
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.address}/me/policy"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            if hub.failures:
                hub.failures -= 1
                # After 500, the library of the hub would wait 23 s before it raises.
                self._answer({"error": "the hub is busy"}, 409)
                return
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._answer({"commitUrl": f"{hub.address}/c/1", "commitOid": "1", "hookOutput": "", "success": True})
        else:
            self._answer({"error": f"{self.path} is not known here"}, 404)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


PROGRAM = """
import logging, sys
from pathlib import Path
from rlinf.recipes import upload
from rlinf.errors import RLinfError
logging.basicConfig(level=logging.DEBUG)
upload.BACKOFF_S = 0.01
try:
    hub = upload.HubUpload("policy")
    print("started", flush=True)
    run = Path(sys.argv[1])
    hub.upload(run, [run / "checkpoints" / "step_7", run / "safetensors" / "final"])
    print("done")
except RLinfError as error:
    print(f"{type(error).__name__}: {error}")
"""


def upload_to(hub: Hub, run: Path, token: str | None = TOKEN) -> str:
    """Upload in a process of its own, as the hub's library reads its settings once; return what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(run.parents[2] / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert TOKEN not in result.stdout + result.stderr, "a token must not be logged"
    assert result.returncode == 0, result.stderr
    return result.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_final_policy_goes_to_a_new_repository_of_the_hub_with_its_card(hub, tmp_path):
    """Also to one that is busy for a moment."""
    run, folders = finished_run(tmp_path)
    hub.failures = 2
    assert "done" in upload_to(hub, run)
    assert sum("/commit/" in call for call in hub.calls) == 3
    assert {(each["name"], each.get("visibility")) for each in hub.created} == {(f"policy-{STAMP}", "private")}
    assert hub.files == contents(folders[1]), "the final policy, not the checkpoint"
    assert hub.files["00000.safetensors"] == b"weights " * 9
    card = hub.files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    origin = {"base_model": "owner/base-model", "datasets": "owner/rows"}
    assert head == {"library_name": "transformers", "tags": ["rlinf", "sft"], **origin}
    facts = ("| updates | 7 |", "LoRA adapters, merged", "| step_7 | 0.5000 |")
    for words in ("Trained by SFT from owner/base-model", *facts):
        assert words in card, card
    verify_files(folders[1], Manifest.load(folders[1]))


def test_what_the_hub_refuses_is_said(hub, tmp_path):
    run, _ = finished_run(tmp_path)
    assert "ConfigError: train.ckpt.upload_hf=true needs a token" in upload_to(hub, run, token=None)
    said = upload_to(hub, run, token="hf_wrong")
    assert "ConfigError" in said and "started" not in said and "hf_wrong" not in said
    hub.role = "read"
    rejected = (
        "ConfigError: train.ckpt.upload_hf=true needs a token with write access, but the token of 'me' is read-only"
    )
    assert rejected in upload_to(hub, run)
    hub.role, hub.failures = "write", 1000
    said = upload_to(hub, run)
    assert "started" in said and "CheckpointError: Cannot upload" in said and "after 3 attempts" in said


SCRIPT = """
from rlinf.recipes import upload
from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import RawTextPacker

upload.BACKOFF_S = 0.01
if __name__ == "__main__":
    launch_worker(dataset=[{"text": f"{n} and {n}"} for n in range(4)], data_packer=RawTextPacker(column="text"))
"""


def closed_port() -> str:
    """Return an address of this machine where nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def recipe_that_uploads(tiny_lm, folder: Path, hub: str, **ckpt) -> Callable[..., subprocess.CompletedProcess]:
    """Write a recipe and its script; return a function that runs it with further words against a hub."""
    tokenizer = chat_tokenizer("plain")
    model = tiny_lm("llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    (folder / "mine.py").write_text(SCRIPT)
    config = {
        "train": {"output_dir": "out", "timestamp": STAMP, "train_batch_per_replica": 2, "param_dtype": "float32",
                  "ckpt": {"upload_hf": True, "hf_repo_name": "policy", **ckpt}},
        "policy": {"model_name_or_path": model, "device": "cpu", "model_max_length": 64},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "hf"), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}

    def launch(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "rlinf", "launch", "--config", "recipe.yaml", "mine.py", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert TOKEN not in done.stdout + done.stderr, "a token must not be logged"
        return done

    return launch


def test_a_hub_that_cannot_be_reached_ends_a_run_at_its_start_with_one_line(tiny_lm, tmp_path):
    failed = recipe_that_uploads(tiny_lm, tmp_path, closed_port())()
    assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr
    (line,) = [line for line in failed.stderr.splitlines() if "error" in line.lower()]
    assert "ask the hub for the owner of HF_TOKEN after 3 attempts" in line and "train.ckpt.upload_hf=false" in line
    assert not list(tmp_path.glob("out/*/checkpoints")), "nothing was trained"


def test_a_hub_that_is_gone_at_the_end_leaves_the_export_and_names_the_command(hub, tiny_lm, tmp_path):
    hub.closes_after_whoami = True
    launch = recipe_that_uploads(tiny_lm, tmp_path, hub.address, enable_checkpoint=False)
    failed, final = launch(), tmp_path / "out" / STAMP / "safetensors" / "final"
    assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr
    assert "ConnectError" in failed.stderr and "after 3 attempts" in failed.stderr, failed.stderr
    repo = f"me/policy-{STAMP}"
    assert f"To upload it later, run hf upload {repo} out/{STAMP}/safetensors/final --private" in failed.stderr
    verify_files(final, Manifest.load(final))


def test_an_upload_that_fails_ends_a_whole_run_and_is_done_by_the_next_command(hub, tiny_lm, tmp_path):
    launch = recipe_that_uploads(tiny_lm, tmp_path, hub.address)
    hub.failures = 1000
    failed, run = launch(), tmp_path / "out" / STAMP
    assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr
    assert f"out/{STAMP} is complete, but not all of it was uploaded: Cannot upload" in failed.stderr
    again = "rlinf launch --config recipe.yaml mine.py train.resume=true"
    by_hand = f"hf upload me/policy-{STAMP} out/{STAMP}/safetensors/final --private"
    assert f"To upload it later, run {by_hand}. To retry the upload: {again}" in failed.stderr
    assert not hub.files
    for folder in (run / "checkpoints" / "step_2", run / "safetensors" / "final"):
        verify_files(folder, Manifest.load(folder))
    assert json.loads((run / "summary.json").read_text())["steps"] == 2 and (run / "report.html").is_file()
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
    hub.failures = 0
    done = launch("train.resume=true")
    assert done.returncode == 0, done.stderr
    assert hub.files == contents(run / "safetensors" / "final")


def test_a_card_names_no_path_of_this_machine(tmp_path):
    _, folders = finished_run(tmp_path)
    here = {"policy": {"model_name_or_path": str(tmp_path)}}
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(here))
    card = model_card(folders[1])
    assert str(tmp_path.parent) not in card and "base_model" not in card and "Validation" not in card


@pytest.fixture
def s3(monkeypatch):
    """moto's S3 on this machine, with a bucket; returns a client."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (pip install boto3)")
    moto = pytest.importorskip("moto.server", reason="moto is not installed (pip install 'moto[s3]' flask flask-cors)")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    variables = {
        "ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a key", "SECRET_ACCESS_KEY": "a very secret key",
        "DEFAULT_REGION": "us-east-1", "CONFIG_FILE": os.devnull, "SHARED_CREDENTIALS_FILE": os.devnull,
        "EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(upload_module, "BACKOFF_S", 0.01)
    client = boto3.client("s3")
    client.create_bucket(Bucket="mine")
    yield client
    # All servers of a process share their state.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"), timeout=30).close()
    server.stop()


def keys(client) -> list[str]:
    return [each["Key"] for each in client.list_objects_v2(Bucket="mine").get("Contents", [])]


def files_of(run: Path) -> set[str]:
    return {f"my-sft/{STAMP}/{name}" for name in contents(run)}


def test_files_arrive_in_s3_below_prefix_and_run(s3, tmp_path):
    run, folders = finished_run(tmp_path)
    S3Upload("mine", "outputs").upload(run, folders)
    expected = {f"outputs/{key}" for key in files_of(run)}
    assert set(keys(s3)) == expected and len(expected) > 6
    body = s3.get_object(Bucket="mine", Key=f"outputs/my-sft/{STAMP}/safetensors/final/00000.safetensors")["Body"]
    assert body.read() == b"weights " * 9
    assert S3Upload("mine").key_of(run, folders[0] / "config.yaml") == f"my-sft/{STAMP}/checkpoints/step_7/config.yaml"


def test_only_the_last_checkpoint_is_sent_unless_all_are_asked_for_and_its_manifest_last(s3, tmp_path, monkeypatch):
    run, folders = finished_run(tmp_path)
    other_step(run, 2, exported=True)
    upload, sent = S3Upload("mine"), []
    monkeypatch.setattr(upload.client, "upload_file", lambda path, bucket, key: sent.append(Path(path)))
    RecipeCheckpoints(run, export=fail, uploads=[upload])._upload(folders, is_final=True)
    assert [path.name for path in sent].count("manifest.json") == 2 and not any("step_2" in path.parts for path in sent)
    for folder in folders:
        assert [path for path in sent if folder in path.parents][-1] == folder / "manifest.json"


def test_what_s3_refuses_is_said_before_training(s3, tmp_path, monkeypatch):
    rejections = {
        None: "needs a bucket. Set train.ckpt.s3_bucket=",
        "absent": "Cannot use the S3 bucket 'absent' after 3 attempts .*404.*Set train.ckpt.s3_bucket",
    }
    for bucket, words in rejections.items():
        with pytest.raises(ConfigError, match=words):
            S3Upload(bucket)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.delenv("AWS_DEFAULT_REGION")
        with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION are not set"):
            S3Upload("mine")


def test_wrong_keys_are_refused_and_no_key_is_shown(s3, monkeypatch, caplog):
    from moto.core import set_initial_no_auth_action_count

    @set_initial_no_auth_action_count(0)
    def rejected() -> str:
        with pytest.raises(ConfigError, match="Cannot use the S3 bucket 'mine' after 3 attempts .*403") as error:
            S3Upload("mine")
        return str(error.value)

    with caplog.at_level(logging.DEBUG, "rlinf"):
        said = rejected() + caplog.text
    assert "very secret" not in said and "a key" not in said
    S3Upload("mine")  # a control


def test_what_fails_once_is_tried_again_and_what_fails_always_ends_the_run_at_its_end(s3, tmp_path, monkeypatch):
    from botocore.exceptions import ClientError

    run, folders = finished_run(tmp_path)
    upload, calls = S3Upload("mine", every=True), []
    send = upload.client.upload_file

    def flaky(path, bucket, key):
        calls.append(key)
        if len(calls) <= fails:
            raise ClientError({"Error": {"Code": "SlowDown", "Message": "a very secret key"}}, "PutObject")
        send(path, bucket, key)

    fails = 2
    monkeypatch.setattr(upload.client, "upload_file", flaky)
    upload.upload(run, folders)
    assert calls[0] == calls[1] == calls[2] != calls[3] and len(keys(s3)) == len(calls) - 2
    for key in keys(s3):
        s3.delete_object(Bucket="mine", Key=key)
    fails = 10**6
    manager = RecipeCheckpoints(run, export=fail, uploads=[upload])
    manager._upload(folders, is_final=False)
    manager._upload(folders, is_final=True)
    with pytest.raises(
        CheckpointError, match="is complete, but not all of it was uploaded: .*after 3 attempts"
    ) as error:
        manager.close()
    assert "secret" not in str(error.value)


def test_only_all_takes_every_checkpoint(tmp_path):
    class Counter:
        def __init__(self, every):
            self.every, self.calls = every, []

        def upload(self, run_folder, folders):
            self.calls.append(folders)

    final, every = Counter(False), Counter(True)
    manager = RecipeCheckpoints(tmp_path, export=fail, uploads=[final, every])
    for number, is_final in enumerate((False, False, True)):
        manager._upload([number], is_final)
    assert final.calls == [[2]] and every.calls == [[0], [1], [2]]


def other_step(run: Path, number: int, exported: bool) -> list[Path]:
    """An earlier checkpoint of a finished run, and its export."""
    names = [f"checkpoints/step_{number}", *([f"safetensors/step_{number}"] if exported else [])]
    folders = []
    for name, source in zip(names, ("checkpoints/step_7", "safetensors/final"), strict=False):
        folders.append(shutil.copytree(run / source, run / name))
        (run / name / "00000.safetensors").write_bytes(f"weights of {number}".encode())
        Manifest(**{**vars(MANIFEST), "files": hash_files(run / name)}).save(run / name)
    return folders


def fail(*_):
    raise OSError("no network")


def test_at_the_end_every_checkpoint_on_the_disk_is_uploaded_that_is_not_there(s3, tmp_path, monkeypatch):
    run, last = finished_run(tmp_path)
    first, second, sent = other_step(run, 2, exported=True), other_step(run, 5, exported=False), []
    upload = S3Upload("mine", every=True)
    send = upload.client.upload_file
    monkeypatch.setattr(upload.client, "upload_file", lambda *a: sent.append(Path(a[0])) or send(*a))
    manager = RecipeCheckpoints(run, export=fail, uploads=[upload])
    with monkeypatch.context() as patch:
        patch.setattr(upload.client, "upload_file", fail)
        manager._upload(first, is_final=False)
    manager._upload(second, is_final=False)
    with pytest.raises(CheckpointError, match=r"not all of it was uploaded: .*checkpoints/step_2/"):
        manager.close()
    assert set(keys(s3)) == {key for key in files_of(run) if "/step_5/" in key}
    sent.clear()
    manager._upload(last, is_final=True)
    manager.close()
    assert set(keys(s3)) == files_of(run)
    assert not any("step_5" in path.parts for path in sent), "it was there"
    (second[0] / "00000.safetensors").write_bytes(b"a run that continued wrote it again")
    Manifest(**{**vars(MANIFEST), "files": hash_files(second[0])}).save(second[0])
    sent.clear()
    upload.upload(run, [*last, *second])
    assert sent and all("step_5" in path.parts for path in sent)
