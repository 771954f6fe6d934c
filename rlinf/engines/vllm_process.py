"""Entry point for a vLLM engine's process: ``python -m rlinf.engines.vllm_process <socket> <parent> <folder>``.

It has few imports, so that it watches its parent long before vLLM is imported.
"""

import faulthandler
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

POLL_S = 0.2


def end_with(parent: int, folder: str) -> None:
    """Kill this process when its parent ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        end(folder)

    threading.Thread(target=watch, daemon=True).start()


def end(folder: str) -> None:
    """Remove the temporary folder, then kill this process and its children without waiting for vLLM's threads."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # Batch systems send SIGUSR1 to all processes; children inherit the handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2)  # rlinf.distributed.stack_dump.DUMP_SIGNAL
    end_with(int(sys.argv[2]), sys.argv[3])
    importlib.import_module("rlinf.engines.vllm_server").serve(Connection(int(sys.argv[1])))
    end(sys.argv[3])
