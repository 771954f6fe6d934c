"""The tabletop as a MuJoCo model: three coloured blocks, three coloured zones, and a position-controlled pusher."""

import copy
from typing import Any

import numpy as np

from rlinf.envs.graphics.backend import import_mujoco

BLOCK_COLOURS = ("red", "green", "blue")
ZONE_COLOURS = ("yellow", "purple", "cyan")
CAMERAS = ("front", "side", "wrist")

BLOCK_HALF_SIZE_M = 0.027
ZONE_RADIUS_M = 0.05
PUSHER_RADIUS_M, PUSHER_LENGTH_M = 0.016, 0.05
WORKSPACE_M = 0.2
"""Initial positions are within plus or minus this distance along each axis."""
PUSHER_LIMIT_M = 0.28
"""Position commands for the pusher are within plus or minus this distance along each axis."""
HOVER_HEIGHT_M = 0.08
PUSH_HEIGHT_M = 0.03
STEP_M = 0.05
"""Displacement commanded by an action of 1."""
TIMESTEP_S = 0.02
NUM_SUBSTEPS = 4
STIFFNESS_N_PER_M, DAMPING_N_S_PER_M, PUSHER_MASS_KG = 400.0, 20.0, 0.25
TABLE_GROUP, BLOCK_GROUP, ZONE_GROUP, MARK_GROUP = 0, 1, 2, 3
"""Geom groups, used to leave out hidden objects in images."""
FAR_M = 5.0
"""Distance at which hidden objects are placed."""
_FAR = FAR_M + np.arange(3.0)[:, None] + np.zeros(2)

_RGBA = {
    "red": "0.90 0.10 0.10 1",
    "green": "0.10 0.75 0.15 1",
    "blue": "0.15 0.30 0.95 1",
    "yellow": "0.95 0.85 0.10 1",
    "purple": "0.65 0.15 0.75 1",
    "cyan": "0.10 0.85 0.90 1",
}


def tabletop_xml() -> str:
    """Return the scene's MJCF in metres, kilograms and seconds. All motion is planar, without gravity."""
    half, radius = BLOCK_HALF_SIZE_M, PUSHER_RADIUS_M
    blocks = "".join(
        f'<body name="block_{colour}" pos="0 0 {half}">'
        '<joint type="slide" axis="1 0 0" damping="2" frictionloss="0.2"/>'
        '<joint type="slide" axis="0 1 0" damping="2" frictionloss="0.2"/>'
        '<joint type="hinge" axis="0 0 1" damping="0.004" frictionloss="0.002"/>'
        f'<geom type="box" size="{half} {half} {half}" mass="0.1" group="{BLOCK_GROUP}" rgba="{_RGBA[colour]}"/></body>'
        for colour in BLOCK_COLOURS
    )
    zones = "".join(
        f'<body name="zone_{colour}" mocap="true" pos="0 0 0"><geom type="cylinder" size="{ZONE_RADIUS_M} 0.001" '
        f'contype="0" conaffinity="0" group="{ZONE_GROUP}" rgba="{_RGBA[colour]}"/></body>'
        for colour in ZONE_COLOURS
    )
    return f"""<mujoco model="tabletop">
  <option timestep="{TIMESTEP_S}" gravity="0 0 0" integrator="implicitfast"/>
  <visual>
    <quality offsamples="0" numslices="14" numstacks="2" numquads="1"/>
    <headlight ambient="0.55 0.55 0.55" diffuse="0.5 0.5 0.5" specular="0 0 0"/>
  </visual>
  <default><geom condim="3" friction="0.5 0.005 0.0001" solref="0.03 1"/></default>
  <worldbody>
    <camera name="front" pos="0 -0.28 0.86" xyaxes="1 0 0 0 0.95 0.312" fovy="35"/>
    <camera name="side" pos="0.75 0 0.45" xyaxes="0 1 0 -0.514 0 0.857" fovy="42"/>
    <geom type="box" size="0.3 0.3 0.02" pos="0 0 -0.021" contype="0" conaffinity="0" rgba="0.23 0.23 0.25 1"/>
    {zones}
    <body name="mark" mocap="true" pos="0 0 0">
      <geom type="cylinder" size="0.02 0.002" contype="0" conaffinity="0" group="{MARK_GROUP}"
        rgba="0 0 0 1"/>
    </body>
    {blocks}
    <body name="pusher" pos="0 0 0">
      <joint name="pusher_x" type="slide" axis="1 0 0"/>
      <joint name="pusher_y" type="slide" axis="0 1 0"/>
      <joint name="pusher_z" type="slide" axis="0 0 1" damping="50"/>
      <geom type="capsule" fromto="0 0 0 0 0 {PUSHER_LENGTH_M}" size="{radius}" mass="{PUSHER_MASS_KG}" friction="0 0 0" priority="1"
        rgba="0.97 0.97 0.97 1"/>
      <camera name="wrist" pos="0 -0.10 0.30" xyaxes="1 0 0 0 0.95 0.312" fovy="60"/>
    </body>
  </worldbody>
  <actuator>
    <position joint="pusher_x" kp="{STIFFNESS_N_PER_M}" kv="{DAMPING_N_S_PER_M}"/>
    <position joint="pusher_y" kp="{STIFFNESS_N_PER_M}" kv="{DAMPING_N_S_PER_M}"/>
  </actuator>
</mujoco>"""


