"""The vector env of processes: the same numbers however it is cut, and what happens when a worker is lost."""

import gc
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from processes import is_running
from walk_env import WalkConfig, WalkVectorEnv

from rlinf.contracts.env import equal_rows, run_episodes, spread_specs
from rlinf.distributed.stack_dump import DUMP_SIGNAL, dump_stacks
from rlinf.envs.config import EnvConfig, with_share_of_cores
from rlinf.envs.process.env import Worker
from rlinf.errors import ConfigError, SimulatorError
from rlinf.evaluation.fingerprint import MAX_TRIES, take_fingerprint

NUM_ENVS = 4
PATIENCE_S = 60.0
"""How long to wait for what a defect would put off for longer, on a busy machine too."""


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setattr("rlinf.envs.process.env.CLOSE_TIMEOUT_S", 1.0)


@pytest.fixture
def make(tmp_path):
    """``make(num_envs, auto_reset, **settings)``; ``make.fault("step raise")`` plants a fault."""
    envs = []

    def build(num_envs=NUM_ENVS, auto_reset=False, **settings):
        settings = {"num_processes": 2, "fault_file": str(tmp_path / "fault"), **settings}
        envs.append(build.of(WalkConfig(**settings), num_envs, auto_reset))
        return envs[-1]

    def fault(text):
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", tmp_path / "fault")

    build.fault, build.of = fault, WalkVectorEnv
    build.remove_fault = lambda: (tmp_path / "fault").unlink()
    yield build
    for env in envs:
        env.close()


def pids(env):
    return [process.pid for process in env.worker_processes()]


def zeros(env, chunk_len=1):
    return np.zeros((env.num_envs, chunk_len, env.action_dim), np.float32)


def test_numbers_do_not_depend_on_the_number_of_processes(make):
    """None, three for four envs (so that they own different numbers of rows), and nine, which are cut to one per env."""
    recordings, extras = [], []
    for num_processes in (0, 3, 9):
        env = make(num_processes=num_processes)
        specs = spread_specs(env, NUM_ENVS)
        recordings.append(run_episodes(env, specs, env.max_episode_steps))
        env.reset(options={"episodes": specs})
        frames = env.render_frames([3, 0, 2], 20)
        positions = [pose["point"] for pose in env.poses([2, 3, 0])]
        extras.append((env.expert_actions(aim_offset_m=(0.1, 0.0)), frames, positions))
        num_workers = min(max(num_processes, 1), NUM_ENVS)
        assert len({pose["pid"][0] for pose in env.poses(range(NUM_ENVS))}) == num_workers
    first, (actions, frames, positions) = recordings[0], extras[0]
    assert len({step.executed.sum() for step in first.steps}) > 1  # episodes of different length
    for other, (their_actions, their_frames, their_positions) in zip(recordings[1:], extras[1:], strict=True):
        assert equal_rows(first.first, other.first) and len(first.steps) == len(other.steps)
        for one, two in zip(first.steps, other.steps, strict=True):
            assert equal_rows(one.observation, two.observation)
            for name in ("rewards", "executed", "terminated", "truncated", "success", "final_env_ids", "lost_env_ids"):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
            assert one.episodes == two.episodes
        np.testing.assert_array_equal(actions, their_actions)
        np.testing.assert_array_equal(frames, their_frames)
        assert positions == their_positions
    assert len(np.unique(frames[:, 0, 0, 0])) == 3  # control: the images differ, so their order is seen


def test_workers_have_one_thread_each_and_no_torch(make):
    env = make(num_processes=1)
    env.reset()
    for pose in env.poses(range(NUM_ENVS)):
        assert pose["threads"] == [1.0, 0.0] and pose["pid"] != [os.getpid()] and pose["torch"] == [0.0]


def test_pictures_cross_in_shared_memory_and_not_through_the_pipe(make, monkeypatch):
    env, answers, receive = make(image_size=64), [], Worker.receive
    env.reset()
    monkeypatch.setattr(Worker, "receive", lambda *given: answers.append(receive(*given)) or answers[-1])
    images = env.chunk_step(zeros(env)).observation.images
    sent, nbytes = len(pickle.dumps(answers)), sum(image.nbytes for image in images.values())
    print(f"{sent / NUM_ENVS:.0f} bytes through a pipe for each env step, {nbytes / NUM_ENVS:.0f} bytes of images")
    assert len(answers) == 2 and 0 < sent < nbytes / 10


