"""How much an actor changes of the actions of the frozen policy, in each task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rlinf.distributed.process_group import gather_objects


class Corrections:
    """The corrections of an iteration: the action of the actor without noise minus the greedy one of the frozen policy.

    Sizes are mean absolute changes of a number, in halves of the range of the env. The iteration's own noise is not in them, except for a
    actor of noise: what the frozen policy would say without it is not asked.
    """

    def __init__(self, task_names: Sequence[str]) -> None:
        self.task_names = task_names
        self._tasks: dict[int, str] = {}  # of each env
        self._sums: dict[str, np.ndarray] = {}  # of each task: policy calls, sizes

    def begin(self, row: int, task_id: int) -> None:
        """Note that an env starts an episode of a task."""
        self._tasks[row] = self.task_names[task_id]

    def add(self, base: Tensor, actions: Tensor) -> None:
        """Add a policy call of every env: greedy chunks ``base`` and ``actions`` of the actor without noise, ``[B, C * D]`` both."""
        sizes = (actions.float() - base.float()).abs().double().flatten(1).mean(1).tolist()
        for row, size in enumerate(sizes):
            task = self._tasks[row]
            self._sums[task] = self._sums.get(task, 0) + np.array([1, size])

    def metrics(self) -> dict[str, float]:
        """Return the mean size, over all and of each task, of all ranks (a collective call)."""
        sums: dict[str, np.ndarray] = {}
        for part in gather_objects(self._sums):
            for task, added in part.items():
                sums[task] = sums.get(task, 0) + added
        if not sums:
            return {}
        count, size = np.sum(list(sums.values()), axis=0)
        sizes = {f"rollout/residual_norm/{task}": float(one[1] / one[0]) for task, one in sorted(sums.items())}
        return {"rollout/residual_norm": float(size / count), **sizes}
