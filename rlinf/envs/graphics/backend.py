"""Choose and test the OpenGL and Vulkan drivers used for rendering images.

MuJoCo (tabletop, Meta-World, LIBERO) renders with OpenGL, SAPIEN (ManiSkill) with Vulkan. A broken driver may kill a process
silently, so each driver is first tested in a separate process.
"""

import contextlib
import functools
import glob
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from rlinf.distributed.devices import CHOSEN_EGL_DEVICE, EGL_DEVICE, VISIBLE, visible_gpus
from rlinf.errors import MissingDependencyError

CONTEXT_MODULES = {"egl": "mujoco.egl", "osmesa": "mujoco.osmesa", "glfw": "mujoco.glfw", "cgl": "mujoco.cgl"}
INSTALL_HINT = (
    "Install software rendering with `apt-get install libegl1 libgl1` (then MUJOCO_GL=egl works), "
    "or with `apt-get install libosmesa6` (MUJOCO_GL=osmesa)."
)
NO_MUJOCO = "The package 'mujoco' is missing. Install it with `pip install mujoco==3.3.0`."
PROBED_VARIABLE = "RLINF_PROBED_MUJOCO_GL"
"""Environment variable that passes a parent's working backend to its child processes, which then skip the test."""
SINGLE_THREADED_MESA = ("LP_NUM_THREADS", "0")
"""Disables Mesa's rasteriser threads, which slow down rendering of small images."""
PROBE_TIMEOUT_S = 60.0
"""A test takes one to two seconds, but far longer on a busy machine or a cold disk."""
_PROBE = """
import importlib, mujoco, sys
context = importlib.import_module(sys.argv[1]).GLContext(16, 16)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), 100).free()
context.free()
print("rendering works")
"""

VULKAN_DEVICES = {"cpu": "cpu", "gpu": "cuda"}
"""Maps each render device to SAPIEN's name for it."""

NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
LAVAPIPE_FILES = ("/usr/share/vulkan/icd.d/lvp_icd*.json", "/etc/vulkan/icd.d/lvp_icd*.json")
VULKAN_HINTS = {
    "cpu": "Install Mesa's software Vulkan, 23 or newer, with `bash scripts/setup.sh --sims`, or on Debian 12 with "
    "`apt-get install mesa-vulkan-drivers/bookworm-backports` (docs/simulators.md), elsewhere with "
    "`apt-get install mesa-vulkan-drivers`.",
    "gpu": "Install the NVIDIA driver with its Vulkan library (in a container: NVIDIA_DRIVER_CAPABILITIES=all), "
    "or simulate and render without a GPU: set env=maniskill env.render_device=cpu",
}
_VULKAN_PROBE = """
import sapien, sys
sapien.render.RenderSystem(sapien.Device(sys.argv[1]))
print("rendering works")
"""

# List EGL's devices. NVIDIA devices report their CUDA number (EGL_NV_device_cuda, attribute 0x323A).
_EGL_DEVICES = """
import ctypes, json
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = ctypes.c_void_p
address = lambda name: egl.eglGetProcAddress(name)
query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(address(b"eglQueryDevicesEXT"))
query_attribute = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(address(b"eglQueryDeviceAttribEXT"))
devices, count, numbers = (ctypes.c_void_p * 64)(), ctypes.c_int(), []
query_devices(64, devices, ctypes.byref(count))
for device in devices[:count.value]:
    number = ctypes.c_ssize_t(-1)
    numbers.append(number.value if query_attribute(device, 0x323A, ctypes.byref(number)) else None)
print(json.dumps(numbers))
"""

_CUDA_NAMES = """
import ctypes, json, uuid
cuda, count, names = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), []
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for number in range(count.value):
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGet(ctypes.byref(device), number) == 0 and cuda.cuDeviceGetUuid(raw, device) == 0
    names.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
print(json.dumps(names))
"""


