"""The store of objects of a cluster that a run starts has room for the run, or the run is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlinf.cluster import reservation
from rlinf.distributed.ray_cluster import OBJECT_STORE_BYTES
from rlinf.errors import ConfigError

GIB = 2**30


def test_a_store_is_as_large_as_the_run_needs_or_the_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(reservation, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * GIB))
    assert reservation._room(GIB // 2) == OBJECT_STORE_BYTES, "other things pass through it, too"
    assert reservation._room(7 * GIB) == 7 * GIB
    with pytest.raises(
        ConfigError, match=rf"need 9.* and {tmp_path} has 8.* free.*--shm-size={9 * GIB}.*set model.is_lora"
    ):
        reservation._room(9 * GIB)
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    assert reservation._room(GIB // 2) == GIB, "a small machine"
