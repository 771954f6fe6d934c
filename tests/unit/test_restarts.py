"""From where ranks that Ray has started start again when one is lost."""

import json
from contextlib import nullcontext

import pytest
from run_results import run_config

from rlinf.checkpoints.checkpoint import set_aside_later
from rlinf.commands.train import train
from rlinf.errors import RankError, RankKilledError


@pytest.fixture
def launches(monkeypatch):
    """A list of what each launch resumes; ``steps`` of functions that are called in its place."""
    resumed, steps = [], []

    def launch(config, reservation):
        resumed.append(config.resume)
        steps[len(resumed) - 1]()

    monkeypatch.setattr("rlinf.commands.train._launch", launch)
    monkeypatch.setattr("rlinf.commands.train.reserved", lambda config: nullcontext())
    return resumed, steps


def save(folder, step):
    """Save a checkpoint as small as can be."""
    checkpoint = folder / "checkpoints" / f"rl_{step:06}"
    checkpoint.mkdir(parents=True)
    state = {"saved_at": 1.0 + step, "loop_state": {"phase": "rl", "step": step}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    return checkpoint


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """A checkpoint without a file "damaged" is whole."""
    damage = lambda folder, _: "a file has changed" if (folder / "damaged").exists() else None  # noqa: E731
    monkeypatch.setattr("rlinf.checkpoints.folders.damage_of", damage)


def lose(*acts):
    """Do something, then lose a rank."""

    def step():
        for act in acts:
            act()
        raise RankKilledError("Rank 1 was killed by SIGKILL")

    return step


def configured(folder, *overrides):
    return run_config(folder, "model=mlp", "cluster.start=ray", "cluster.num_processes=2", *overrides)


def test_a_run_that_begins_at_an_earlier_checkpoint_does_not_go_on_from_a_later_one_that_it_has_passed_over(
    tmp_path, launches
):
    resumed, steps = launches
    second, fifth = save(tmp_path, 2), save(tmp_path, 5)
    steps += [lose(), lose(lambda: set_aside_later(second), lambda: save(tmp_path, 5)), lambda: None]
    train(configured(tmp_path, f"resume={second}"))
    assert resumed == [str(second), str(second), str(fifth)], "the last one is that of the new run"


def test_control_a_later_checkpoint_of_the_run_itself_is_gone_on_from(tmp_path, launches):
    resumed, steps = launches
    second = save(tmp_path, 2)
    steps += [lose(lambda: save(tmp_path, 3)), lambda: None]
    train(configured(tmp_path, f"resume={second}"))
    assert resumed == [str(second), str(tmp_path / "checkpoints" / "rl_000003")]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path, launches):
    resumed, steps = launches
    steps += [lose(lambda: (save(tmp_path, 1) / "damaged").touch()), lambda: None]
    with pytest.raises(RankKilledError, match="Rank 1 was killed") as caught:
        train(configured(tmp_path))
    assert resumed == [None] and "all damaged" in caught.value.__notes__[0]


def test_a_run_without_a_checkpoint_begins_again(tmp_path, launches):
    resumed, steps = launches
    steps += [lose(), lambda: None]
    train(configured(tmp_path))
    assert resumed == [None, None]


def test_ranks_that_get_no_further_start_again_twice(tmp_path, launches):
    """Such as those whose memory does not suffice; others lose as many ranks as is allowed."""
    resumed, steps = launches
    steps += [lose(), lose(lambda: save(tmp_path, 1)), lose(), lose(lambda: save(tmp_path, 2)), lose(), lose(), lose()]
    with pytest.raises(RankKilledError) as caught:
        train(configured(tmp_path))
    first, second = (str(tmp_path / "checkpoints" / f"rl_00000{step}") for step in (1, 2))
    assert resumed == [None, None, first, first, second, second]
    assert "giving up after two restarts from" in caught.value.__notes__[0] and second in caught.value.__notes__[0]


def test_nothing_starts_again_without_the_cluster(tmp_path, launches, monkeypatch):
    resumed, steps = launches
    steps += [lose(), lambda: None]
    monkeypatch.setattr("rlinf.commands.train.cluster_lost", lambda: RankError("the head is lost"))
    with pytest.raises(RankKilledError):
        train(configured(tmp_path))
    assert resumed == [None]
