"""The parent's end of an engine: what becomes of a request when the process dies, hangs or rejects. No vLLM is needed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import is_running

from rlinf.engines import vllm_engine
from rlinf.engines.vllm_engine import EngineError, VllmEngine
from rlinf.engines.weight_handle import WeightsRejectedError
from rlinf.errors import ConfigError

SERVER = """
import faulthandler, os, signal, sys, tempfile, time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from rlinf.engines.vllm_process import end, end_with
from rlinf.errors import ConfigError, RLinfError

# Messages name two classes of modules that import torch, which would take most of the time of each start.
handles, transfer = (sys.modules.setdefault(f"rlinf.engines.weight_{name}", ModuleType(name)) for name in ("handle", "transfer"))
WeightsRejectedError = type("WeightsRejectedError", (RLinfError,), {"__module__": "rlinf.engines.weight_handle"})
handles.WeightsRejectedError, transfer.PushHeader = WeightsRejectedError, type("PushHeader", (), {})

faulthandler.register(signal.SIGUSR2)
end_with(int(sys.argv[2]), sys.argv[3])
connection, faults, weight = Connection(int(sys.argv[1])), Path(__file__).parent, 0.0
tempfile.mkstemp()  # as vLLM, which does not remove it
while True:
    command, payload = connection.recv()
    for name in ("die", "die_always"):
        if (faults / name).exists() and command == (faults / name).read_text():
            if name == "die":
                (faults / name).unlink()
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    answer = None
    if command == "stop":
        end(sys.argv[3])
    elif command == "start":
        answer = ("error", ConfigError("no such setting")) if payload.model == "bad" else ("ok", 0)
    elif command == "start_push":
        header = payload
        answer = "ok", None
    elif command == "load" and not os.path.exists(payload.path):
        answer = "error", WeightsRejectedError("gone")
    elif command == "load":
        weight = float(Path(payload.path).read_text())
        answer = "ok", None
    elif command == "commit":
        answer = "ok", header.version
    elif command == "held":
        answer = "ok", None
    elif command == "sleep":
        weight = weight if payload else float("nan")
        answer = "ok", header.version if payload else None
    elif command == "wake":
        answer = "ok", None
    elif (faults / "hang").exists():
        time.sleep(600)
    else:
        answer = "ok", weight
    connection.send(answer)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A folder with the process that stands for vLLM's; a file named after a fault there brings it about."""
    (tmp_path / "process_of_a_test.py").write_text(SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vllm_engine, "PROCESS", "process_of_a_test")
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


@pytest.fixture
def engine(faults):
    engine = VllmEngine(
        SimpleNamespace(model="good", num_threads=1, num_gpus=1, settings_key="vllm_cfg"), timeout_s=280.0
    )
    yield engine
    engine.close()
    assert engine.pid is None
    assert not any((faults / "temporary").iterdir()), "nothing is left of it"


@dataclass
class Weights:
    """A source whose only bucket is a path."""

    path: str
    version: int
    manifest = None

    def builds_on(self, loaded):
        return False

    def buckets(self, trained_only):
        assert not trained_only
        yield SimpleNamespace(path=self.path)


@pytest.fixture
def weights(tmp_path):
    """What stands for a handle of one number."""

    def write(value, version):
        path = tmp_path / f"weights_{version}"
        path.write_text(str(value))
        return Weights(str(path), version)

    return write


def test_a_process_that_dies_is_replaced_by_one_with_the_same_weights(engine, faults, weights, caplog):
    assert engine.generate("request") == 0.0 and engine.num_starts == 1
    (faults / "die").write_text("generate")
    assert engine.generate("request") == 0.0 and engine.num_starts == 2, "those of the checkpoint, without an update"
    engine.update_weights(weights(2.0, version=3))
    first = engine.pid
    (faults / "die").write_text("generate")
    with caplog.at_level(logging.WARNING):
        assert engine.generate("request") == 2.0
    assert (engine.num_starts, engine.version) == (3, 3) and engine.pid != first
    assert "exit status -9) during 'generate'" in caplog.text and "last words" in caplog.text


def test_a_process_that_dies_of_a_request_twice_is_an_error_and_no_loop(engine, faults, weights):
    engine.update_weights(weights(2.0, version=1))
    (faults / "die_always").write_text("generate")
    with pytest.raises(EngineError, match="during 'generate'"):
        engine.generate("request")
    assert engine.num_starts == 2 and engine.pid is None
    (faults / "die_always").unlink()
    with pytest.raises(EngineError, match="has lost weights version 1.* Call update_weights"):
        engine.generate("request")


