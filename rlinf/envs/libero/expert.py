"""Scripted expert for LIBERO tasks that put a bowl on a plate; its action depends on the simulator's current state only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mujoco import MjData

    from rlinf.envs.libero.scene import Scene, SceneState

OPEN, CLOSE = -1.0, 1.0
STEP_M, STEP_RAD = 0.05, 0.5
"""Displacement and rotation commanded by an action of 1."""
GAIN, LEAD_S = 2.0, 0.05
"""Steps the hand aims ahead, and the time after which its position is predicted, because the controller lags."""
RIM_RADIUS_M, RIM_M = 0.047, 0.036
"""A bowl's rim, and the height of the fingers above the bowl's origin while they hold it."""
HOVER_M, CARRY_M, MARGIN_M, RELEASE_M = 0.06, 0.07, 0.03, 0.012
"""Heights above the grasp before descending, of a bowl above its goal and above obstacles, and when opening."""
ALIGNED_M, ALIGNED_RAD, NEAR_M, HELD_M = 0.012, 0.2, 0.010, 0.03
CLEAR_M, BOWL_M = 0.006, 0.07
"""Gap between the hand and its surroundings that suffices, and the width of a carried bowl's path on either side."""
DIRECTIONS = np.array([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
"""From a bowl's centre to the grasped side, in order of preference: the hand starts closing along y."""
OUTSIDE = ((0.092, 0.03), (0.092, 0.06), (0.147, 0.13))
"""Points of the hand that need space, as (distance from the bowl's centre, height): the outer finger, and the hand itself."""


def is_solved(bddl_file: Path) -> bool:
    """Return whether the goal of a task is only that a bowl is on a plate."""
    goal = bddl_file.read_text(encoding="utf-8").partition("(:goal")[2]
    return re.fullmatch(r"\s*\(And \(On \w*bowl\w* \w*plate\w*\)\)[\s)]*", goal, re.IGNORECASE) is not None


class BowlExpert:
    """Grasps a bowl by its rim, carries it above obstacles, and puts it on the goal."""

    def __init__(self, scene: Scene) -> None:
        ((_, bowl, goal),) = scene._env.parsed_problem["goal_state"]
        self.scene, self._model, robot = scene, scene.model, scene._robot
        self._bowl, self._goal = scene._bodies[bowl], scene._bodies[goal]
        self._site, self._fingers = robot.eef_site_id, robot._ref_gripper_joint_vel_indexes
        model, roots = self._model, self._model.body_rootid
        fixed = np.isin(roots, [0, roots[self._bowl], roots[model.site_bodyid[self._site]]])
        fixed[[index for index in range(model.nbody) if model.body(index).name.startswith("mount")]] = True
        self._obstacles = np.flatnonzero((model.geom_contype > 0) & ~fixed[model.geom_bodyid])

    def action(self, state: SceneState, offset: np.ndarray) -> np.ndarray:
        """Return float64 ``[7]`` in LIBERO's convention; ``offset`` (x, y in metres) is the error in the bowl's position."""
        data = state.data
        hand, axes = data.site_xpos[self._site], data.site_xmat[self._site].reshape(3, 3)
        bowl, goal = data.xpos[self._bowl].copy(), data.xpos[self._goal]
        bowl[:2] += offset
        side = self._side(data, hand, axes, bowl)
        grasp = bowl + RIM_RADIUS_M * side + [0.0, 0.0, RIM_M]
        down = np.array([0.0, 0.0, -1.0])
        wanted = np.stack([np.abs(side), np.cross(down, np.abs(side)), down], axis=1)
        turn = np.cross(axes, wanted, axis=0).sum(1) / 2
        target, gripper = self._target(state, hand, bowl, grasp, goal, np.linalg.norm(turn) < ALIGNED_RAD)
        move = GAIN * (target - hand - LEAD_S * self._velocity(data)) / STEP_M
        return np.concatenate([move / max(1.0, np.abs(move).max()), np.clip(turn / STEP_RAD, -1.0, 1.0), [gripper]])

    def _target(
        self,
        state: SceneState,
        hand: np.ndarray,
        bowl: np.ndarray,
        grasp: np.ndarray,
        goal: np.ndarray,
        is_turned: bool,
    ) -> tuple[np.ndarray, float]:
        """Return the hand's next position and the gripper's command."""
        way, to_goal = hand - grasp, goal[:2] - bowl[:2]
        left, aside, away = np.linalg.norm(to_goal), np.linalg.norm(way[:2]), np.linalg.norm(way)
        if left < 0.025 and bowl[2] < goal[2] + RELEASE_M:
            return hand + [0.0, 0.0, 0.05], OPEN
        is_closing = state.gripper[0] < 0.8
        is_closed = state.gripper[0] < -0.4 and np.abs(state.data.qvel[self._fingers]).max() < 0.015
        if is_closed and away < HELD_M:
            if left < 0.02 or (left < 0.025 and bowl[2] < goal[2] + 0.06):
                return np.append(hand[:2] + to_goal, hand[2] - 0.03), CLOSE
            rise = max(goal[2] + CARRY_M, self._top(state.data, bowl, to_goal) + MARGIN_M) - bowl[2]
            fraction = np.clip(1.0 - (rise - 0.02) / 0.04, 0.0, 1.0)
            return np.append(hand[:2] + fraction * to_goal, hand[2] + rise), CLOSE
        if away < (2 * NEAR_M if is_closing else NEAR_M):
            return grasp, CLOSE
        hover = HOVER_M * (np.clip((aside - ALIGNED_M) / 0.02, 0.0, 1.0) if is_turned else 1.0)
        fraction = np.clip((way[2] - 0.4 * hover) / 0.02, 0.0, 1.0) if hover else 1.0  # first up, then aside
        return np.append(hand[:2] - fraction * way[:2], grasp[2] + hover), OPEN

    def _velocity(self, data: MjData) -> np.ndarray:
        body = self._model.site_bodyid[self._site]
        centre = data.subtree_com[self._model.body_rootid[body]]
        return data.cvel[body, 3:] + np.cross(data.cvel[body, :3], data.site_xpos[self._site] - centre)

    def _side(self, data: MjData, hand: np.ndarray, axes: np.ndarray, bowl: np.ndarray) -> np.ndarray:
        """Return one of ``DIRECTIONS``: the side where the fingers are, or the first with space for the hand."""
        way = hand - bowl
        across = DIRECTIONS[::2][np.abs(DIRECTIONS[::2] @ axes[:, 0]).argmax()]
        if abs(way @ across) > 0.02 and np.linalg.norm(way[:2]) < 0.09 and way[2] < RIM_M + 0.05:
            return np.sign(way @ across) * across
        gaps = np.array([
            min(self._gap(data, bowl + reach * side + [0.0, 0.0, height]) for reach, height in OUTSIDE)
            for side in DIRECTIONS
        ])  # fmt: skip
        return DIRECTIONS[(gaps > CLEAR_M).argmax() if (gaps > CLEAR_M).any() else gaps.argmax()]

    def _gap(self, data: MjData, point: np.ndarray) -> float:
        """Return the distance from a point to the nearest obstacle's box."""
        boxes = self._model.geom_aabb[self._obstacles]
        axes = data.geom_xmat[self._obstacles].reshape(-1, 3, 3)
        inside = np.einsum("gji,gj->gi", axes, point - data.geom_xpos[self._obstacles]) - boxes[:, :3]
        return np.linalg.norm(np.maximum(np.abs(inside) - boxes[:, 3:], 0.0), axis=1).min()

    def _top(self, data: MjData, bowl: np.ndarray, to_goal: np.ndarray) -> float:
        """Return the height of the highest obstacle on the bowl's path."""
        boxes = self._model.geom_aabb[self._obstacles]
        axes = data.geom_xmat[self._obstacles].reshape(-1, 3, 3)
        centres = data.geom_xpos[self._obstacles] + np.einsum("gij,gj->gi", axes, boxes[:, :3])
        halves = np.einsum("gij,gj->gi", np.abs(axes), boxes[:, 3:])
        path = bowl[:2] + np.linspace(0.0, 1.0, 6)[:, None, None] * to_goal
        below = (np.abs(path - centres[:, :2]) < halves[:, :2] + BOWL_M).all(-1).any(0)
        return float((centres[:, 2] + halves[:, 2])[below].max())
