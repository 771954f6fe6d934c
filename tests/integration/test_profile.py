"""``trainer.profile_steps``: a trace of the steps asked for, which Perfetto can read, with a link in the report."""

import gzip
import json

import pytest
import torch

from rlinf.commands.train import train
from rlinf.report.run_page import write_report
from rlinf.training.rl_trainer import RLTrainer
from tests.run_results import QUIET, REACH, run_config, untimed_metrics, weights_of

SMALL = [
    *REACH, *QUIET, "rollout.num_envs=8", "rollout.num_chunks=8", "trainer.minibatch_size=32", "model.micro_batch_size=32",
    "trainer.max_steps=3", "evaluation.num_episodes=4", "evaluation.num_envs=4",
]  # fmt: skip
CLONING = ["sft.max_steps=4", "sft.num_demonstrations=2", "sft.batch_size=8", "trainer.max_steps=0"]


def trace_of(folder, rank: int = 0) -> list[dict]:
    """Return the events of a trace that have a duration."""
    path = folder / "profile" / f"trace_rank{rank}.json.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert sorted(path.parent.iterdir())[rank] == path, "no partial file is left"
    return [event for event in events if event.get("ph") == "X"]


def names_of(events: list[dict]) -> set[str]:
    return {event["name"] for event in events}


def within(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_a_window_of_rl_is_written_and_linked_and_changes_no_number(tmp_path):
    train(run_config(tmp_path / "plain", *SMALL))
    train(run_config(tmp_path / "run", *SMALL, "trainer.profile_steps=[1,2]"))
    events = trace_of(tmp_path / "run")
    steps = {event["name"]: event for event in events if event["name"].startswith("rl step")}
    assert sorted(steps) == ["rl step 1", "rl step 2"]
    for part in ("rollout", "policy call", "score", "update", "aten::addmm", "Optimizer.step#MasterAdamW.step"):
        found = [event for event in events if event["name"] == part]
        assert found and any(within(event, steps["rl step 2"]) for event in found), part
    calls = {event["tid"] for event in events if event["name"] == "policy call"}
    assert calls.isdisjoint({steps["rl step 1"]["tid"]}), "the policy acts in threads of the rollout"
    assert 'href="profile/trace_rank0.json.gz"' in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "steps 1 to 2" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "plain")
    ours, plain = (weights_of(tmp_path / name, "rl_000003") for name in ("run", "plain"))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in ours.items())
    assert not (tmp_path / "plain" / "profile").exists()
    assert "Profile</h2>" not in write_report(tmp_path / "plain").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "inside", "outside"),
    [(["trainer.profile_steps=[3,3]"], {"sft step 3", "update"}, {"sft step 2", "policy call"}),
     (["trainer.max_steps=1", "trainer.profile_steps=[0,0]"], {"rl step 0"}, {"sft step 0"})],
    ids=["a run that only clones", "cloning before RL"],
)  # fmt: skip
def test_a_window_holds_steps_of_the_last_phase_only(tmp_path, overrides, inside, outside):
    train(run_config(tmp_path, *SMALL, *CLONING, *overrides))
    names = names_of(trace_of(tmp_path))
    assert inside <= names and names.isdisjoint(outside)


def test_a_run_that_fails_within_the_window_leaves_what_was_recorded(tmp_path, monkeypatch):
    played = RLTrainer.iteration

    def fails(self, step):
        if step == 2:
            raise RuntimeError("planted")
        return played(self, step)

    monkeypatch.setattr(RLTrainer, "iteration", fails)
    with pytest.raises(RuntimeError, match="planted"):
        train(run_config(tmp_path, *SMALL, "trainer.profile_steps=[1,2]"))
    assert "rl step 1" in names_of(trace_of(tmp_path))


def test_every_rank_writes_its_own(tmp_path):
    train(run_config(tmp_path, *SMALL, "cluster.num_processes=2", "trainer.max_steps=1", "trainer.profile_steps=[0,0]"))
    for rank in range(2):
        assert {"rl step 0", "policy call"} <= names_of(trace_of(tmp_path, rank))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('href="profile/trace_rank') == 2
