"""Runs whose rollouts are played by processes."""

import pytest
from run_results import QUIET, run_config, untimed_metrics

from rlinf.commands.train import build, train
from rlinf.errors import RankError
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.process_collector import ProcessCollector

SHORT = [
    "experiment=quickstart", *QUIET, "rollout.num_envs=8", "rollout.num_chunks=4", "trainer.minibatch_size=16",
    "model.micro_batch_size=16", "trainer.max_steps=2", "trainer.eval_every=0", "trainer.adam_eps=1e-3", "sft.max_steps=0",
    "evaluation.num_episodes=2", "evaluation.num_envs=2",
]  # fmt: skip


def test_processes_train_as_threads_do(tmp_path, capsys):
    runs = {}
    for name, overrides in {
        "processes": ["rollout.worker_processes=2"],
        "threads": [],
        "other": ["trainer.learning_rate=1e-3"],
    }.items():
        run = build(run_config(tmp_path / name, *SHORT, *overrides))
        assert type(run.rl.collector) is (ProcessCollector if name == "processes" else RolloutCollector)
        run.execute()
        number = "2 processes" if name == "processes" else "2 threads"
        assert f"rollout workers per rank: {number}" in capsys.readouterr().out
        assert run.rollout_workers == number
        runs[name] = untimed_metrics(tmp_path / name)

    def check(lines, others):
        assert [line.keys() for line in lines] == [line.keys() for line in others]
        for line, other in zip(lines, others, strict=True):
            for key, value in line.items():
                if isinstance(value, str):
                    assert other[key] == value
                    continue
                assert other[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key

    check(runs["threads"], runs["processes"])
    with pytest.raises(AssertionError):  # control
        check(runs["threads"], runs["other"])


def test_a_worker_that_is_killed_ends_the_run_with_its_cause_and_the_other_worker(tmp_path, monkeypatch):
    processes = []
    issue = ProcessCollector.submit

    def kill_one(self, *args, **kwargs):
        processes.extend(worker.process for worker in self.workers)
        processes[0].kill()
        return issue(self, *args, **kwargs)

    monkeypatch.setattr(ProcessCollector, "submit", kill_one)
    with pytest.raises(RankError, match="Rollout worker 0 was lost: killed by SIGKILL"):
        train(run_config(tmp_path, *SHORT, "rollout.worker_processes=2"))
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)
