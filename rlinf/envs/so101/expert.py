"""Scripted expert for the SO-101, which uses the cube's true pose and solves inverse kinematics for each phase's target."""

from typing import Any

import numpy as np

from rlinf.envs.graphics.backend import import_mujoco

OPEN, CLOSED = 0.9, -0.17
HOVER_M, CARRY_M = 0.06, 0.09
NEAR_M, ASIDE_M = 0.012, 0.020
UPRIGHT_REACH_M, FULL_REACH_M, MOST_TILT = 0.28, 0.45, np.deg2rad(65)
TURN_M_PER_RAD = 0.02
"""Position error in metres that has the same weight as a direction error of one radian."""
DAMPING, NUM_STEPS = 0.02, 25


def wanted_joints(env: Any, task: str, offset: np.ndarray) -> np.ndarray:
    """Return the expert's next six joint positions in radians; ``offset`` (x, y in metres) is its error in the cube's position."""
    cube_pose = env._slots[env._target_slot_idx].qpos_addr
    cube = env.data.qpos[cube_pose : cube_pose + 7].copy()
    cube[:2] += offset
    place, gripper = PHASES[task](env, cube)
    weight = env.data.qfrc_bias[env._arm_qvel_addrs] / env.model.actuator_gainprm[env._actuator_ids[:5], 0]
    return np.append(solve(env, place, *directions(cube)) + weight, gripper)  # motors sag under the arm's weight


def directions(cube: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fingers' direction at a cube (down, or tilted outwards if far away) and the cube edge along which they close."""
    reach = np.linalg.norm(cube[:2])
    outwards = np.append(cube[:2] / max(reach, 1e-6), 0.0)
    tilt = MOST_TILT * np.clip((reach - UPRIGHT_REACH_M) / (FULL_REACH_M - UPRIGHT_REACH_M), 0.0, 1.0)
    forward = np.sin(tilt) * outwards - np.cos(tilt) * np.array([0.0, 0.0, 1.0])
    tangent = np.cross([0.0, 0.0, 1.0], outwards)
    w, x, y, z = cube[3:]
    yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    turn = yaw - np.arctan2(tangent[1], tangent[0])
    turn = (turn + np.pi / 4) % (np.pi / 2) - np.pi / 4  # to the edge nearest to the tangent
    turn *= np.cos(tilt) ** 2  # horizontal fingers cannot turn
    across = np.cos(turn) * tangent - np.sin(turn) * outwards
    across -= (across @ forward) * forward
    return forward, across / np.linalg.norm(across)


def solve(env: Any, place: np.ndarray, forward: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Solve for the five arm joints that bring the fingers to ``place``, by damped least squares; position has priority."""
    mujoco, model, data = import_mujoco(), env.model, import_mujoco().MjData(env.model)
    data.qpos[:] = env.data.qpos
    joints, dofs, site = env._arm_qpos_addrs, env._arm_qvel_addrs, env._tcp_site_id
    moved, turned = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for _ in range(NUM_STEPS):
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_jacSite(model, data, moved, turned, site)
        axes = data.site_xmat[site].reshape(3, 3)
        side = across if axes[:, 0] @ across >= 0 else -across  # the fingers are symmetric under half a turn
        error = np.cross(axes[:, 2], forward) + 0.5 * np.cross(axes[:, 0], side)
        jacobian = np.concatenate([moved[:, dofs], TURN_M_PER_RAD * turned[:, dofs]])
        wanted = np.concatenate([place - data.site_xpos[site], TURN_M_PER_RAD * error])
        damped = jacobian @ jacobian.T + DAMPING**2 * np.eye(6)
        step = jacobian.T @ np.linalg.solve(damped, wanted)
        data.qpos[joints] = np.clip(data.qpos[joints] + step, env._target_low[:5], env._target_high[:5])
    return data.qpos[joints].copy()


def touch(env: Any, cube: np.ndarray) -> tuple[np.ndarray, float]:
    """Move to the cube."""
    return cube[:3], OPEN


def reach(env: Any, cube: np.ndarray) -> tuple[np.ndarray, float]:
    """Move above the cube, descend along the fingers' direction, and close them."""
    fingers = env._get_tcp_pose()[:3]
    forward, _ = directions(cube)
    way = fingers - cube[:3]
    aside = way - (way @ forward) * forward
    is_closing = env._get_current_qpos()[5] < 0.8 * OPEN and np.linalg.norm(way) < 3 * NEAR_M
    if is_closing or np.linalg.norm(way) < NEAR_M:
        return cube[:3], CLOSED
    if np.linalg.norm(aside) > ASIDE_M:
        return cube[:3] - HOVER_M * forward, OPEN
    return cube[:3], OPEN


def pick_lift(env: Any, cube: np.ndarray) -> tuple[np.ndarray, float]:
    """Grasp the cube and lift it."""
    if env._is_grasping():
        fingers = env._get_tcp_pose()[:3]
        return fingers + np.array([0.0, 0.0, 0.03]), CLOSED
    return reach(env, cube)


def pick_and_place(env: Any, cube: np.ndarray) -> tuple[np.ndarray, float]:
    """Grasp the cube, carry it above the disc, put it down, and release it."""
    goal = env._get_target_pos()
    to_goal = goal[:2] - cube[:2]
    if np.linalg.norm(to_goal) < 0.7 * env.config.goal_thresh and cube[2] < env._initial_obj_z + 0.006:
        return env._get_tcp_pose()[:3], OPEN
    if not env._is_grasping():
        return reach(env, cube)
    fingers = env._get_tcp_pose()[:3]
    if np.linalg.norm(to_goal) > 0.5 * env.config.goal_thresh:
        step = to_goal * min(1.0, 0.05 / np.linalg.norm(to_goal)) * (cube[2] > 0.6 * CARRY_M)
        return np.append(fingers[:2] + step, CARRY_M), CLOSED
    return fingers - np.array([0.0, 0.0, 0.01]), CLOSED


PHASES = {"PickLift": pick_lift, "PickAndPlace": pick_and_place, "Touch": touch}
