"""Wait until a Ray cluster has some machines: ``python wait_for_ray.py HOST:PORT COUNT [SECONDS]``."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

ASK = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""


def num_machines(address: str) -> tuple[int, str]:
    """Return how many machines the cluster has, and the last words of a cluster that does not answer."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        return 0, str(error)
    # In a process of its own, because a connection that fails may end the process.
    asked = subprocess.run([sys.executable, "-c", ASK, address], capture_output=True, text=True, check=False)
    return (int(asked.stdout), "") if asked.returncode == 0 else (0, asked.stderr.strip()[-500:])


def main() -> None:
    address, count = sys.argv[1], int(sys.argv[2])
    limit_s = float(sys.argv[3]) if len(sys.argv) > 3 else 300.0
    deadline = time.monotonic() + limit_s
    while (found := num_machines(address))[0] < count:
        if time.monotonic() > deadline:
            machines, words = found
            sys.exit(
                f"The Ray cluster at {address} has {machines} machines after {limit_s:g} s; required: {count}. {words}"
            )
        time.sleep(2)
    print(f"The Ray cluster at {address} has {found[0]} machines", flush=True)


if __name__ == "__main__":
    main()
