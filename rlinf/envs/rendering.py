"""Off-screen rendering with MuJoCo: choosing a GL that works on this machine, and drawing many states fast."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from types import ModuleType
from typing import Any

import numpy as np

from rlinf.errors import MissingDependencyError

CONTEXT_MODULES = {"egl": "mujoco.egl", "osmesa": "mujoco.osmesa", "glfw": "mujoco.glfw", "cgl": "mujoco.cgl"}
INSTALL_HINT = (
    "Install software rendering with `apt-get install libegl1 libgl1` (then MUJOCO_GL=egl works), "
    "or with `apt-get install libosmesa6` (MUJOCO_GL=osmesa)."
)
PROBE_TIMEOUT_S = 20.0
_PROBE = """
import importlib, mujoco, sys
context = importlib.import_module(sys.argv[1]).GLContext(16, 16)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), 100).free()
context.free()
print("rendering works")
"""


def import_mujoco() -> ModuleType:
    """Import MuJoCo.

    Raises:
        MissingDependencyError: It is not installed, or ``MUJOCO_GL`` names a GL that cannot be loaded.
    """
    if importlib.util.find_spec("mujoco") is None:
        raise MissingDependencyError("The package 'mujoco' is missing. Install it with `pip install mujoco==3.3.0`.")
    try:
        return importlib.import_module("mujoco")
    except (ImportError, AttributeError, RuntimeError) as error:
        # MuJoCo loads the GL that MUJOCO_GL names when it is imported.
        raise _cannot_render(os.environ.get("MUJOCO_GL", ""), error) from error


def _cannot_render(backend: str, error: Exception) -> MissingDependencyError:
    return MissingDependencyError(f"MuJoCo cannot render with MUJOCO_GL={backend}: {error}. {INSTALL_HINT}")


def _environment_of(backend: str) -> dict[str, str]:
    names = {"MUJOCO_GL": backend}
    if backend in ("egl", "osmesa"):
        names["PYOPENGL_PLATFORM"] = backend
    return names


def _try_backend(backend: str) -> str | None:
    """Open a context in a process of its own (a broken driver may crash it); None, or the reason of the failure."""
    command = [sys.executable, "-c", _PROBE, CONTEXT_MODULES[backend]]
    try:
        result = subprocess.run(
            command,
            env={**os.environ, **_environment_of(backend)},
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    if "rendering works" in result.stdout:
        return None
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {result.returncode}"


def _candidates() -> list[str]:
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    if wanted:
        return [wanted]
    return ["cgl"] if sys.platform == "darwin" else ["egl", "osmesa"]


def probe_rendering() -> tuple[str | None, str]:
    """Find out whether pictures can be rendered here (about one second; for ``rlinf doctor``).

    Returns:
        The backend and a sentence, or None and what to install.
    """
    if importlib.util.find_spec("mujoco") is None:
        return None, "The package 'mujoco' is missing. Install it with `pip install mujoco==3.3.0`."
    failures = []
    for backend in _candidates():
        if backend not in CONTEXT_MODULES:
            failures.append(f"MUJOCO_GL={backend}: unknown, use one of {', '.join(CONTEXT_MODULES)}")
            continue
        failure = _try_backend(backend)
        if failure is None:
            return backend, f"MuJoCo renders with {backend}."
        failures.append(f"{backend}: {failure}")
    return None, f"MuJoCo cannot render here ({'; '.join(failures)}). {INSTALL_HINT}"


@functools.cache
def choose_backend() -> str:
    """Return the GL backend of this process, and set ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM`` for it and its children.

    A backend that the user set in ``MUJOCO_GL`` is taken without a probe; it is verified when the first context opens.

    Raises:
        MissingDependencyError: None works; says what to install.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    backend, message = (wanted, "") if wanted in CONTEXT_MODULES else probe_rendering()
    if backend is None:
        raise MissingDependencyError(message)
    os.environ.update(_environment_of(backend))
    # Mesa's own rasteriser threads cost more than they bring at these sizes.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    return backend


