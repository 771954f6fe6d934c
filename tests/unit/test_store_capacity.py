"""The store of objects of a cluster that a run starts has room for the run, or the run is rejected."""

from types import SimpleNamespace

import pytest

from rlinf.cluster import reservation
from rlinf.distributed.ray.cluster import OBJECT_STORE_BYTES
from rlinf.errors import ConfigError
from rlinf.preflight.placement import FreeCapacity

GIB = 2**30


def node(name: str, size: int) -> dict:
    return {"NodeID": name, "NodeManagerHostname": name, "Resources": {"object_store_memory": size}}


def ray_of(own: str, nodes: list[dict]) -> SimpleNamespace:
    context = SimpleNamespace(get_node_id=lambda: own)
    return SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context)


def size_of(num_bytes: int) -> int:
    return reservation._store_size(FreeCapacity(num_bytes, "smaller=true"))


def test_a_store_is_as_large_as_the_run_needs_or_the_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(reservation, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * GIB))
    assert size_of(GIB // 2) == OBJECT_STORE_BYTES, "other things pass through it, too"
    assert size_of(7 * GIB) == 7 * GIB
    with pytest.raises(
        ConfigError, match=rf"need 9.* but {tmp_path} has 8.* free.*--shm-size={9 * GIB}.*set smaller=true"
    ):
        size_of(9 * GIB)
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    assert size_of(GIB // 2) == GIB, "a small machine"


def test_the_machines_whose_stores_must_suffice_are_those_of_players_and_ranks(monkeypatch):
    pytest.importorskip("ray", reason="not installed: ray; extra 'ray'")
    tables = {"workers": {0: "a", 1: "b"}, "ranks": {0: "c"}}
    monkeypatch.setattr("ray.util.placement_group_table", lambda group: {"bundles_to_node_id": tables[group]})

    def check(groups, small):
        nodes = [node(name, GIB // (1 + (name == small))) for name in ("a", "b", "c", "command", "unused")]
        reservation._check_stores(ray_of("command", nodes), groups, FreeCapacity(GIB, "smaller=true"))

    for groups, rejected, allowed in (
        (["workers"], ["a", "b", "command"], ["c", "unused"]),  # the ranks are on the machine of the command
        (["workers", "ranks"], ["a", "b", "c"], ["command", "unused"]),
    ):
        for name in rejected:
            with pytest.raises(ConfigError, match=f"object store has 512.* on {name}; expected 1"):
                check(groups, name)
        for name in allowed:
            check(groups, name)
