"""Fast off-screen rendering of many MuJoCo states, with the GL chosen by ``rlinf.envs.graphics.backend``."""

from __future__ import annotations

import atexit
import functools
import importlib
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np

from rlinf.envs.graphics.backend import CONTEXT_MODULES, cannot_render, choose_backend, import_mujoco

SIGHT_MARGIN = 0.001
"""Margin by which a skipped mesh must be outside the image, as a fraction of its bounding box plus the model's extent."""

DEFAULT_GROUPS = np.array([1, 1, 1, 0, 0, 0], dtype=np.uint8)

_open_renderers: weakref.WeakSet[StateRenderer] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Free open contexts before the GL library is unloaded, to avoid error messages. Call after the GL's own registration."""
    atexit.register(lambda: [renderer.close() for renderer in list(_open_renderers)])


class StateRenderer:
    """Renders states of one model to square images of a fixed size.

    The GL context is created for the first image. It is current only during a call, and a lock serialises calls, so any thread may
    call. With ``fast``, meshes outside the image are skipped, because without shadows and reflections they are invisible.

    Args:
        max_geoms: Maximum number of geoms in the scene.
        fast: Whether to omit shadows, reflections, sky and multisampling instead of rendering as the model's author intended.
    """

    def __init__(self, model: Any, size: int, max_geoms: int = 100, fast: bool = True) -> None:
        self._mujoco = import_mujoco()
        self.model, self.size = model, size
        self._gl: Any = None
        self._lock = threading.Lock()
        self._max_geoms, self._fast = max_geoms, fast
        self._meshes = np.flatnonzero(model.geom_type == self._mujoco.mjtGeom.mjGEOM_MESH) if fast else np.empty(0, int)

    def _open(self) -> None:
        mujoco, backend = self._mujoco, choose_backend()
        self.model.vis.global_.offwidth = self.model.vis.global_.offheight = self.size
        if self._fast:
            self.model.vis.quality.offsamples = 0
        failures = [ImportError, AttributeError, RuntimeError, OSError, mujoco.FatalError]
        if backend in ("egl", "osmesa"):
            failures.append(importlib.import_module("OpenGL.error").Error)
        with ExitStack() as opened:  # so that an exception raised by a signal handler leaks no resources
            try:
                gl = importlib.import_module(CONTEXT_MODULES[backend]).GLContext(self.size, self.size)
                opened.callback(gl.free)
                gl.make_current()
                self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
                opened.callback(self._context.free)
            except tuple(failures) as error:
                raise cannot_render(backend, error) from error
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
            self._scene = mujoco.MjvScene(self.model, maxgeom=self._max_geoms)
            for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX") if self._fast else ():
                self._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0
            self._option, self._viewport = mujoco.MjvOption(), mujoco.MjrRect(0, 0, self.size, self.size)
            self._release = _release_function(backend)
            self._gl = gl
            opened.pop_all()
        _open_renderers.add(self)
        _close_at_exit()

    def render(self, states: list[Any], cameras: list[Any], geom_groups: np.ndarray | None = None) -> np.ndarray:
        """Render ``K`` states from each camera (id or ``MjvCamera``) as uint8 ``[len(cameras), K, size, size, 3]``.

        Kinematics must be up to date. ``geom_groups``, uint8 ``[K, 6]``, marks each state's visible geom groups (default: MuJoCo's).
        """
        mujoco = self._mujoco
        pixels = np.empty((len(cameras), len(states), self.size, self.size, 3), dtype=np.uint8)
        with self._lock:
            if self._gl is None:
                self._open()
            self._gl.make_current()
            scene, context, viewport = self._scene, self._context, self._viewport
            for row, state in enumerate(states):
                self._option.geomgroup = DEFAULT_GROUPS if geom_groups is None else geom_groups[row]
                for column, camera in enumerate(cameras):
                    self._camera = camera if isinstance(camera, mujoco.MjvCamera) else self._fixed_camera(camera)
                    self._update_scene(state)
                    mujoco.mjr_render(viewport, scene, context)
                    mujoco.mjr_readPixels(pixels[column, row], None, viewport, context)
            # A context is current in only one thread, but the next call may come from a different thread.
            self._release()
        # OpenGL's first row is the bottom one.
        return np.ascontiguousarray(pixels[:, :, ::-1])

    def _fixed_camera(self, camera_id: int) -> Any:
        camera = self._mujoco.MjvCamera()
        camera.type, camera.fixedcamid = self._mujoco.mjtCamera.mjCAMERA_FIXED, camera_id
        return camera

    def _update_scene(self, state: Any) -> None:
        mujoco, model = self._mujoco, self.model
        hidden = np.flatnonzero(self._option.geomgroup == 0)
        groups = model.geom_group.copy()
        # Meshes are hidden by moving them to an invisible group, because MuJoCo cannot mask individual geoms.
        if len(self._meshes) and len(hidden):
            model.geom_group[self._out_of_sight(state)] = hidden[0]
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, state, self._option, None, self._camera, everything, self._scene)
        model.geom_group[:] = groups

    def _out_of_sight(self, state: Any) -> np.ndarray:
        """Return the meshes with bounding boxes entirely outside one of the view's planes (except the far plane)."""
        model, meshes = self.model, self._meshes
        self._mujoco.mjv_updateCamera(model, state, self._camera, self._scene)
        view = self._mujoco.mjv_averageCamera(*self._scene.camera)  # of the two eyes
        if view.orthographic:
            return meshes[:0]
        forward, up = np.float64(view.forward), np.float64(view.up)
        right, near, centre = np.cross(forward, up), view.frustum_near, view.frustum_center
        half_width = view.frustum_width or (view.frustum_top - view.frustum_bottom) / 2
        normals = np.stack([
            forward,
            near * right - (centre - half_width) * forward,
            (centre + half_width) * forward - near * right,
            near * up - view.frustum_bottom * forward,
            view.frustum_top * forward - near * up,
        ])  # inwards  # fmt: skip
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        axes = state.geom_xmat[meshes].reshape(-1, 3, 3)
        centres, half_sizes = model.geom_aabb[meshes, :3], model.geom_aabb[meshes, 3:]
        positions = state.geom_xpos[meshes] + (axes @ centres[:, :, None])[:, :, 0] - view.pos
        reach = (np.abs(normals @ axes) * half_sizes[:, None]).sum(2)  # of a box along each normal, [G, 5]
        reach += SIGHT_MARGIN * (reach + model.stat.extent)
        return meshes[(positions @ normals.T < -reach).any(1)]

    def close(self) -> None:
        """Free the GL context; a later ``render`` creates a new one."""
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