_open_renderers: weakref.WeakSet[StateRenderer] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Have contexts that nobody closes freed at exit, before the GL library goes (it complains on stderr otherwise).

    Exit handlers run in reverse order, so this is called after the GL module has registered its own.
    """
    atexit.register(_close_renderers)


def _close_renderers() -> None:
    for renderer in list(_open_renderers):
        renderer.close()


class StateRenderer:
    """Draws states of one model into square pictures of one size.

    The GL context is made at the first picture. It is current only during a call, so any thread may call; calls are
    serialised by a lock.

    Args:
        model: ``mujoco.MjModel``.
        size: Height and width in pixels.
        max_geoms: Upper bound of the geoms in the scene.
    """

    def __init__(self, model: Any, size: int, max_geoms: int = 100) -> None:
        self._mujoco = import_mujoco()
        self.model, self.size = model, size
        self._gl: Any = None
        self._lock = threading.Lock()
        self._max_geoms = max_geoms

    def _open(self) -> None:
        mujoco, backend = self._mujoco, choose_backend()
        self.model.vis.global_.offwidth = self.model.vis.global_.offheight = self.size
        self.model.vis.quality.offsamples = 0
        failures = (ImportError, AttributeError, RuntimeError, OSError, mujoco.FatalError, *_gl_errors(backend))
        try:
            self._gl = importlib.import_module(CONTEXT_MODULES[backend]).GLContext(self.size, self.size)
            self._gl.make_current()
            self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        except failures as error:
            self._gl = None
            raise _cannot_render(backend, error) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene = mujoco.MjvScene(self.model, maxgeom=self._max_geoms)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX"):
            self._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0
        self._option, self._viewport = mujoco.MjvOption(), mujoco.MjrRect(0, 0, self.size, self.size)
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._release = _release_function(backend)
        _open_renderers.add(self)
        _close_at_exit()

    def render(self, states: list[Any], camera_ids: list[int], geom_groups: np.ndarray | None = None) -> np.ndarray:
        """Draw each state from each camera.

        Args:
            states: ``mujoco.MjData`` with up-to-date kinematics, ``K`` of them.
            camera_ids: Ids of fixed cameras of the model.
            geom_groups: uint8 ``[K, 6]``, 1 where a state shows a geom group; None: MuJoCo's default groups. What
                lies outside the picture costs as much as what is seen, so leave it out.

        Returns:
            uint8 ``[len(camera_ids), len(states), size, size, 3]``.

        Raises:
            MissingDependencyError: No GL context can be opened.
        """
        mujoco = self._mujoco
        pixels = np.empty((len(camera_ids), len(states), self.size, self.size, 3), dtype=np.uint8)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        with self._lock:
            if self._gl is None:
                self._open()
            else:
                self._gl.make_current()
            model, scene, context, viewport = self.model, self._scene, self._context, self._viewport
            for row, state in enumerate(states):
                if geom_groups is not None:
                    self._option.geomgroup = geom_groups[row]
                for column, camera_id in enumerate(camera_ids):
                    self._camera.fixedcamid = camera_id
                    mujoco.mjv_updateScene(model, state, self._option, None, self._camera, everything, scene)
                    mujoco.mjr_render(viewport, scene, context)
                    mujoco.mjr_readPixels(pixels[column, row], None, viewport, context)
            self._release()
        return np.ascontiguousarray(pixels[:, :, ::-1])

    def close(self) -> None:
        """Free the GL context; a later ``render`` opens a new one."""
        with self._lock:
            if self._gl is None:
                return
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None
            _open_renderers.discard(self)

    def __del__(self) -> None:
        self.close()


def _gl_errors(backend: str) -> tuple[type[Exception], ...]:
    """Return what the Python binding of a backend raises besides Python's own errors."""
    if backend in ("egl", "osmesa"):
        from OpenGL.error import Error

        return (Error,)
    return ()


def _release_function(backend: str) -> Any:
    """Return what detaches the current context from the calling thread."""
    if backend == "egl":
        from mujoco import egl
        from OpenGL import EGL

        nothing = (EGL.EGL_NO_SURFACE, EGL.EGL_NO_SURFACE, EGL.EGL_NO_CONTEXT)
        return lambda: EGL.eglMakeCurrent(egl.EGL_DISPLAY, *nothing)
    if backend == "osmesa":
        from OpenGL import GL, osmesa

        return lambda: osmesa.OSMesaMakeCurrent(None, None, GL.GL_FLOAT, 0, 0)
    if backend == "glfw":
        import glfw

        return lambda: glfw.make_context_current(None)
    return lambda: None
