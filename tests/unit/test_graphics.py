"""GL and Vulkan: tried in another process, told apart from one another, and a missing one is named with its fix."""

import os
import subprocess
import sys

import pytest

from rlinf.envs.graphics import backend as graphics
from rlinf.errors import MissingDependencyError


@pytest.fixture
def fresh(monkeypatch):
    """No choice made yet in this process, and none that outlives the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for choice in (graphics.choose_vulkan, graphics.choose_backend):
        choice.cache_clear()
    yield monkeypatch
    for choice in (graphics.choose_vulkan, graphics.choose_backend):
        choice.cache_clear()


@pytest.mark.parametrize(
    ("visible", "numbers", "expected"),
    [
        ("2", [None, 1, 0, 2], "3"),
        ("2,0", [2, 1, 0], "0"),
        ("3", [0, 1], None),
        ("GPU-b7,GPU-c0", [None, 1, 0], "1"),
        (None, [None, 1, 0], "2"),
        (None, [None], None),
        ("MIG-0a1b", [0, 1], None),
    ],
)
def test_the_first_visible_gpu_is_found_among_the_devices_of_egl(visible, numbers, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    names = ["GPU-a5f0", "GPU-b7c1"]
    assert graphics.egl_device(environment, numbers, names) == expected
    environment["MUJOCO_EGL_DEVICE_ID"] = "0"  # the user's choice stands
    assert graphics.egl_device(environment, numbers, names) is None


def test_the_egl_device_is_set_for_egl_alone_and_only_where_gpus_are_chosen(monkeypatch):
    monkeypatch.setattr(graphics, "list_egl_devices", lambda: [None, 5, 4])
    monkeypatch.setattr(graphics, "NVIDIA_DEVICES", "/no/such/device*")
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert graphics._environment_of("egl") == {
        "MUJOCO_GL": "egl",
        "PYOPENGL_PLATFORM": "egl",
        "MUJOCO_EGL_DEVICE_ID": "2",
        "RLINF_CHOSEN_EGL_DEVICE_ID": "2",
    }
    assert graphics._environment_of("osmesa") == {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "MUJOCO_EGL_DEVICE_ID" not in graphics._environment_of("egl")


def test_the_devices_of_egl_are_listed_without_ending_this_process():
    devices = graphics.list_egl_devices()
    if graphics.probe_rendering()[0] != "egl":
        pytest.skip("no EGL here")
    assert devices and all(number is None or number >= 0 for number in devices)


@pytest.mark.parametrize(
    ("script", "limit_s", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", 300.0, "exit status -11"),
        ("raise RuntimeError('Failed to find a supported physical device')", 300.0, "supported physical device"),
        ("import time; time.sleep(60)", 1.0, "no result within 1 s"),
    ],
)
def test_a_vulkan_that_fails_is_named_with_its_cure(fresh, script, limit_s, words):
    fresh.setattr(graphics, "_VULKAN_PROBE", script)
    fresh.setattr(graphics, "PROBE_TIMEOUT_S", limit_s)
    fresh.setattr(graphics.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(MissingDependencyError) as raised:
        graphics.choose_vulkan("cpu")
    for word in (words, "on the CPU", "scripts/setup.sh --sims", "bookworm-backports"):
        assert word in str(raised.value)
    with pytest.raises(MissingDependencyError, match="env=maniskill env.render_device=cpu"):
        graphics.choose_vulkan("gpu")


def test_software_vulkan_is_chosen_for_the_cpu_unless_the_user_names_a_driver(fresh, tmp_path):
    driver = tmp_path / "lvp_icd.x86_64.json"
    driver.write_text("{}")
    fresh.setattr(graphics, "LAVAPIPE_FILES", (str(tmp_path / "lvp_icd*.json"),))
    probe = "import os; print('rendering works' if os.environ['VK_ICD_FILENAMES'] else '')"
    fresh.setattr(graphics, "_VULKAN_PROBE", probe)
    fresh.setattr(graphics.importlib.util, "find_spec", lambda name: name)
    for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES"):
        os.environ.pop(name, None)
    assert graphics._vulkan_environment("gpu") == {}
    assert graphics.choose_vulkan("cpu") == "cpu"
    assert os.environ["VK_ICD_FILENAMES"] == str(driver)
    os.environ["VK_ICD_FILENAMES"] = "mine.json"
    assert graphics._vulkan_environment("cpu") == {}


def test_a_backend_of_the_user_is_tried_once_and_not_again_by_children(fresh):
    tried = []
    fresh.setattr(graphics, "_failure_of", lambda *args: tried.append(args[1]) or "no library")
    os.environ["MUJOCO_GL"] = "osmesa"
    os.environ.pop(graphics.PROBED_VARIABLE, None)
    with pytest.raises(MissingDependencyError, match="osmesa: no library.*libosmesa6"):
        graphics.choose_backend()
    assert tried == ["mujoco.osmesa"] and graphics.PROBED_VARIABLE not in os.environ
    fresh.setattr(graphics, "_failure_of", lambda *args: tried.append(args[1]))
    assert graphics.choose_backend() == "osmesa" and len(tried) == 2
    graphics.choose_backend.cache_clear()  # as in a child process, which has the environment alone
    assert graphics.choose_backend() == "osmesa" and len(tried) == 2
    os.environ["MUJOCO_GL"] = "egl"
    graphics.choose_backend.cache_clear()
    assert graphics.choose_backend() == "egl" and tried[2:] == ["mujoco.egl"], "another one is tried again"


def test_a_machine_without_gl_is_told_what_to_install(fresh):
    backend, message = graphics.probe_rendering()
    assert backend in graphics.CONTEXT_MODULES and backend in message, "the control: in another process, it works"
    os.environ.pop("MUJOCO_GL", None)
    os.environ.pop(graphics.PROBED_VARIABLE, None)
    fresh.setattr(graphics, "_PROBE", "raise OSError('libEGL is not here')")
    backend, message = graphics.probe_rendering()
    assert backend is None and "libEGL is not here" in message and "apt-get install libegl1 libgl1" in message
    assert "unset" not in message

    with pytest.raises(MissingDependencyError, match="libosmesa6"):
        graphics.choose_backend()
    os.environ["MUJOCO_GL"] = "vulkan"
    message = graphics.probe_rendering()[1]
    assert "MUJOCO_GL=vulkan" in message and "`unset MUJOCO_GL`" in message


def test_a_device_that_does_not_exist_is_named_by_its_variable(fresh):
    """MuJoCo's first exception says so; the ones of the half-made context and the missing library do not."""
    fresh.setenv("MUJOCO_EGL_DEVICE_ID", "99")
    os.environ["MUJOCO_GL"] = "egl"
    os.environ.pop(graphics.PROBED_VARIABLE, None)
    backend, message = graphics.probe_rendering()
    assert backend is None and "must be an integer between 0 and" in message
    assert "MUJOCO_EGL_DEVICE_ID=99" in message and "unset MUJOCO_GL MUJOCO_EGL_DEVICE_ID" in message
    os.environ.pop("MUJOCO_GL")
    os.environ.pop("MUJOCO_EGL_DEVICE_ID")
    assert graphics.probe_rendering()[0] is not None, "what the message says to type works"


PICTURES = {
    "tabletop": "from rlinf.envs.tabletop.config import TabletopConfig as C; make_env(C(), 1, auto_reset=False).reset()",
    "gymnasium": "from rlinf.envs.gymnasium.env import GymnasiumConfig as C\n"
    "make_env(C(id='InvertedPendulum-v5', cameras=['render']), 1, auto_reset=False)",
}


@pytest.mark.parametrize("env", PICTURES)
def test_triton_can_be_imported_after_a_picture_of_mujoco(env):
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    script = f"from rlinf.envs import make_env\n{PICTURES[env]}\nimport triton"
    assert subprocess.run([sys.executable, "-c", script], timeout=300).returncode == 0