def import_mujoco() -> ModuleType:
    """Import MuJoCo, which loads the GL set in ``MUJOCO_GL``; raise MissingDependencyError if either is missing."""
    if importlib.util.find_spec("mujoco") is None:
        raise MissingDependencyError(NO_MUJOCO)
    try:
        return importlib.import_module("mujoco")
    except (ImportError, AttributeError, RuntimeError) as error:
        raise cannot_render(os.environ.get("MUJOCO_GL", ""), error) from error


def cannot_render(backend: str, error: Exception) -> MissingDependencyError:
    """Return the error for a failed ``backend``, naming the packages to install."""
    return MissingDependencyError(f"MuJoCo cannot render with MUJOCO_GL={backend}: {error}. {INSTALL_HINT}")


def probe_rendering() -> tuple[str | None, str]:
    """Return MuJoCo's GL backend and a message, or None and a message naming the packages to install (about one second)."""
    if importlib.util.find_spec("mujoco") is None:
        return None, NO_MUJOCO
    failures, wanted = [], os.environ.get("MUJOCO_GL", "").lower()
    for backend in [wanted] if wanted else ["cgl"] if sys.platform == "darwin" else ["egl", "osmesa"]:
        if backend not in CONTEXT_MODULES:
            failures.append(f"MUJOCO_GL={backend}: unknown, use one of {', '.join(CONTEXT_MODULES)}")
            continue
        failure = _failure_of(_PROBE, CONTEXT_MODULES[backend], _environment_of(backend))
        if failure is None:
            return backend, f"MuJoCo renders with {backend}."
        failures.append(f"{backend}: {failure}")
    set_here = [name for name in ("MUJOCO_GL", EGL_DEVICE) if os.environ.get(name)]
    values = " ".join(f"{name}={os.environ[name]}" for name in set_here)
    hint = f"{values} is set; run `unset {' '.join(set_here)}` to try all backends and devices. " if values else ""
    return None, f"MuJoCo cannot render here ({'; '.join(failures)}). {hint}{INSTALL_HINT}"


@functools.cache
def choose_backend() -> str:
    """Return the GL backend of this process, and set ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM`` for it and its children.

    Each backend is tested once, in a separate process (``probe_rendering``); children use their parent's backend. With EGL
    and a GPU, also set ``MUJOCO_EGL_DEVICE_ID`` (``egl_device``) unless it is already set. Raise MissingDependencyError if the
    backend in ``MUJOCO_GL`` fails or, if the variable is not set, if all backends fail.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    tested = wanted in CONTEXT_MODULES and os.environ.get(PROBED_VARIABLE) == wanted
    backend, message = (wanted, "") if tested else probe_rendering()
    if backend is None:
        raise MissingDependencyError(message)
    os.environ.update({**_environment_of(backend), PROBED_VARIABLE: backend})
    os.environ.setdefault(*SINGLE_THREADED_MESA)
    # Import triton before Mesa loads its own LLVM, because a later import (by torch or transformers) crashes the process.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
    return backend


def probe_vulkan(device: str) -> tuple[bool, str]:
    """Return whether SAPIEN renders on "cpu" (Mesa's lavapipe) or "gpu" (NVIDIA driver), and a message (about one second)."""
    if importlib.util.find_spec("sapien") is None:
        return False, "The package 'sapien' is missing. Install it with `bash scripts/setup.sh --sims`."
    failure = _failure_of(_VULKAN_PROBE, VULKAN_DEVICES[device], _vulkan_environment(device))
    if failure is None:
        return True, f"SAPIEN renders with Vulkan on the {device.upper()}."
    return False, f"SAPIEN cannot render with Vulkan on the {device.upper()} ({failure}). {VULKAN_HINTS[device]}"


@functools.cache
def choose_vulkan(device: str) -> str:
    """Test a render device ("cpu" or "gpu"), set its environment (inherited by children), and return SAPIEN's name for it."""
    works, message = probe_vulkan(device)
    if not works:
        raise MissingDependencyError(message)
    os.environ.update(_vulkan_environment(device))
    os.environ.setdefault(*SINGLE_THREADED_MESA)
    return VULKAN_DEVICES[device]


def egl_device(
    environment: Mapping[str, str], cuda_numbers: list[int | None], cuda_names: Sequence[str] = ()
) -> str | None:
    """Return the EGL device of the first GPU visible to CUDA, or None to leave the choice to MuJoCo.

    CUDA numbers only the GPUs in ``CUDA_VISIBLE_DEVICES``, which may refer to one by a prefix of its UUID (``cuda_names``). EGL
    numbers all GPUs and software renderers in a different order: ``cuda_numbers`` contains their CUDA numbers, or None. A MIG
    instance of a GPU cannot render and has no EGL device. ``MUJOCO_EGL_DEVICE_ID`` in ``environment`` has priority.
    """
    first = next(iter(visible_gpus(environment, max(1, len(cuda_numbers)))), "")
    if first.startswith("GPU-"):
        first = next((str(number) for number, name in enumerate(cuda_names) if name.startswith(first)), "")
    if EGL_DEVICE in environment or not first.isdigit() or int(first) not in cuda_numbers:
        return None
    return str(cuda_numbers.index(int(first)))


def list_egl_devices() -> list[int | None]:
    """Return the CUDA number of each EGL device (without ``CUDA_VISIBLE_DEVICES``), or None for devices that have none."""
    return _query_driver(_EGL_DEVICES)


@functools.cache
def may_draw_on_gpu() -> bool:
    """Return whether MuJoCo may render on a GPU, which requires EGL and a device that is not a software renderer."""
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    if wanted == "osmesa" or not glob.glob(NVIDIA_DEVICES):
        return wanted != "osmesa"  # if this machine has no GPU, assume that the run is for a different machine
    numbers, chosen = list_egl_devices(), os.environ.get(EGL_DEVICE, "")
    if chosen.isdigit() and int(chosen) < len(numbers):
        return numbers[int(chosen)] is not None
    return any(number is not None for number in numbers)


def _query_driver(script: str) -> list:
    """Run a script without ``CUDA_VISIBLE_DEVICES`` and return the list it prints; empty if the driver is missing."""
    result = _run([script], {name: value for name, value in os.environ.items() if name != VISIBLE})
    return json.loads(result.stdout) if result.returncode == 0 else []


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)


