"""A machine on which a rollout worker may play, and machines that are rejected before anything is loaded there."""

import os
from dataclasses import replace

import pytest
from run_results import run_config

from rlinf.cluster import reservation
from rlinf.cluster.machine import CommandMachine
from rlinf.errors import ConfigError
from rlinf.preflight.placement import check_placement

ray = pytest.importorskip("ray", reason="Ray is not installed (scripts/setup.sh --ray)")
SPLIT = ["experiment=quickstart", "cluster.start=ray", "cluster.placement=disaggregated"]


def other(machine):
    return replace(machine, host="elsewhere", software=machine.software | {"version of torch": "1.0"})


def test_a_player_with_other_software_than_the_ranks_is_refused_before_it_reads_its_arguments():
    """Also one that takes the place of another, on a machine that has joined the cluster since."""
    from rlinf.cluster.ray_actor import RolloutWorkerActor

    failure = RolloutWorkerActor().build(other(CommandMachine.here([])), b"not a pickle")
    assert failure.error == "ConfigError" and "version of torch: machine 1 on" in failure.message
    assert "machine 0 on elsewhere has 1.0" in failure.message
    failure = RolloutWorkerActor().build(
        CommandMachine.here([]), b"not a pickle"
    )  # control: read, because the machine is alike
    assert failure.error is None and "Unpickling" in failure.message


def test_a_plugin_is_part_of_the_software(tmp_path):
    plugin = tmp_path / "a_plugin_of_players.py"
    plugin.write_text("VALUE = 1\n")
    machine = CommandMachine.here([str(plugin)])
    machine.check()
    plugin.write_text("VALUE = 2\n")
    with pytest.raises(ConfigError, match=r"plugin .*a_plugin_of_players.py \(sha256\)"):
        machine.check()


class Stop(Exception):
    pass


def test_an_empty_address_is_none(tmp_path, monkeypatch):
    """Rollout workers get a cluster of this machine's own, as env nodes do."""
    asked = []

    def initialise(module, address, **settings):
        asked.append((address, settings, os.environ["CUDA_VISIBLE_DEVICES"]))
        raise Stop

    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(reservation, "initialise", initialise)
    assert not ray.is_initialized()
    with pytest.raises(Stop), reservation.reserved(run_config(tmp_path, *SPLIT, "cluster.num_rollout_workers=2")):
        pass
    ((address, settings, visible),) = asked
    assert address is None and settings["num_cpus"] == 2 and settings["num_gpus"] == 0 and visible == ""
    assert settings["log_to_driver"]  # stacks of silent rollout workers come that way


@pytest.mark.parametrize("address", ["somewhere", "ray://127.0.0.1:10001", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_before_anything_starts(address, tmp_path, monkeypatch):
    config = run_config(tmp_path, *SPLIT)
    check_placement(config)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is .*unset it") as caught:
        check_placement(config)
    assert address in str(caught.value)
