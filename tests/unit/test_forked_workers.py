"""The server that forks workers of Ray in the tests starts programs for its own user only."""

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: bash scripts/setup.sh --ray")
from forked_workers import NAME, forked_workers


def test_the_server_listens_in_a_folder_of_this_user():
    places = []
    for _ in range(2):
        with forked_workers():
            places.append(Path(os.environ[NAME]))
            found = places[-1].parent.stat()
            assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.getuid(), 0o700)
        assert not places[-1].parent.exists()
    assert places[0] != places[1], "no name can be guessed"