def _environment_of(backend: str) -> dict[str, str]:
    names = {"MUJOCO_GL": backend}
    if backend in ("egl", "osmesa"):
        names["PYOPENGL_PLATFORM"] = backend
    # Only a guess, because querying CUDA would require a separate process.
    may_have_gpu = os.environ[VISIBLE].strip() if VISIBLE in os.environ else glob.glob(NVIDIA_DEVICES)
    if backend == "egl" and EGL_DEVICE not in os.environ and may_have_gpu:
        by_name = os.environ.get(VISIBLE, "").strip().startswith("GPU-")
        device = egl_device(os.environ, list_egl_devices(), _query_driver(_CUDA_NAMES) if by_name else ())
        if device is not None:
            names |= {EGL_DEVICE: device, CHOSEN_EGL_DEVICE: device}
    return names


def _vulkan_environment(device: str) -> dict[str, str]:
    chosen = os.environ.get("VK_ICD_FILENAMES") or os.environ.get("VK_DRIVER_FILES")
    drivers = sorted(path for pattern in LAVAPIPE_FILES for path in glob.glob(pattern))
    return {"VK_ICD_FILENAMES": drivers[0]} if device == "cpu" and drivers and not chosen else {}


def _failure_of(script: str, argument: str, environment: dict[str, str]) -> str | None:
    """Run a test in a separate process, because a broken driver may crash it. Return the reason for a failure, or None."""
    try:
        result = _run([script, argument], {**os.environ, **environment})
    except subprocess.TimeoutExpired:
        return f"no result within {PROBE_TIMEOUT_S:.0f} s"
    if "rendering works" in result.stdout:
        return None
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    start = next((number for number, line in enumerate(lines) if line.startswith("Traceback")), -1)
    # Report the first exception, because later ones come from half-initialised objects.
    reasons = [line for line in lines[start + 1 :] if start >= 0 and not line.startswith(" ")] or lines[-1:]
    return reasons[0].strip() if reasons else f"exit status {result.returncode}"
