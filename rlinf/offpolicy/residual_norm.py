"""Metric that measures how much an actor changes the base policy's actions, per task."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rlinf.distributed.process_group import gather_objects


class ResidualNorm:
    """Mean absolute difference between the actor's and the base policy's greedy actions, normalised, over an iteration."""

    def __init__(self, task_names: Sequence[str]) -> None:
        self.task_names = task_names
        self._tasks: dict[int, str] = {}  # by env
        self._sums: dict[str, np.ndarray] = {}  # by task: number of policy calls, sum of their norms

    def start_episode(self, row: int, task_id: int) -> None:
        """Record that an env has started an episode of a task."""
        self._tasks[row] = self.task_names[task_id]

    def add(self, base: Tensor, actions: Tensor) -> None:
        """Add one policy call per env: the base policy's greedy chunks and the actor's ``actions``, both ``[B, C * D]``."""
        norms = (actions.float() - base.float()).abs().double().flatten(1).mean(1).tolist()
        for row, norm in enumerate(norms):
            task = self._tasks[row]
            self._sums[task] = self._sums.get(task, 0) + np.array([1, norm])

    def metrics(self) -> dict[str, float]:
        """Return the mean over all tasks and for each task, across all ranks (a collective call)."""
        sums: dict[str, np.ndarray] = {}
        for rank_sums in gather_objects(self._sums):
            for task, added in rank_sums.items():
                sums[task] = sums.get(task, 0) + added
        if not sums:
            return {}
        count, total = np.sum(list(sums.values()), axis=0)
        by_task = {f"rollout/residual_norm/{task}": float(norm / n) for task, (n, norm) in sorted(sums.items())}
        return {"rollout/residual_norm": float(total / count), **by_task}