def test_what_was_handed_out_is_not_written_again(make):
    env = make(num_processes=1)
    seen, _ = env.reset()
    images, state = {name: image.copy() for name, image in seen.images.items()}, seen.state.copy()
    step = env.chunk_step(zeros(env, 2) + 1)
    assert not np.array_equal(step.observation.state, state)
    np.testing.assert_array_equal(seen.state, state)
    for name, image in images.items():
        np.testing.assert_array_equal(seen.images[name], image)


def actions_of(specs, step):
    """``[B, 2, 2]`` that depend on episode and step only, and bring nobody to the middle soon."""
    return np.stack([np.full((2, 2), 0.02 * (1 + spec.init_state_id) * (step + 1), np.float32) for spec in specs])


def undisturbed(make, specs, num_chunks):
    env = make(len(specs), num_processes=0)
    first, _ = env.reset(options={"episodes": specs})
    return first, [env.chunk_step(actions_of(specs, step)) for step in range(num_chunks)]


def test_a_killed_worker_loses_its_episodes_and_only_these_and_they_begin_again(make, caplog):
    env = make(max_episode_steps=8)
    specs = spread_specs(env, NUM_ENVS)
    first, reference = undisturbed(make, specs, 4)
    env.reset(options={"episodes": specs})
    env.chunk_step(actions_of(specs, 0))
    os.kill(pids(env)[1], signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "rlinf"):
        step = env.chunk_step(actions_of(specs, 1))
    assert step.lost_env_ids.tolist() == [2, 3] and step.lost_env_ids.dtype == np.int64 and env.num_restarts == 1
    assert "SIGKILL" in caplog.text and "envs [2, 3]" in caplog.text and "restart 1 of 20" in caplog.text
    assert not step.executed[2:].any() and not step.rewards[2:].any() and step.executed[:2].all()
    assert not (step.terminated | step.truncated).any() and step.final_observation is None
    assert equal_rows(step.observation.select([2, 3]), first.select([2, 3]))
    assert equal_rows(step.observation.select([0, 1]), reference[1].observation.select([0, 1]))
    results = []
    for number in range(4):  # rows 2 and 3 play their episode from its start, rows 0 and 1 are two chunks ahead
        mixed = np.concatenate([actions_of(specs, number + 2)[:2], actions_of(specs, number)[2:]])
        step = env.chunk_step(mixed)
        results += step.episodes
        assert equal_rows(step.observation.select([2, 3]), reference[number].observation.select([2, 3]))
        np.testing.assert_array_equal(step.rewards[2:], reference[number].rewards[2:])
        assert not len(step.lost_env_ids)
    expected = [result for step in reference for result in step.episodes]
    assert sorted(results, key=lambda r: r.spec) == sorted(expected, key=lambda r: r.spec) and len(results) == NUM_ENVS


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", ["RuntimeError: the gripper fell off", "in _fault", "walk_env.py"]),
        ("exit", ["lost: ended with status 7"]),
        ("crash", ["SIGSEGV", "Fatal Python error", "in _fault"]),
        ("hang", ["made no progress for 1 s (env.step_timeout_s)", "in fall_asleep", "walk_env.py"]),
        ("grip", ["made no progress for 1 s (env.step_timeout_s)", "in _fault", "walk_env.py"]),
    ],
)
def test_a_simulator_that_fails_in_a_step_shows_its_traceback_and_is_replaced(make, caplog, monkeypatch, what, words):
    monkeypatch.setattr("rlinf.distributed.stack_dump.MAX_POLLS", 600)
    env = make(num_envs=2, num_processes=1, step_timeout_s=1.0 if what in ("hang", "grip") else PATIENCE_S)
    env.reset()
    make.fault(f"step {what}")
    with caplog.at_level(logging.WARNING, "rlinf"):
        step = env.chunk_step(zeros(env, 2))
    assert step.lost_env_ids.tolist() == [0, 1] and env.num_restarts == 1
    for word in words:
        assert word in caplog.text
    assert env.chunk_step(zeros(env, 2)).executed.all()


def test_the_stacks_of_a_process_that_is_slow_to_write_them_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf.distributed.stack_dump.MAX_POLLS", 600)
    script = f"import faulthandler, time; faulthandler.register({int(DUMP_SIGNAL)}); print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script]
    with open(tmp_path / "log", "w+") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        threading.Timer(1.0, process.send_signal, [signal.SIGCONT]).start()
        dump_stacks(process, log)
        process.kill()
    assert 'File "<string>", line 1 in <module>' in (tmp_path / "log").read_text()


