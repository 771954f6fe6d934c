"""Demonstrations: labels, shuffling, reading ahead, episodes that an env loses, statistics for the model."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.data.config import ExpertConfig
from rlinf.data.frames import Frames
from rlinf.data.rows import Prefetcher, shuffled_rows
from rlinf.data.stored import DatasetInfo, StoredDemonstrations
from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.errors import ConfigError, UnreadableRowError
from rlinf.rollout.demonstrations import Demonstrations, ScriptedExpert, collect_demonstrations, run_episodes
from rlinf.seeding import derive_seed
from rlinf.tracking.progress import Progress
from rlinf.training import cloning_trainer, train_worker
from rlinf.training.action_trainer import TrainerContext
from rlinf.training.cloning_trainer import CloningTrainer
from rlinf.training.loop import Loop
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopSignal
from rlinf.types import Observation


@pytest.mark.parametrize(("num_rows", "batch_size"), [(7, 3), (10, 5), (4, 11)])
def test_every_epoch_is_a_permutation_of_all_rows(num_rows, batch_size):
    steps = [shuffled_rows(num_rows, step, batch_size, seed=3) for step in range(-(-4 * num_rows // batch_size))]
    drawn = np.concatenate(steps)[: 4 * num_rows].reshape(4, num_rows)
    for epoch in drawn:
        assert sorted(epoch) == list(range(num_rows))
    assert len({tuple(epoch) for epoch in drawn}) > 1, "epochs have orders of their own"


def test_the_rows_of_a_step_depend_on_step_and_seed_alone():
    alone = shuffled_rows(50, 9, 8, seed=1)
    after_others = [shuffled_rows(50, step, 8, seed=1) for step in (30, 0, 9)][-1]
    np.testing.assert_array_equal(alone, after_others)
    assert not np.array_equal(alone, shuffled_rows(50, 9, 8, seed=2))


def slow_labels(episodes: list[np.ndarray], chunk_len: int) -> np.ndarray:
    """One row at a time, from lists."""
    rows = []
    for actions in episodes:
        for t in range(len(actions)):
            rows.append([actions[t + k] if t + k < len(actions) else actions[-1] for k in range(chunk_len)])
    return np.array(rows)


class Numbered(Frames):
    """Images whose first pixel is the row."""

    def read(self, rows):
        images = np.zeros((len(rows), 2, 2, 3), np.uint8)
        images[:, 0, 0, 0] = rows
        return images


def stored(lengths=(3, 1, 6, 2), chunk_len=4, seed=0) -> tuple[StoredDemonstrations, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    episodes = [rng.normal(size=(length, 2)).astype(np.float32) for length in lengths]
    info = DatasetInfo("folder", "a test", len(lengths), {}, {}, "state", 2)
    number = np.repeat(np.arange(len(lengths)), lengths)
    actions = np.concatenate(episodes)
    state = rng.normal(size=(len(actions), 3)).astype(np.float32)
    return StoredDemonstrations(
        info, {"front": Numbered()}, state, actions, number % 2, ["left", "right"], number, chunk_len
    ), episodes


@pytest.mark.parametrize("chunk_len", [1, 4, 9])
def test_labels_are_the_following_actions_of_the_episode(chunk_len):
    dataset, episodes = stored(chunk_len=chunk_len)
    observation, actions = dataset.rows(np.arange(len(dataset)))
    np.testing.assert_array_equal(actions.numpy(), slow_labels(episodes, chunk_len))
    np.testing.assert_array_equal(observation.images["front"][:, 0, 0, 0], np.arange(len(dataset)))
    assert observation.instruction == [("left", "right")[e % 2] for e in dataset.episode_ids]
    assert dataset.num_episodes == len(episodes)
    if chunk_len > 1:
        joined = np.concatenate(episodes)
        across = joined[np.minimum(np.arange(len(joined))[:, None] + np.arange(chunk_len), len(joined) - 1)]
        assert not np.array_equal(actions.numpy(), across), "labels that run into the next episode are told apart"


def test_a_dataset_gives_the_same_rows_as_demonstrations_in_memory():
    dataset, episodes = stored()
    observation, actions = dataset.rows(np.arange(len(dataset)))
    memory = Demonstrations(observation, actions, [])
    for step in range(5):
        index = shuffled_rows(len(dataset), step, 5, seed=2)
        (first, labels), (second, others) = dataset.rows(index), memory.rows(index)
        assert torch.equal(labels, others) and first.instruction == second.instruction
        np.testing.assert_array_equal(first.images["front"], second.images["front"])
        np.testing.assert_array_equal(first.state, second.state)


class Recording:
    """Demonstrations that note which rows are read, and a worker that notes what it is given, in one."""

    num_episodes = 2

    def __init__(self, dataset):
        self.dataset, self.read, self.given, self.unreadable = dataset, [], [], dataset.unreadable
        self.actions, self.state = dataset.actions, dataset.state
        self.model = SimpleNamespace(sft_chunk_len=1, action_range=None, state_range=None)
        self.train_step = SimpleNamespace()

    def __len__(self):
        return len(self.dataset)

    def rows(self, index):
        self.read.append(index.tolist())
        return self.dataset.rows(index)

    def sft_update(self, observation, actions, num_rows, step, seed):
        self.given.append((observation.images["front"][:, 0, 0, 0].tolist(), num_rows, step, seed))
        return {"loss": 0.0}


@pytest.mark.parametrize(("batch_size", "ranks"), [(6, 1), (6, 2), (7, 2), (5, 3), (1, 2)])
def test_every_rank_reads_the_rows_that_it_trains_on_and_no_others(monkeypatch, batch_size, ranks):
    config = build_config(compose_config(["sft.max_steps=4", f"sft.batch_size={batch_size}"]))
    found = []
    for rank in range(ranks):
        monkeypatch.setattr(train_worker, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(train_worker, "world_size", lambda: ranks)
        source = Recording(stored()[0])
        state = LoopState()
        loop = Loop(
            state, Path(), config.trainer, {}, checkpoints=None, stop_signal=StopSignal(announce=False),
            progress=Progress(enabled=False),
        )  # fmt: skip
        monkeypatch.setattr(loop, "save", lambda is_last: None)
        loop.fit(CloningTrainer(TrainerContext(config, loop, source, sync=None, evaluator=None), source))
        assert source.read == [rows for rows, *_ in source.given] and state.sft_step == 4
        found.append(source)
    seed = derive_seed(config.seed, "sft")
    for step in range(4):
        index = shuffled_rows(len(found[0]), step, batch_size, seed).tolist()
        assert {source.given[step][1:] for source in found} == {
            (batch_size, step, derive_seed(config.seed, "sft noise", step))
        }
        shares = [source.read[step] for source in found]
        assert {len(share) for share in shares} == {-(-batch_size // ranks)}, "collective calls must be equally many"
        joined = [row for rows in zip(*shares, strict=True) for row in rows]
        assert joined[:batch_size] == index and set(joined[batch_size:]) <= {index[-1]}


class Unreadable(Recording):
    """Rows of which number 5 has no image."""

    def rows(self, index):
        if 5 in index:
            raise UnreadableRowError("row 5 is damaged. Use another dataset")
        return super().rows(index)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_row_that_cannot_be_read_ends_the_run_once_all_steps_are_saved(monkeypatch, tmp_path, num_workers, elsewhere):
    config = build_config(compose_config(["sft.max_steps=9", "sft.batch_size=2", "sft.dataset=x"]))
    config.sft.num_workers = num_workers
    seed, num_rows = derive_seed(config.seed, "sft"), len(stored()[0])
    last = next(step for step in range(9) if 5 in shuffled_rows(num_rows, step, 2, seed))
    assert last > 0
    source, saved, state = (Recording if elsewhere else Unreadable)(stored()[0]), [], LoopState()
    loop = Loop(
        state, tmp_path, config.trainer, {}, checkpoints=None, stop_signal=StopSignal(announce=False), progress=Progress(enabled=False),
    )  # fmt: skip
    monkeypatch.setattr(loop, "save", lambda is_last=False: saved.append(state.sft_step))
    if elsewhere:  # another rank cannot read its row
        monkeypatch.setattr(cloning_trainer, "any_rank", lambda mine: mine or len(source.given) == last)
        monkeypatch.setattr(cloning_trainer, "gather_objects", lambda mine: [mine, "row 5 is damaged"])
    trainer = CloningTrainer(TrainerContext(config, loop, source, sync=None, evaluator=None), source)
    with pytest.raises(UnreadableRowError, match="row 5 is damaged.*sft.skip_unreadable_rows=true") as caught:
        loop.fit(trainer)
    trainer.close()
    assert saved == [last] and len(source.given) == last and str(tmp_path) in str(caught.value)


def numbered_batch(step: int):
    time.sleep(0.002 * (step % 3))  # so that later batches may be ready earlier
    return Observation({}, None, [str(step)]), torch.tensor([step])


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_come_in_order_from_the_first_step_on(num_workers):
    with Prefetcher(numbered_batch, 5, num_workers) as batches:
        assert [int(batches.next()[1]) for _ in range(20)] == list(range(5, 25))


def test_batches_are_made_ahead_and_not_without_limit():
    made: list[int] = []
    enough = threading.Event()

    def make_batch(step: int):
        made.append(step)
        if len(made) == 4:
            enough.set()
        return numbered_batch(step)

    with Prefetcher(make_batch, 0, 2):
        assert enough.wait(60), "nothing was asked for yet, and batches are there"
        time.sleep(0.05)
        assert sorted(made) == [0, 1, 2, 3]
    made.clear()
    with Prefetcher(make_batch, 0, 0) as batches:
        assert made == []
        batches.next()
        assert made == [0]


def test_an_error_of_a_thread_reaches_the_trainer_and_the_threads_end():
    def make_batch(step: int):
        if step == 2:
            raise ConfigError("row 7 is damaged")
        return numbered_batch(step)

    with pytest.raises(ConfigError, match="row 7 is damaged"), Prefetcher(make_batch, 0, 2) as batches:
        for _ in range(3):
            batches.next()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("data")] == []


def tabletop(num_envs: int):
    return make_env(TabletopConfig(tasks=["reach", "reach_zone"], state="none"), num_envs, auto_reset=False)


EXPERT = ExpertConfig(jitter=0.3)


class Flaky:
    """An env that loses one row at one step: its episode starts again."""

    def __init__(self, env, row: int, at: int):
        self.env, self.row, self.at, self.steps = env, row, at, 0

    def __getattr__(self, name):
        return getattr(self.env, name)

    def chunk_step(self, actions):
        self.steps += 1
        if self.steps == self.at:
            self.env._reset_envs(np.array([self.row]), [self.env.current_specs()[self.row]])
            self.env._lost[self.row] = True
        step = self.env.chunk_step(actions)
        assert step.lost_env_ids.tolist() == ([self.row] if self.steps == self.at else [])
        return step


def episode_of(batch, row: int):
    times = np.flatnonzero(batch.alive[:, row])
    return times, batch.labels[times, row], np.stack([batch.seen[t].images["front"][row] for t in times])


def test_an_episode_that_begins_again_is_recorded_from_its_new_begin():
    env = tabletop(num_envs=3)
    specs = env.episode_specs("train")[:3]
    plain = run_episodes(env, specs, ScriptedExpert(env, EXPERT, 0, range(3)))
    lossy = run_episodes(Flaky(env, row=1, at=2), specs, ScriptedExpert(env, EXPERT, 0, range(3)))
    env.close()
    for row in range(3):
        times, labels, images = episode_of(plain, row)
        lossy_times, lossy_labels, lossy_images = episode_of(lossy, row)
        shift = 2 if row == 1 else 0
        np.testing.assert_array_equal(lossy_times, times + shift)
        np.testing.assert_array_equal(lossy_labels, labels)
        np.testing.assert_array_equal(lossy_images, images)
        assert lossy.last[row] == lossy_times[-1]
    assert lossy.results == plain.results
    assert not lossy.alive[:2, 1].any() and plain.alive[:2, 1].all()


def test_labels_in_memory_follow_the_episode_and_rewards_belong_to_it():
    env = tabletop(num_envs=4)
    found = collect_demonstrations(env, 4, EXPERT, 3, seed=5)
    rng = np.random.default_rng(derive_seed(5, "demonstrations"))
    specs, count = env.episode_specs("train"), len(env.task_names)
    drawn = [specs[int(rng.integers(len(specs) // count)) * count + i % count] for i in range(4)]
    batch = run_episodes(env, drawn, ScriptedExpert(env, EXPERT, 5, range(4)))
    env.close()
    episodes = [episode_of(batch, row)[1] for row in range(4)]
    expected = slow_labels(episodes, 3)
    assert sorted(map(bytes, found.actions.numpy())) == sorted(map(bytes, expected)), "the same rows, in another order"
    for row, result in enumerate(batch.results):
        times = np.flatnonzero(batch.alive[:, row])
        assert batch.rewards[times, row].sum() == pytest.approx(result.episode_return, rel=1e-5)
        assert batch.success[times, row].any() == result.success and len(times) == result.num_env_steps


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_demonstrations_do_not_depend_on_the_number_of_envs_and_no_episode_is_played_to_fill_rows(
    num_envs, monkeypatch
):
    env, begun = tabletop(num_envs=num_envs), []
    reset = env._reset_env
    monkeypatch.setattr(env, "_reset_env", lambda index, spec: (begun.append(spec), reset(index, spec)))
    found = collect_demonstrations(env, 5, EXPERT, 1, seed=5)
    env.close()
    one = tabletop(num_envs=1)
    batches = [run_episodes(one, [spec], ScriptedExpert(one, EXPERT, 5, [k])) for k, spec in enumerate(begun)]
    one.close()
    assert len(begun) == 5 and found.episodes == [batch.results[0] for batch in batches if batch.results[0].success]
    expected = np.concatenate([batch.labels for batch in batches if batch.results[0].success])
    assert sorted(map(bytes, found.actions.numpy())) == sorted(map(bytes, expected))