def lighten(model: Any, cell_m: float) -> None:
    """Merge the vertices of each mesh of a MuJoCo ``model`` within cubes of ``cell_m`` metres (Rossignac and Borrel 1993).

    Array sizes do not change, but fewer triangles are used. Use the model only for images; call before creating its GL context.
    """
    for mesh in range(model.nmesh):
        start, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
        first, num_faces = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        vertices = model.mesh_vert[start : start + count]
        faces = model.mesh_face[first : first + num_faces]
        new_vertices, new_faces = clustered(vertices, faces, cell_m)
        if not len(new_faces) or len(new_faces) > model.mesh_normalnum[mesh]:
            continue
        vertices[: len(new_vertices)] = new_vertices
        faces[: len(new_faces)] = new_faces
        corners = new_vertices[new_faces]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        start = model.mesh_normaladr[mesh]
        model.mesh_normal[start : start + len(normals)] = normals
        model.mesh_facenormal[first : first + len(new_faces)] = np.arange(len(new_faces))[:, None]
        model.mesh_facenum[mesh] = len(new_faces)


def clustered(vertices: np.ndarray, faces: np.ndarray, cell_m: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean vertex ``[V', 3]`` of each occupied cube, and the remaining triangles ``[F', 3]``."""
    cells = np.floor((vertices - vertices.min(0)) / cell_m).astype(np.int64)
    _, labels, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    labels = labels.ravel()
    means = np.stack([np.bincount(labels, vertices[:, axis]) for axis in range(3)], axis=1) / counts[:, None]
    merged = labels[faces]
    merged = merged[(merged != np.roll(merged, 1, axis=1)).all(1)]
    # Start each triangle with its smallest index, keeping its orientation, so that `unique` finds repeated ones.
    merged = np.take_along_axis(merged, (merged.argmin(1)[:, None] + np.arange(3)) % 3, axis=1)
    return means, np.unique(merged, axis=0)


def _release_function(backend: str) -> Any:
    """Return a function that detaches the current context from the calling thread."""
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


def project(model: Any, data: Any, camera_id: int, points: np.ndarray, size: int) -> np.ndarray:
    """Project ``points [N, 3]`` (metres) onto a perspective camera's square image of ``size`` pixels.

    The result, ``[N, 2]``, is in pixels to the right of and below the upper left corner, or NaN behind the camera.
    """
    right, up, back = ((points - data.cam_xpos[camera_id]) @ data.cam_xmat[camera_id].reshape(3, 3)).T
    focal = size / 2 / np.tan(np.deg2rad(model.cam_fovy[camera_id]) / 2)
    depth = np.where(back < 0, -back, np.nan)
    return np.stack([size / 2 + focal * right / depth, size / 2 - focal * up / depth], axis=1)
