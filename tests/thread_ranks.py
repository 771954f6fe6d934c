"""Ranks of an evaluation as threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rlinf.evaluation.evaluator import RankGroup

T = TypeVar("T")


def on_threads(num_ranks: int, function: Callable[[RankGroup], T]) -> list[T]:
    """Call ``function`` for each rank in a thread, and return the results in rank order."""
    barrier, made = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks

    def call(rank: int) -> T:
        def gather(part: Callable[[], Any]) -> list[Any]:
            made[rank] = part()
            barrier.wait()
            everything = list(made)
            barrier.wait()
            return everything

        try:
            return function(RankGroup(rank, num_ranks, gather))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(call, range(num_ranks)))
