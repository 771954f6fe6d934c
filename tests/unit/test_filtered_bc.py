"""How filtered behaviour cloning draws its episodes and joins their datasets."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from rlinf.offpolicy.filtered_bc import FilteredBCTrainer, JoinedRows, batches, draw_specs
from rlinf.types import EpisodeSpec, Observation

AVAILABLE = [EpisodeSpec("suite", task, state, 0) for state in range(30) for task in range(3)]


def counts_of(specs: list[EpisodeSpec]) -> list[int]:
    return np.bincount([spec.task_id for spec in specs], minlength=3).tolist()


def test_a_task_gets_its_fraction_of_the_episodes():
    weights = np.array([0.62, 0.08, 0.3])
    drawn = [draw_specs(AVAILABLE, weights, 25, seed) for seed in range(200)]
    assert all(len(set(specs)) == 25 for specs in drawn), "no episode twice"
    counts = np.array([counts_of(specs) for specs in drawn])
    assert set(counts[:, 0]) == {15, 16} and set(counts[:, 1]) == {2} and set(counts[:, 2]) == {7, 8}
    np.testing.assert_allclose(counts.mean(0), 25 * weights, atol=0.1)  # 15.5 +- 0.035 for the first task
    assert drawn[0] == draw_specs(AVAILABLE, weights, 25, 0) != drawn[1]


def test_a_repeated_episode_has_another_seed():
    specs = draw_specs(AVAILABLE, np.ones(3) / 3, 120, 0)  # 40 of the 30 per task
    assert counts_of(specs) == [40, 40, 40] and len(set(specs)) == 120
    assert sum(spec.seed == 0 for spec in specs) == 90


def test_an_env_rarely_changes_its_task():
    specs = draw_specs(AVAILABLE, np.array([0.5, 0.2, 0.3]), 50, 0)
    parts = batches(specs, 8)
    assert sorted(map(len, parts)) == [7] * 6 + [8] and sorted(sum(parts, []), key=str) == sorted(specs, key=str)
    slots = [[part[slot].task_id for part in parts if slot < len(part)] for slot in range(8)]
    assert sum(np.count_nonzero(np.diff(tasks)) for tasks in slots) <= 2, "at most once per boundary between tasks"


def test_tasks_are_drawn_by_their_failures():
    trainer = FilteredBCTrainer.__new__(FilteredBCTrainer)
    trainer.env = SimpleNamespace(task_names=["hard", "easy", "new"])
    trainer.counts = {"hard": [0, 8], "easy": [8, 8]}
    trainer.config = SimpleNamespace(task_sampling="failures")
    # Failure rates under Laplace's rule: 9/10, 1/10, 1/2.
    np.testing.assert_allclose(trainer._weights(), np.array([9, 1, 5]) / 15)
    trainer.config.task_sampling = "uniform"
    np.testing.assert_allclose(trainer._weights(), np.ones(3) / 3)


class Rows:
    """A dataset whose images, states and actions are its rows' numbers."""

    def __init__(self, start: int, length: int) -> None:
        self.numbers = np.arange(start, start + length)

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        numbers = self.numbers[index]
        images = np.broadcast_to(numbers[:, None, None, None], (len(index), 2, 2, 3)).astype(np.uint8)
        observation = Observation({"front": images}, numbers[:, None].astype(np.float32), [str(n) for n in numbers])
        return observation, torch.from_numpy(numbers)[:, None, None].float()


def test_joined_rows_are_those_of_all_datasets():
    joined, index = JoinedRows([Rows(0, 4), Rows(4, 1), Rows(5, 7)]), np.array([11, 0, 4, 4, 3, 5])
    assert len(joined) == 12
    observation, actions = joined.rows(index)
    assert sorted(actions.flatten().tolist()) == sorted(index.tolist())
    numbers = actions.flatten().numpy()
    assert (observation.images["front"][:, 0, 0, 0] == numbers).all() and (observation.state[:, 0] == numbers).all()
    assert observation.instruction == [str(int(number)) for number in numbers]