def test_a_sync_that_fails_is_repeated_with_a_new_process_once(engine, faults, weights, caplog):
    engine.update_weights(weights(2.0, version=1))
    (faults / "die").write_text("load")
    with caplog.at_level(logging.WARNING):
        assert engine.update_weights(weights(4.0, version=2)) == 2
    assert "during 'load'" in caplog.text
    assert engine.generate("request") == 4.0 and engine.num_starts == 2
    (faults / "die_always").write_text("load")
    with pytest.raises(EngineError, match="during 'load'"):
        engine.update_weights(weights(8.0, version=3))
    assert engine.num_starts == 3 and engine.pid is None


def test_a_new_process_never_plays_with_other_weights_than_those_it_was_given(engine, faults, weights):
    engine.update_weights(weights(2.0, version=0))
    engine.close()
    engine.start()
    with pytest.raises(EngineError, match="has lost weights version 0"):
        engine.generate("request")
    handle = weights(2.0, version=1)
    engine.update_weights(handle)
    os.remove(handle.path)
    (faults / "die").write_text("generate")
    with pytest.raises(WeightsRejectedError, match="gone"):
        engine.generate("request")
    with pytest.raises(EngineError, match="has lost weights version 1"):
        engine.generate("request")


@pytest.mark.parametrize("keeps", [True, False])
def test_an_engine_sleeps_until_it_is_needed_and_loads_again_what_it_did_not_keep(engine, weights, monkeypatch, keeps):
    engine.gpus, engine.spec.engine_args = ["0"], {"enable_sleep_mode": True}
    commands, send = [], engine.send
    monkeypatch.setattr(engine, "send", lambda command, payload: (commands.append(command), send(command, payload)))
    assert not engine.sleep(), "it has not started"
    engine.update_weights(weights(2.0, version=1))
    commands.clear()
    assert engine.sleep(keeps) and engine.sleep(keeps)
    assert commands == ["sleep"] and engine.version == (1 if keeps else None)
    assert engine.generate("request") == 2.0
    assert commands == ["sleep", "wake", *([] if keeps else ["start_push", "load", "commit"]), "generate"]
    engine.sleep(keeps)
    commands.clear()
    engine.update_weights(weights(4.0, version=2))
    assert commands == ["wake", "start_push", "load", "commit"], "new weights do not wait for the old ones"
    assert engine.generate("request") == 4.0 and engine.num_starts == 1
    engine.sleep(keeps)
    os.kill(engine.pid, signal.SIGKILL)
    assert engine.generate("request") == 4.0 and engine.num_starts == 2


@pytest.mark.parametrize(("gpus", "engine_args"), [([], {"enable_sleep_mode": True}), (["0"], {})])
def test_an_engine_that_cannot_release_memory_says_so(engine, weights, gpus, engine_args):
    engine.gpus, engine.spec.engine_args = gpus, engine_args
    engine.update_weights(weights(2.0, version=1))
    assert engine.sleep() is False and engine.generate("request") == 2.0


def test_a_process_that_does_not_answer_is_ended_and_tells_where_it_was(engine, faults, monkeypatch):
    engine.start()
    (faults / "hang").touch()
    monkeypatch.setattr("rlinf.distributed.stack_dump.MAX_POLLS", 600)
    engine.timeout_s = 0.5
    with pytest.raises(EngineError, match=r"vllm_cfg.timeout_s=1 (.|\n)*process_of_a_test"):
        engine.generate("request")
    assert engine.num_starts == 1 and engine.pid is None, "it is not asked again"


def test_refused_settings_end_the_process_and_are_the_users(faults):
    engine = VllmEngine(SimpleNamespace(model="bad", num_threads=1, num_gpus=1, settings_key="vllm_cfg"))
    with pytest.raises(ConfigError, match="no such setting"):
        engine.start()
    assert engine.pid is None and not any((faults / "temporary").iterdir())


PARENT = """
import os, signal, subprocess, sys
engine = subprocess.Popen(
    [sys.executable, "-m", "rlinf.engines.vllm_process", "0", str(os.getpid()), sys.argv[1]], start_new_session=True
)
print(engine.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_orphaned_while_it_imports_ends_and_removes_its_folder(tmp_path):
    """The import of vLLM takes half a minute on a busy machine; here it takes for ever."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    folder = tmp_path / "temporary"
    folder.mkdir()
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], env=environment, stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    assert parent.wait() == -signal.SIGKILL
    try:
        deadline = time.monotonic() + 60
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid) and not folder.exists()
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()
