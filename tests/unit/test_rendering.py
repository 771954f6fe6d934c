"""Images: what is not drawn because it lies outside of them is not missed."""

import os
import signal

import numpy as np
import pytest

from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.graphics.renderer import StateRenderer
from rlinf.errors import MissingDependencyError
from rlinf.training.stop_signal import StopRequested, StopSignal

NUM_MESHES = 60
CAMERAS = {
    "from outside": 'pos="2 0 1" xyaxes="0 1 0 -1 0 2" fovy="40"',
    "amid the meshes": 'pos="0 0 0.1" xyaxes="1 0.2 0 0 0.1 1" fovy="75"',
    "upside down": 'pos="-0.5 -1.3 0" xyaxes="-1 0.3 0 0.2 0.1 -1" fovy="30"',
    "a lens off its centre": 'pos="0.5 -0.8 0.3" xyaxes="1 0.3 0 0 0 1" focal="0.05 0.07" sensorsize="0.06 0.06" '
    'principal="0.012 -0.007" resolution="48 48"',
    "orthographic": 'pos="0 -0.5 0.2" xyaxes="1 0 0 0 0 1" fovy="0.7" orthographic="true"',
}


@pytest.fixture(scope="module", params=CAMERAS)
def scene(request):
    """Renderer, state and geom groups of a scene of meshes around a camera; half of the meshes are in a group of their own."""
    try:
        choose_backend()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    mujoco, random = import_mujoco(), np.random.default_rng(0)

    def text(*numbers):
        return " ".join(f"{number:.4f}" for number in numbers)

    # Far from the origin of their own frames, and of very different widths.
    corners = random.uniform(-1, 1, (3, 12, 3)) * [0.3, 0.05, 0.1] + [0.2, -0.1, 0.0]
    meshes = "".join(f'<mesh name="m{k}" vertex="{text(*mesh.ravel())}"/>' for k, mesh in enumerate(corners))
    geoms = "".join(
        f'<body pos="{text(*random.uniform(-1.5, 1.5, 3))}" quat="{text(*random.normal(size=4))}">'
        f'<geom type="mesh" mesh="m{k % 3}" group="{k % 2}" rgba="{text(*random.uniform(0.1, 1, 3), 1)}"/></body>'
        for k in range(NUM_MESHES)
    )
    model = mujoco.MjModel.from_xml_string(
        f"<mujoco><asset>{meshes}</asset><worldbody><light pos='0 0 3'/><geom type='plane' size='2 2 .1' pos='0 0 -1'/>{geoms}"
        f"<camera name='camera' {CAMERAS[request.param]}/></worldbody></mujoco>"
    )
    state = mujoco.MjData(model)
    mujoco.mj_forward(model, state)
    renderer = StateRenderer(model, 48)
    yield request.param, renderer, state
    renderer.close()


@pytest.mark.parametrize("groups", [None, [0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
def test_meshes_outside_of_a_picture_are_left_out_and_the_picture_is_the_same(scene, groups):
    camera, renderer, state = scene
    shown = None if groups is None else np.array([groups], np.uint8)
    before, meshes = renderer.model.geom_group.copy(), renderer._meshes

    def draw(which):
        renderer._meshes = which
        image = renderer.render([state], [0], shown)
        num_drawn, renderer._meshes = renderer._scene.ngeom, meshes
        np.testing.assert_array_equal(renderer.model.geom_group, before)
        return image, num_drawn

    everything, num_all = draw(meshes[:0])
    seen, num_seen = draw(meshes)
    np.testing.assert_array_equal(seen, everything)
    assert len(np.unique(everything.reshape(-1, 3), axis=0)) > 5  # something is there
    can_leave_out = camera != "orthographic" and groups != [1] * 6  # which has no group left to hide them in
    assert (num_seen < 0.8 * num_all) if can_leave_out else num_seen == num_all


def test_boxes_that_are_too_small_would_be_noticed(scene):
    camera, renderer, state = scene
    boxes = renderer.model.geom_aabb.copy()
    everything = renderer.render([state], [0])
    renderer.model.geom_aabb[:, 3:] *= -2.0
    seen = renderer.render([state], [0])
    renderer.model.geom_aabb[:] = boxes
    assert np.array_equal(seen, everything) == (camera == "orthographic")


def test_with_shadows_every_mesh_is_drawn(scene):
    _, renderer, state = scene
    full = StateRenderer(renderer.model, 48, fast=False)
    full.render([state], [0])
    assert full._scene.ngeom == NUM_MESHES + 1
    full.close()


@pytest.mark.parametrize("is_made", [False, True])
def test_a_signal_in_the_first_picture_leaves_nothing_half_open(scene, monkeypatch, is_made):
    """It raises before or after the context of MuJoCo is made; then the renderer closes, and draws the next image."""
    _, renderer, state = scene
    stopped, stop_signal = StateRenderer(renderer.model, 48), StopSignal(announce=False)
    make, mujoco = import_mujoco().MjrContext, import_mujoco()

    def made(*arguments):
        context = make(*arguments) if is_made else None
        os.kill(os.getpid(), signal.SIGTERM)
        return context

    with (
        monkeypatch.context() as patch,
        stop_signal.handled(),
        pytest.raises(StopRequested),
        stop_signal.interrupting(),
    ):
        patch.setattr(mujoco, "MjrContext", made)
        stopped.render([state], [0])
    stopped.close()
    np.testing.assert_array_equal(stopped.render([state], [0]), renderer.render([state], [0]))
    stopped.close()
