"""Rollouts in processes: the same numbers as in threads, current weights, and an end that leaves nothing behind."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_tabletop import FaultyTabletop
from modules_note import note_modules

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.child_process import ChildProcess
from rlinf.distributed.parallel import empty_copy
from rlinf.envs import make_env
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.tabletop.env import TabletopVectorEnv
from rlinf.errors import ConfigError, RankError, RLinfError, SimulatorError
from rlinf.models import build_policy
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.process_collector import ProcessCollector, ProcessSettings
from rlinf.rollout.shared_memory import SharedTask, read_task
from rlinf.rollout.weight_push import WeightPush
from rlinf.rollout.worker_process import _Sender

NUM_ENVS, NUM_CHUNKS, GROUP_SIZE = 8, 5, 2
ENV_GROUPS = NUM_ENVS // GROUP_SIZE
CONFIG = build_config(
    compose_config(["model=mlp", "env.tasks=[reach,reach_zone]", "env.cameras=[]", "env.max_episode_steps=3"])
)


class Processes(ProcessCollector):
    def collect(self, *arguments, **options):
        return self.result(self.submit(*arguments, **options))


def make_parts(env_class=TabletopVectorEnv, **settings):
    env = make_env(CONFIG.env, 1, auto_reset=False)
    torch.manual_seed(0)
    model = build_policy(CONFIG, {"norm_stats": {"tabletop": env.action_statistics()}}).eval()
    num_groups = settings.get("num_envs", NUM_ENVS) // GROUP_SIZE
    sampler = EpisodeSampler(env.episode_specs("train"), 2, num_groups=num_groups, group_size=GROUP_SIZE, seed=3)
    env.close()
    settings = {"num_envs": NUM_ENVS, "num_chunks": NUM_CHUNKS, "temperature": 1.0} | settings
    return model, partial(RolloutCollector, partial(env_class, CONFIG.env, auto_reset=False), sampler, **settings)


@pytest.fixture(scope="module")
def parts():
    """A policy, collector in two threads, and one in two processes of the same policy."""
    model, make = make_parts()
    threads = make(num_worker_threads=2)
    processes = Processes(partial(make, num_worker_threads=1), model, num_env_groups=ENV_GROUPS, num_processes=2)
    yield model, threads, processes
    threads.close()
    processes.close()


def check_equal(batch, other, rounding=0.0):
    """Compare two rollouts: floats to ``rounding``, all else bit for bit."""
    assert batch.tensors().keys() == other.tensors().keys()
    for name, tensor in batch.tensors().items():
        torch.testing.assert_close(other.tensors()[name], tensor, atol=rounding, rtol=0, msg=name)
    np.testing.assert_allclose(batch.observation.state, other.observation.state, atol=rounding, rtol=0)
    assert batch.observation.instruction == other.observation.instruction
    assert batch.specs == other.specs
    for (env, one), (other_env, two) in zip(batch.episodes, other.episodes, strict=True):
        assert (env, one.spec, one.success, one.num_env_steps) == (other_env, two.spec, two.success, two.num_env_steps)
        assert one.episode_return == pytest.approx(two.episode_return, abs=rounding)


@pytest.mark.parametrize(("env_groups", "rounding"), [(None, 0), ([0, 3], 0), ([0, 1, 3], 1e-6)])
def test_processes_play_what_threads_play(parts, env_groups, rounding):
    """Bit for bit with an MLP where a process has as many rows as a thread: threads split a group, processes do not."""
    model, threads, processes = parts
    for step, attempt in ((0, 0), (7, 2)):
        options = {"needs_values": True, "attempt": attempt, "env_groups": env_groups}
        batch, other = (each.collect(model, step, 42, **options) for each in (threads, processes))
        check_equal(batch, other, rounding)
    with pytest.raises(AssertionError):  # control
        check_equal(batch, processes.collect(model, 8, 42, **options), 1e-6)


def test_a_rollout_stays_as_it_is_when_the_next_one_is_played(parts):
    model, _, processes = parts
    batch = processes.collect(model, 1, 42, needs_values=False)
    state, tokens = batch.observation.state.copy(), batch.action_tokens.clone()
    processes.collect(model, 2, 42, needs_values=False)
    np.testing.assert_array_equal(batch.observation.state, state)
    assert [os.fstat(worker.buffers[0].file.fileno()).st_size for worker in processes.workers] == [0, 0]
    assert torch.equal(batch.action_tokens, tokens)


def test_processes_compute_with_what_an_optimiser_and_a_checkpoint_have_written(parts):
    model, threads, processes = parts
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = processes.collect(model, 3, 0, needs_values=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.zero_grad()
    after = processes.collect(model, 3, 0, needs_values=True)
    check_equal(threads.collect(model, 3, 0, needs_values=True), after)
    assert (before.rollout_logprobs - after.rollout_logprobs).abs().max() > 1e-3
    model.load_state_dict(saved)
    check_equal(before, processes.collect(model, 3, 0, needs_values=True))


@pytest.mark.parametrize("is_replica", [False, True])
def test_a_rollout_is_played_with_the_weights_of_when_it_was_asked_for(is_replica):
    """Two are under way, and are taken in another order. ``is_replica``: what plays is the replica of a sharded policy."""
    model, make = make_parts(num_worker_threads=1)
    frozen, trained = list(model.parameters())[:2]
    frozen.requires_grad_(False)
    played = empty_copy(model, "cpu") if is_replica else model
    push = WeightPush(model, played)
    threads = make()
    collector = Processes(make, played, num_env_groups=ENV_GROUPS, num_processes=1, max_ahead=2)
    shared = next(played.parameters()).data_ptr()
    assert all(next(replica.parameters()).data_ptr() == shared for replica in collector.replicas)
    first, handles = trained.detach().clone(), []
    for version in (0, 1):
        push.push(version)
        handles.append(collector.submit(played, 5 + version, version, needs_values=True))
        with torch.no_grad():
            trained += 0.1
    with pytest.raises(RLinfError, match=r"copy of the weights"):
        collector.submit(played, 7, 2, needs_values=True)
    batches = {(6, 0, 0.1): collector.result(handles[1]), (5, 0, 0.0): collector.result(handles[0])}
    batches[5, 1, 0.0] = collector.result(collector.submit(played, 5, 0, needs_values=True, attempt=1))
    for (step, attempt, change), batch in batches.items():
        trained.data.copy_(first + change)
        check_equal(threads.collect(model, step, step - 5, needs_values=True, attempt=attempt), batch)
    with pytest.raises(AssertionError):  # control
        trained.data.copy_(first + 0.2)
        check_equal(threads.collect(model, 5, 0, needs_values=True), batch)
    threads.close()
    collector.close()


def test_weights_that_left_the_shared_memory_are_refused(parts):
    model, _, processes = parts
    parameter = next(model.parameters())
    shared = parameter.data
    parameter.data = shared.clone()
    with pytest.raises(RLinfError, match="1 tensors of the policy are not in the shared memory"):
        processes.collect(model, 0, 0, needs_values=False)
    parameter.data = shared
    processes.collect(model, 0, 0, needs_values=False)
    with pytest.raises(RLinfError, match="outdated weights"):
        processes.collect(make_parts()[0], 0, 0, needs_values=False)


def faulty(fault: str, file: Path, num_processes: int) -> tuple:
    model, make = make_parts(partial(FaultyTabletop, fault, str(file)), num_worker_threads=1)
    return model, Processes(make, model, num_env_groups=ENV_GROUPS, num_processes=num_processes)


@pytest.mark.parametrize(("fault", "error", "message"), [
    ("crash", RankError, "(?s)worker [01] was lost: killed by SIGSEGV.*faulty_tabletop"),
    ("bug", RankError, "(?s)worker [01] failed: ZeroDivisionError.*faulty_tabletop.py"),
    ("user error", SimulatorError, "^out of blocks$"),
])  # fmt: skip
def test_a_worker_that_fails_ends_the_rollout_with_its_cause_and_all_workers(tmp_path, fault, error, message):
    model, collector = faulty(fault, tmp_path / "once", 2 if fault == "crash" else 1)
    processes = [worker.process for worker in collector.workers]
    with pytest.raises(error, match=message):
        collector.collect(model, 0, 0, needs_values=False)
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(RLinfError, match="have ended"):
        collector.collect(model, 0, 0, needs_values=False)
    collector.close()


def test_what_workers_log_and_warn_arrives_here(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="rlinf"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, collector = faulty("warn", tmp_path / "once", 2)
        processes = [worker.process for worker in collector.workers]
        collector.collect(model, 0, 0, needs_values=False)
    assert "the table is 7 m wide" in caplog.messages
    assert ["the table wobbles"] == list({str(each.message) for each in caught if each.category is UserWarning})
    # A terminal or a batch system signals all processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        for process in processes:
            process.send_signal(number)
    collector.collect(model, 0, 0, needs_values=False)
    collector.close()
    assert [process.returncode for process in processes] == [0, 0]


def test_workers_end_with_a_parent_that_is_killed():
    model, make = make_parts()
    code = "import time; from test_process_collector import *; model, make = make_parts(); "
    code += "made = ProcessCollector(make, model, num_env_groups=ENV_GROUPS, num_processes=1); "
    code += "print(*[worker.process.pid for worker in made.workers], flush=True); time.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    numbers = [int(word) for word in parent.stdout.readline().split()]
    assert len(numbers) == 1
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{number}").exists() for number in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Uncopied:
    def __reduce__(self):
        raise RuntimeError("no copies")


class Views(torch.nn.Module):
    """A weight, and one more tensor of its first or second half, which is kept as ``kind`` says."""

    def __init__(self, kind, first):
        super().__init__()
        memory = torch.zeros(8)
        self.weight = torch.nn.Parameter(memory[:4])
        view = memory[first : first + 4]
        if kind == "buffer":
            self.register_buffer("view", view)
        else:
            self.views = {"view": [view]}


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_memory_of_several_tensors_is_not_moved(kind):
    model = Views(kind, first=3)
    before = model.weight.data_ptr()
    with pytest.raises(ConfigError, match="two of its tensors are views of the same memory"):
        SharedTask(model, model)
    assert model.weight.data_ptr() == before
    model = Views(kind, first=4)  # neighbours in one storage, as in a file of weights
    assert SharedTask(model, model).moved() == []


def test_a_weight_needs_gradients_in_a_worker_as_in_the_policy():
    """torch chooses kernels by it, also where no gradients are computed, and different kernels round differently."""
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    task = SharedTask(model, model)
    same = read_task(task.memory.map, task.start, task.size)
    assert same.weight.requires_grad and not same.bias.requires_grad and torch.equal(same.weight, model.weight)


def test_a_process_that_cannot_start_leaves_none_and_a_policy_that_plays(monkeypatch):
    model, make = make_parts(num_worker_threads=1)
    launched, launch = [], ChildProcess.launch

    def launch_one(self, *args):
        if launched:
            raise OSError(errno.EAGAIN, "no more processes")
        launch(self, *args)
        launched.append(self.process)

    monkeypatch.setattr(ChildProcess, "launch", launch_one)
    with pytest.raises(ConfigError, match="cannot be started: BlockingIOError.*no more processes"):
        ProcessCollector(make, model, num_env_groups=ENV_GROUPS, num_processes=2)
    assert [process.poll() is not None for process in launched] == [True]
    threads = make(autocast=nullcontext)
    threads.collect(model, 0, 0, needs_values=False)
    threads.close()


def test_workers_prepare_before_they_import_user_code_and_say_what_keeps_them_from_starting(tmp_path):
    model, make = make_parts(partial(FaultyTabletop, "start", str(tmp_path / "once")), num_worker_threads=1)
    prepare = partial(note_modules, str(tmp_path / "modules"))
    collector = Processes(make, model, ProcessSettings(prepare=prepare), num_env_groups=ENV_GROUPS, num_processes=1)
    process = collector.workers[0].process
    with pytest.raises(SimulatorError, match="no table"):
        collector.wait_until_ready()
    assert process.poll() is not None
    assert (tmp_path / "modules").read_text() == "False"


def test_each_worker_has_random_numbers_that_repeat(tmp_path):
    drawn = []
    for seed in (1, 1, 2):
        model, make = make_parts(partial(FaultyTabletop, "draw", str(tmp_path / "drawn")), num_worker_threads=1)
        collector = Processes(make, model, ProcessSettings(seed=seed), num_env_groups=ENV_GROUPS, num_processes=2)
        collector.wait_until_ready()
        collector.close()
        drawn.append(sorted((tmp_path / "drawn").read_text().split()))
        (tmp_path / "drawn").unlink()
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 2


def test_records_to_a_parent_that_has_left_are_dropped_and_answers_are_not():
    mine, theirs = Pipe()
    mine.close()
    sender = _Sender(theirs)
    sender.put_nowait("a record")
    with pytest.raises(BrokenPipeError):
        sender.send("an answer")


def test_what_cannot_be_sent_is_refused_before_a_process_starts(monkeypatch):
    model, make = make_parts()
    with pytest.raises(ConfigError, match="cannot be sent to a different process.*lambda"):
        ProcessCollector(partial(make, make_env=lambda count: None), model, num_env_groups=ENV_GROUPS, num_processes=2)
    monkeypatch.setattr(type(model), "__module__", "__main__")
    with pytest.raises(ConfigError, match="MLPForRLActionPrediction is defined in the main script"):
        ProcessCollector(make, model, num_env_groups=ENV_GROUPS, num_processes=2)
    with pytest.raises(ConfigError, match="cannot be sent to a different process: RuntimeError: no copies"):
        ProcessCollector(partial(make, make_env=Uncopied()), model, num_env_groups=ENV_GROUPS, num_processes=2)
    with pytest.raises(ValueError, match="4 env groups on 3 ranks"):
        ProcessCollector(make, model, num_env_groups=ENV_GROUPS, num_processes=3)