def test_the_deadline_is_of_a_step_and_not_of_a_chunk(make, monkeypatch):
    """10 steps of 1 s by the clock of the deadline of 1 s, which is looked at more often than they end."""
    env = make(num_processes=1, num_envs=1, step_sleep_s=0.1, step_timeout_s=1.0, max_episode_steps=10)
    env.reset()
    clock = SimpleNamespace(monotonic=lambda: float(env._rows["num_calls"].sum()))
    monkeypatch.setattr("rlinf.envs.process.env.POLL_S", 0.05)
    monkeypatch.setattr("rlinf.envs.process.env.time", clock)
    step = env.chunk_step(zeros(env, 10))
    assert not len(step.lost_env_ids) and step.executed.all()


@pytest.mark.parametrize("name", ["reset_timeout_s", "step_timeout_s"])
def test_a_reset_and_a_step_have_deadlines_of_their_own(make, name, caplog, tmp_path):
    """The reset hangs: only the short ``reset_timeout_s`` notices it soon."""
    env = make(num_processes=1, **{"reset_timeout_s": 600.0, "step_timeout_s": 600.0, name: 1.0})
    make.fault("reset hang")
    thread = threading.Thread(target=env.reset)
    with caplog.at_level(logging.WARNING, "rlinf"):
        thread.start()
        while thread.is_alive() and (tmp_path / "fault").exists():
            time.sleep(0.01)
        thread.join(PATIENCE_S if name == "reset_timeout_s" else 1.5)
    if name == "reset_timeout_s":
        assert not thread.is_alive() and "reset made no progress for 1 s (env.reset_timeout_s)" in caplog.text
        return
    assert thread.is_alive() and not env.num_restarts
    os.kill(pids(env)[0], signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and env.num_restarts == 1


def test_a_loss_outside_of_a_step_is_told_at_the_next_one_which_is_not_applied(make):
    for where, call in (("expert", lambda e: e.expert_actions()), ("render", lambda e: e.render_frames([0, 3], 16))):
        env = make()
        first, _ = env.reset()
        env.chunk_step(zeros(env, 1) + 0.5)
        make.fault(f"{where} raise")
        assert len(call(env)) in (4, 2) and env.num_restarts == 1
        step = env.chunk_step(zeros(env, 1) + 0.5)
        lost = step.lost_env_ids
        assert lost.tolist() in ([0, 1], [2, 3])
        assert equal_rows(step.observation.select(lost), first.select(lost)) and not step.executed[lost].any()
        assert not equal_rows(step.observation, first)


def test_a_loss_while_the_next_episode_begins_keeps_what_had_ended(make):
    """Row 0 ends with the second chunk; its reset brings the worker of the rows 0 and 1 down."""
    env = make(auto_reset=True, terminate_on_success=True)
    specs = spread_specs(env, NUM_ENVS)
    env.reset(options={"episodes": specs, "next_episode": lambda row: specs[row]})
    first = env._observation
    make.fault("reset raise")
    actions = zeros(env, 3)
    actions[0] = 1.0  # out of the square: row 0 fails
    while True:
        step = env.chunk_step(actions)
        if len(step.final_env_ids):
            break
    assert step.final_env_ids.tolist() == [0] and step.terminated.tolist() == [True, False, False, False]
    assert step.lost_env_ids.tolist() == [1] and env.num_restarts == 1
    assert step.episodes[0].spec == specs[0] and step.rewards[0].any() and step.executed[0].any()
    assert not step.executed[1].any() and not step.rewards[1].any() and step.executed[2:].all()
    assert equal_rows(step.observation.select([0, 1]), first.select([0, 1]))
    assert env._stats.num_steps.tolist()[:2] == [0, 0]


def test_a_frozen_row_is_not_lost(make):
    env = make(max_episode_steps=2, num_processes=1)
    specs = spread_specs(env, NUM_ENVS)
    env.reset(options={"episodes": specs})
    step = env.chunk_step(zeros(env, 2))
    assert len(step.episodes) == NUM_ENVS
    for pid in pids(env):
        os.kill(pid, signal.SIGKILL)
    after = env.chunk_step(zeros(env, 2))
    assert not len(after.lost_env_ids) and not len(after.final_env_ids)
    assert equal_rows(after.observation, step.observation)
    env.render_frames([0, 3], 16)
    assert env.num_restarts == 1
    after = env.chunk_step(zeros(env, 2))
    assert not len(after.lost_env_ids) and not after.executed.any()


def test_rows_without_an_episode_cost_no_simulator_and_workers_of_such_rows_are_not_started(make):
    env = make(6, num_processes=3)
    specs = [*spread_specs(env, 3), None, None, None]  # of the workers' rows [0, 1], [2, 3] and [4, 5]
    first, reference = undisturbed(make, specs[:3], 2)
    seen, _ = env.reset(options={"episodes": specs})
    assert len(pids(env)) == 2 and equal_rows(seen.select(range(3)), first)
    assert env._rows["num_calls"].tolist() == [3, 3, 3, 0, 0, 0]  # made, reset, shown
    step = env.chunk_step(np.concatenate([actions_of(specs[:3], 0), np.ones((3, 2, 2), np.float32)]))
    assert equal_rows(step.observation.select(range(3)), reference[0].observation) and not step.executed[3:].any()
    assert env.expert_actions()[:3].all() and not env.expert_actions()[3:].any()
    for call in (lambda: env.render_frames([0, 4], 16), lambda: env.poses([4])):
        with pytest.raises(ConfigError, match=r"called for the envs \[4\], which have no episode"):
            call()
    os.kill(pids(env)[1], signal.SIGKILL)
    step = env.chunk_step(zeros(env))
    assert step.lost_env_ids.tolist() == [2] and equal_rows(step.observation.select([2]), first.select([2]))
    assert len(pids(env)) == 2 and env._rows["num_calls"][3:].tolist() == [0, 0, 0]
    env.reset(options={"episodes": [None] * 3 + specs[:3]})
    assert len(pids(env)) == 3 and env._rows["num_calls"][3:].tolist() == [3, 3, 3]


class FragileVectorEnv(WalkVectorEnv):
    simulator_class = "walk_env:FragileSimulator"


def test_a_simulator_that_always_fails_in_one_episode_ends_the_run_and_the_episode_is_named(make):
    """Steps that go well lie between the failures; the other episodes, and the task "near", are innocent."""
    make.of = FragileVectorEnv
    env = make(num_processes=1, max_episode_steps=50)
    specs = spread_specs(env, NUM_ENVS)
    guilty = next(row for row, spec in enumerate(specs) if spec.task_id == 1)
    env.reset(options={"episodes": specs})
    with pytest.raises(SimulatorError, match="(?s)RuntimeError: unstable.*failure 3 in.*env.num_processes=0") as caught:
        for _ in range(20):
            env.chunk_step(zeros(env))
    assert f"{specs[guilty]} of the task 'far' in env {guilty}. " in str(caught.value) and env.num_restarts == 3


def test_failures_in_different_episodes_do_not_end_the_run(make):
    make.of = FragileVectorEnv
    env = make(num_envs=1, num_processes=1, max_episode_steps=50, tasks=["far"])
    for spec in env.episode_specs("train")[:4]:
        env.reset(options={"episodes": [spec]})
        assert env.chunk_step(zeros(env, 3)).lost_env_ids.tolist() == [0]
    assert env.num_restarts == 4


@pytest.mark.parametrize(("num_processes", "wrong", "words"), [
    (0, "state", r"state as float32 \(1,\); expected float32 \(2,\)"), (1, "image", r"images\['front'\] as uint8 \(15, 15, 3\)"),
])  # fmt: skip
def test_a_simulator_that_shows_something_else_than_declared_is_refused(make, num_processes, wrong, words):
    with pytest.raises(ConfigError, match=words):
        make(num_processes=num_processes, wrong=wrong).reset()


def test_threads_may_use_an_env_each(make):
    """As the worker threads of a rollout do; the processes outlive the thread that started them."""
    envs = [make(2, num_processes=1), make(2, num_processes=1)]

    def reset_and_step(env):
        env.reset(options={"episodes": spread_specs(env, 2)})
        return [env.chunk_step(zeros(env) + 0.1) for _ in range(3)][-1].observation

    with ThreadPoolExecutor(2) as threads:
        assert equal_rows(*threads.map(reset_and_step, envs))
    time.sleep(1.2)  # longer than a process takes to notice the end of its parent
    assert not any(len(env.chunk_step(zeros(env)).lost_env_ids) for env in envs)


def test_a_closed_env_says_so(make):
    env = make(max_restarts=0)
    env.reset()
    os.kill(pids(env)[0], signal.SIGKILL)
    with pytest.raises(SimulatorError, match="env.max_restarts=0"):
        env.chunk_step(zeros(env))
    others = make(), make(num_processes=0)
    for other in others:
        other.reset()
        other.close()
    for closed in (env, *others):
        for call in (lambda: closed.chunk_step(zeros(closed)), closed.reset, lambda: closed.render_frames([0], 16)):  # noqa: B023
            with pytest.raises(SimulatorError, match="env.name=walk is closed.*Build a new env"):
                call()


def test_the_deadline_holds_for_a_message_that_a_stopped_worker_does_not_read(make, monkeypatch):
    monkeypatch.setattr("rlinf.distributed.stack_dump.MAX_POLLS", 2)  # a stopped process cannot write its stacks
    env = make(num_processes=1, step_timeout_s=1.0, max_episode_steps=50_000)
    env.reset()
    os.kill(pids(env)[0], signal.SIGSTOP)
    actions = zeros(env, 40_000)
    assert actions.nbytes > 1 << 20  # control: more than the pipe takes without a reader
    thread = threading.Thread(target=env.chunk_step, args=(actions,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and env.num_restarts == 1


@pytest.mark.parametrize("num_processes", [0, 2])
def test_offloading_ends_the_workers_until_the_next_reset(make, num_processes):
    env = make(num_processes=num_processes)
    specs = spread_specs(env, NUM_ENVS)
    first, reference = undisturbed(make, specs, 1)
    env.reset(options={"episodes": specs})
    known = pids(env)
    assert len(known) == num_processes
    env.offload()
    assert not any(map(is_running, known)) and not pids(env)
    for call in (lambda: env.chunk_step(zeros(env)), env.expert_actions, lambda: env.poses([0])):
        with pytest.raises(ConfigError, match="call reset"):
            call()
    again, _ = env.reset(options={"episodes": specs})
    step = env.chunk_step(actions_of(specs, 0))
    assert equal_rows(again, first) and equal_rows(step.observation, reference[0].observation)
    assert not len(step.lost_env_ids) and env.num_restarts == 0


def test_envs_that_step_at_the_same_time_share_the_cores(monkeypatch):
    monkeypatch.setattr("rlinf.envs.config.num_cores", lambda: 12)
    counts = [with_share_of_cores(WalkConfig(), sharers).num_processes for sharers in (1, 2, 8, 100)]
    assert counts == [12, 6, 1, 1]
    assert [with_share_of_cores(WalkConfig(num_processes=n), 2).num_processes for n in (0, 5)] == [0, 5]
    assert with_share_of_cores(EnvConfig(), 2) == EnvConfig()


def test_kills_from_outside_end_the_run_at_the_limit_alone_and_leave_nothing_open(make):
    """A worker is killed before it has answered anything but the resets of its restarts."""
    env, num_files = make(num_envs=1, num_processes=1, max_restarts=4), set()
    env.reset()
    gc.collect()  # files of other tests
    for _ in range(4):
        os.kill(pids(env)[0], signal.SIGKILL)
        assert env.chunk_step(zeros(env)).lost_env_ids.tolist() == [0]
        num_files.add(len(os.listdir("/proc/self/fd")))
    assert env.num_restarts == 4 and len(num_files) == 1 and env.chunk_step(zeros(env)).executed.all()
    os.kill(pids(env)[0], signal.SIGKILL)
    with pytest.raises(SimulatorError, match=r"(?s)SIGKILL.*\(env.max_restarts=4\).*set env.max_restarts=10"):
        env.chunk_step(zeros(env))


def test_an_error_of_the_user_is_raised_as_itself_without_a_restart(make):
    env = make()
    env.reset()
    make.fault("step reject")
    with pytest.raises(ConfigError, match="^there is no such gripper. Set env.gripper=two$"):
        env.chunk_step(zeros(env))
    assert env.num_restarts == 0
    env.reset()  # both workers are still there, and no answer is left in a pipe
    assert env.chunk_step(zeros(env)).executed.all() and env.num_restarts == 0


def test_a_simulator_that_workers_cannot_import_is_refused_and_experts_are_known_without_a_process(make):
    def env_of(simulator):
        return type("Other", (WalkVectorEnv,), {"simulator_class": simulator})

    with pytest.raises(ConfigError, match="(?s)__main__:MySimulator.*env.name=walk.*env.num_processes=0"):
        env_of("__main__:MySimulator")(WalkConfig(), 1, False)
    env_of("__main__:MySimulator")(WalkConfig(num_processes=0), 1, False)
    make.of = env_of("no_such_module:Simulator")
    with pytest.raises(SimulatorError, match="(?s)No module named 'no_such_module'.*before any simulator ran"):
        make(num_envs=1, num_processes=1).reset()
    assert WalkVectorEnv.has_expert(None) and not env_of("rlinf.envs.process.simulator:Simulator").has_expert(None)


@pytest.mark.parametrize("fault", [None, "close hang", "step hang"])
def test_closing_ends_every_process(make, fault):
    """Also of a worker that hangs while it closes, or in a step that nobody waits for any more."""
    env = make(num_envs=2, step_timeout_s=100.0)
    env.reset()
    known = pids(env)
    if fault is not None:
        make.fault(fault)
    if fault == "step hang":
        env._workers[0].send(("step_chunk", ([0], zeros(env)[:1], np.array([5]))), 1.0)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < PATIENCE_S and not any(map(is_running, known))


def test_time_in_which_the_parent_stood_still_does_not_count(make, monkeypatch):
    """Ctrl-Z, or a machine that stalled: before the first look at a step, which continues until the third, 100 s pass."""
    env = make(num_processes=1, num_envs=1, step_timeout_s=60.0)
    env.reset()
    times = itertools.chain([0.0], itertools.count(100.0, 0.1))

    def clock():
        now = next(times)
        if now > 100.15:
            os.kill(pids(env)[0], signal.SIGCONT)
        return now

    monkeypatch.setattr("rlinf.envs.process.env.POLL_S", 0.1)
    monkeypatch.setattr("rlinf.envs.process.env.time", SimpleNamespace(monotonic=clock))
    os.kill(pids(env)[0], signal.SIGSTOP)
    step = env.chunk_step(zeros(env))
    assert not len(step.lost_env_ids) and env.num_restarts == 0


def test_an_interrupt_leaves_no_answer_for_the_next_call(make, tmp_path):
    """Ctrl-C in a chunk in which one worker hangs; then the env starts again, and tells of the new episode."""
    env = make(step_sleep_s=0.3)
    specs = spread_specs(env, NUM_ENVS)
    first, reference = undisturbed(make, specs, 1)
    env.reset(options={"episodes": specs})
    known = pids(env)

    def interrupt():
        while (tmp_path / "fault").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    make.fault("step hang")
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        env.chunk_step(zeros(env, 8) + 1)
    thread.join()
    assert not any(map(is_running, known))
    again, _ = env.reset(options={"episodes": specs})
    assert equal_rows(again, first)
    step = env.chunk_step(actions_of(specs, 0))
    assert equal_rows(step.observation, reference[0].observation)
    assert not len(step.lost_env_ids) and env.num_restarts == 0


def test_the_deadline_holds_for_the_rest_of_an_answer(make):
    """Of a worker that is stopped while it sends: the parent has seen the start, and waits for no more than that."""
    env = make(num_envs=1, num_processes=1, step_timeout_s=1.0)
    env.reset()
    worker = env._workers[0]
    os.kill(worker.process.pid, signal.SIGSTOP)
    here, there = socket.socketpair()
    there.sendall(struct.pack("!i", 1000) + b"the first of 1000 bytes")
    os.dup2(here.fileno(), worker.connection.fileno())
    worker.send(("poses", ([0],)), 1.0)
    thread = threading.Thread(target=lambda: failures.append(worker.receive(1.0, "poses")), daemon=True)
    failures = []
    thread.start()
    thread.join(PATIENCE_S)
    assert "poses made no progress for 1 s (env.step_timeout_s)" in failures[0].message


def test_a_fingerprint_whose_steps_always_fail_ends_the_run(make):
    make.of = FragileVectorEnv
    env = make(num_envs=2, num_processes=1, max_episode_steps=50, tasks=["far"])
    with pytest.raises(SimulatorError, match="env.num_processes=0"):
        take_fingerprint(env)
    assert env.num_restarts == MAX_TRIES < env.config.max_restarts
