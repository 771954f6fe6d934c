"""Wait until a Ray cluster has enough machines: ``python wait_for_ray.py HOST:PORT COUNT [SECONDS]``."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

COUNT_SCRIPT = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""


def num_machines(address: str) -> tuple[int, str]:
    """Return the number of machines in the cluster, and the error if it does not reply."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        return 0, str(error)
    # In a separate process, because Ray may end a process whose connection fails.
    result = subprocess.run([sys.executable, "-c", COUNT_SCRIPT, address], capture_output=True, text=True, check=False)
    return (int(result.stdout), "") if result.returncode == 0 else (0, result.stderr.strip()[-500:])


def main() -> None:
    address, count = sys.argv[1], int(sys.argv[2])
    limit_s = float(sys.argv[3]) if len(sys.argv) > 3 else 300.0
    deadline = time.monotonic() + limit_s
    while True:
        machines, error = num_machines(address)
        if machines >= count:
            break
        if time.monotonic() > deadline:
            sys.exit(
                f"The Ray cluster at {address} has {machines} machines after {limit_s:g} s; expected {count}. {error}"
            )
        time.sleep(2)
    print(f"The Ray cluster at {address} has {machines} machines", flush=True)


if __name__ == "__main__":
    main()
