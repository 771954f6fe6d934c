"""Ray in the tests: patient, because the machine may be busy and short of memory for other reasons."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from forked_workers import forked_workers

SURROUNDINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a machine that is short of memory for other reasons is not the tests' matter
    # Nor is one that is busy: Ray gives up after half a minute or a minute.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "100000",
    "RAY_worker_register_timeout_seconds": "300",
}


@contextmanager
def patience() -> Iterator[None]:
    """Set the variables of a patient Ray, which it reads when it is imported and when its daemons start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SURROUNDINGS.items():
            patch.setenv(name, value)
        with forked_workers():
            yield


@contextmanager
def one_machine(num_cpus: int, **settings: Any) -> Iterator[None]:
    """Start Ray on this machine, and connect this process to it."""
    with patience():
        import ray  # reads some of the variables

        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=100 << 20, **settings)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def two_machines() -> Iterator[Any]:
    """Start two of Ray's daemons on this machine, of two CPUs each, and connect this process to the first."""
    with patience():
        import ray  # reads some of the variables
        from ray.cluster_utils import Cluster

        settings = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=settings)
        cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
        ray.init(address=cluster.address)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
