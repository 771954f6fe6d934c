"""What ranks of a test see. They import this file alone, which is quicker than a test with all that it needs."""

import subprocess
import sys
from pathlib import Path

from rlinf.distributed import process_group


def tell_environment(path: str) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
    code = f"import os; print(*[os.environ.get(name) for name in {names}])"  # a simulator's process, an engine's
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    Path(f"{path}{process_group.rank()}").write_text(child)
