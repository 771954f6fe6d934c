"""The connection of a process to Ray, with a module in its place that notes what it draws."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace

import pytest

from rlinf.distributed.ray.cluster import initialise
from rlinf.errors import ConfigError

HEAD = "192.0.2.1:6379"


def numbers_after(init) -> float:
    """Seed, connect with ``init``, and return the next number."""
    context = SimpleNamespace(gcs_address=HEAD)
    random.seed(5)
    assert initialise(SimpleNamespace(init=init, get_runtime_context=lambda: context), HEAD) == HEAD
    return random.random()


def test_two_ranks_of_one_seed_have_connections_of_two_names_and_the_same_numbers_afterwards():
    """Ray draws the name from Python's random numbers; if two have one name, the head answers only one of them."""
    names = []
    numbers = [numbers_after(lambda **_: names.append(random.getrandbits(64))) for _ in range(2)]
    random.seed(5)
    assert len(set(names)) == 2 and numbers == [random.random()] * 2


def test_a_connection_that_fails_leaves_the_numbers_as_they_were():
    def reject(**_):
        raise ConnectionError("nobody listens")

    random.seed(5)
    before = random.getstate()
    with pytest.raises(ConfigError, match=f"cannot connect to {HEAD}: nobody listens"):
        initialise(SimpleNamespace(init=reject), HEAD)
    assert random.getstate() == before


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
def test_ray_draws_names_from_pythons_numbers():
    """If this fails, ``initialise`` need not seed them any more."""
    from ray._raylet import GcsErrorSubscriber

    before = random.getstate()
    GcsErrorSubscriber(worker_id=b"x" * 28, address="127.0.0.1:1")
    assert random.getstate() != before
