"""The connection of a process to Ray, with a module in its place that notes what it draws."""

from __future__ import annotations

import random
from types import SimpleNamespace

from rlinf.distributed.ray_cluster import initialise


def test_two_ranks_of_one_seed_have_connections_of_two_names_and_the_same_numbers_afterwards():
    """Ray draws the name from Python's random numbers; the head would send what two of one name ask for to one of them."""
    names, numbers = [], []
    context = SimpleNamespace(gcs_address="192.0.2.1:6379")
    ray = SimpleNamespace(init=lambda **_: names.append(random.getrandbits(64)), get_runtime_context=lambda: context)
    for _ in range(2):
        random.seed(5)
        assert initialise(ray, context.gcs_address) == context.gcs_address
        numbers.append(random.random())
    random.seed(5)
    assert len(set(names)) == 2 and numbers == [random.random()] * 2