class TabletopSimulator:
    """``num_envs`` states of one model, with cameras shifted to the right by ``camera_offset_m``. Positions are in metres."""

    def __init__(self, num_envs: int, camera_offset_m: float = 0.0) -> None:
        mujoco = self._mujoco = import_mujoco()
        self.model = mujoco.MjModel.from_xml_string(tabletop_xml())
        for camera in range(self.model.ncam):
            right = np.zeros(3)
            mujoco.mju_rotVecQuat(right, np.array([camera_offset_m, 0.0, 0.0]), self.model.cam_quat[camera])
            self.model.cam_pos[camera] += right
        self.states: list[Any] = [mujoco.MjData(self.model) for _ in range(num_envs)]
        self.camera_ids = {name: self.model.camera(name).id for name in CAMERAS}
        # Cache views of the simulator's memory, because reading MjData attributes at each step costs more than the physics.
        self._positions = [state.qpos for state in self.states]
        self._velocities = [state.qvel for state in self.states]
        self._controls = [state.ctrl for state in self.states]
        self._mocaps = [state.mocap_pos for state in self.states]
        self._hovers = np.zeros(num_envs, dtype=bool)
        self._groups = np.zeros((num_envs, mujoco.mjNGROUP), dtype=np.uint8)
        self._no_constraints = int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
        self._pusher = self.model.joint("pusher_x").qposadr[0]

    def place(self, index: int, pusher: np.ndarray, height: float, blocks: np.ndarray, zones: np.ndarray) -> None:
        """Reset a state to ``pusher [2]``, its ``height``, and ``blocks`` and ``zones [3, 2]``; NaN hides an object."""
        state, qpos = self.states[index], self._positions[index]
        self._mujoco.mj_resetData(self.model, state)
        qpos[:9].reshape(3, 3)[:, :2] = np.where(np.isnan(blocks), _FAR, blocks)
        qpos[self._pusher : self._pusher + 3] = (*pusher, height)
        mocaps = self._mocaps[index]
        mocaps[:3, :2], mocaps[:3, 2] = np.where(np.isnan(zones), _FAR, zones), 0.001
        mocaps[3] = (FAR_M, -FAR_M, 0.0)
        self._controls[index][:] = pusher
        self._hovers[index] = height >= HOVER_HEIGHT_M
        self._groups[index] = 0
        self._groups[index, TABLE_GROUP] = 1
        self._groups[index, BLOCK_GROUP], self._groups[index, ZONE_GROUP] = ~np.isnan([blocks[0, 0], zones[0, 0]])
        self._mujoco.mj_kinematics(self.model, state)
        self._mujoco.mj_camlight(self.model, state)

    def mark(self, index: int, position: np.ndarray) -> None:
        """Put the black marker on top of the block at ``position [2]``."""
        self._groups[index, MARK_GROUP] = 1
        self._mocaps[index][3] = (*position, 2 * BLOCK_HALF_SIZE_M + 0.002)
        self._mujoco.mj_kinematics(self.model, self.states[index])

    def step(self, ids: np.ndarray, actions: np.ndarray) -> None:
        """Step once, with targets ``actions [K, 2]`` (in units of ``STEP_M``) away from the pushers' current positions."""
        first = self._pusher
        hovers = self._hovers[ids].tolist()
        pushers = np.stack([self._positions[index][first : first + 2] for index in ids])
        for index, target, alone in zip(ids.tolist(), _target(pushers, actions), hovers, strict=True):
            self._controls[index][:] = target
            self._simulate(self.states[index], alone)

    def _simulate(self, state: Any, alone: bool) -> None:
        mujoco, model = self._mujoco, self.model
        # A hovering pusher has no contacts, so skip the constraint solver, which is half of the cost.
        model.opt.disableflags = self._no_constraints if alone else 0
        mujoco.mj_step(model, state, NUM_SUBSTEPS)
        mujoco.mj_kinematics(model, state)
        mujoco.mj_camlight(model, state)

    def path(self, index: int, actions: np.ndarray) -> np.ndarray:
        """Simulate a copy under ``actions [C, 2]``; return the path of the pusher's centre from now on, ``[C + 1, 3]``."""
        state = copy.copy(self.states[index])
        pusher, body = state.qpos[self._pusher : self._pusher + 2], state.body("pusher")
        places = [body.xpos.copy()]
        for action in actions:
            state.ctrl[:] = _target(pusher, action)
            self._simulate(state, bool(self._hovers[index]))
            places.append(body.xpos.copy())
        return np.stack(places) + (0.0, 0.0, PUSHER_LENGTH_M / 2)

    def poses(self, index: int) -> dict[str, list[float]]:
        state = self.states[index]
        return {
            self.model.body(body).name: [*state.xpos[body].tolist(), *state.xquat[body].tolist()]
            for body in range(1, self.model.nbody)
        }

    def shown(self, ids: np.ndarray) -> np.ndarray:
        return self._groups[ids]

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return pusher positions ``[K, 2]``, pusher velocities ``[K, 2]`` and block positions ``[K, 3, 2]``, as float64."""
        first = self._pusher
        qpos = np.stack([self._positions[index] for index in ids])
        qvel = np.stack([self._velocities[index] for index in ids])
        return qpos[:, first : first + 2], qvel[:, first : first + 2], qpos[:, :9].reshape(-1, 3, 3)[:, :, :2]


def _target(pushers: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Return the commanded positions for ``actions`` from ``pushers``, both ``[..., 2]``."""
    return np.clip(pushers + STEP_M * actions, -PUSHER_LIMIT_M, PUSHER_LIMIT_M)
