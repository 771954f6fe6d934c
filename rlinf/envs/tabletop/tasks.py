"""Task families of the tabletop: layouts, instructions, goals and scripted experts, vectorised over envs."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rlinf.envs.tabletop.scene import (
    BLOCK_COLOURS,
    BLOCK_HALF_SIZE_M,
    HOVER_HEIGHT_M,
    PUSH_HEIGHT_M,
    PUSHER_RADIUS_M,
    STEP_M,
    WORKSPACE_M,
    ZONE_COLOURS,
)
from rlinf.errors import ConfigError

MIN_DISTANCE_M = 0.115
"""Minimum distance between objects, and between the pusher's start and the objects."""
MIN_MOVED_DISTANCE_M = 0.08
"""Minimum distance between moved objects, and from them to the pusher; a block is 0.076 m across."""
MOST_MOVES = 10_000
"""Maximum number of draws for moved objects; the maximum offset and tolerance need fewer than 100."""
NUM_COLOURS = 3


@dataclass
class Layout:
    """An episode's first state in metres (NaN: hidden) and the instruction's colours (``second`` is -1 if there is only one)."""

    pusher: np.ndarray
    blocks: np.ndarray
    zones: np.ndarray
    first: int
    second: int


@dataclass
class Scene:
    """``K`` current states: positions ``[K, 2]``, ``[K, 3, 2]`` in metres; colours and stage int ``[K]``; goal tolerance."""

    pusher: np.ndarray
    blocks: np.ndarray
    zones: np.ndarray
    first: np.ndarray
    second: np.ndarray
    stage: np.ndarray
    tolerance_m: float

    def block(self, colour: np.ndarray) -> np.ndarray:
        return self.blocks[np.arange(len(colour)), colour]

    def zone(self, colour: np.ndarray) -> np.ndarray:
        return self.zones[np.arange(len(colour)), colour]


class Family(ABC):
    """A task family, vectorised over ``K`` envs; distances in metres. ``height`` is the pusher's."""

    name: ClassVar[str]
    horizon: ClassVar[int]
    height: ClassVar[float] = HOVER_HEIGHT_M
    shows_blocks: ClassVar[bool] = True
    shows_zones: ClassVar[bool] = False

    @abstractmethod
    def instruction(self, layout: Layout) -> str:
        """Return the instruction that states the goal."""

    @abstractmethod
    def distance_to_go(self, scene: Scene) -> np.ndarray:
        """Return the remaining distance ``[K]``, whose decrease is the dense reward."""

    @abstractmethod
    def success(self, scene: Scene) -> np.ndarray:
        """Return whether the goal is reached, bool ``[K]``."""

    @abstractmethod
    def aim(self, scene: Scene) -> np.ndarray:
        """Return the position of the pusher's next target, ``[K, 2]``."""

    def carry(self, scene: Scene) -> np.ndarray:
        """Return the remaining displacement of the object at ``aim``, ``[K, 2]`` (0 if it need not move)."""
        return np.zeros_like(scene.pusher)

    def objects(self, scene: Scene) -> np.ndarray | None:
        """Return the positions ``[K, 3, 2]`` among which the instruction chooses the one goal; None if a goal has several objects."""
        return None

    def touched(self, scene: Scene) -> np.ndarray:
        """Return whether the first of two stages is complete, bool ``[K]``."""
        return np.zeros(len(scene.pusher), dtype=bool)

    def expert(self, scene: Scene, aim_offset_m: np.ndarray) -> np.ndarray:
        """Return actions ``[K, 2]`` in [-1, 1], straight to ``aim`` plus the offsets ``[K, 2]``."""
        return straight(self.aim(scene) + aim_offset_m - scene.pusher)

    def sample(self, generator: np.random.Generator, distractors: bool) -> Layout:
        """Draw layouts from one generator until one is accepted."""
        show_blocks, show_zones = self.shows_blocks or distractors, self.shows_zones or distractors
        first, second = self.draw_goal(generator)
        while True:
            points = _spread(generator, 1 + NUM_COLOURS * (show_blocks + show_zones))
            nothing = np.full((NUM_COLOURS, 2), np.nan)
            blocks = points[1 : 1 + NUM_COLOURS] if show_blocks else nothing
            zones = points[-NUM_COLOURS:] if show_zones else nothing
            layout = Layout(points[0], blocks, zones, first, second)
            if self.accepts(layout):
                return layout

    def draw_goal(self, generator: np.random.Generator) -> tuple[int, int]:
        """Draw the instruction's colours."""
        return int(generator.integers(NUM_COLOURS)), -1

    def accepts(self, layout: Layout) -> bool:
        """Return whether the layout can be solved within the horizon."""
        return True

    def moved(self, layout: Layout, generator: np.random.Generator, distance_m: float, tolerance_m: float) -> Layout:
        """Move each object by ``distance_m`` in its own random direction, until a layout is accepted.

        Objects and pusher then neither touch nor are within ``tolerance_m``, where an episode would succeed immediately. Raise
        ConfigError after ``MOST_MOVES`` draws.
        """
        least = max(MIN_MOVED_DISTANCE_M, tolerance_m)
        objects = np.concatenate([layout.blocks, layout.zones])
        for _ in range(MOST_MOVES):
            angles = generator.uniform(0, 2 * np.pi, len(objects))
            moved = objects + distance_m * np.stack([np.cos(angles), np.sin(angles)], axis=1)
            everything = np.concatenate([layout.pusher[None], moved])
            apart = norm(everything[:, None] - everything)[~np.eye(len(everything), dtype=bool)]
            elsewhere = replace(layout, blocks=moved[:NUM_COLOURS], zones=moved[NUM_COLOURS:])
            if not (apart < least).any() and self.accepts(elsewhere):  # hidden objects are NaN
                return elsewhere
        raise ConfigError(
            f"env.object_offset_m={distance_m} leaves no valid positions in an episode of '{self.name}' after {MOST_MOVES} "
            f"draws; expected at least {least} m between objects and to the pusher. Set env.object_offset_m=0.03 env.tolerance_m=0.045"
        )


class Reach(Family):
    """Move the hovering pusher over a block."""

    name, horizon = "reach", 16

    def instruction(self, layout: Layout) -> str:
        return f"reach the {BLOCK_COLOURS[layout.first]} block"

    def aim(self, scene: Scene) -> np.ndarray:
        return self.objects(scene)[np.arange(len(scene.first)), scene.first]

    def objects(self, scene: Scene) -> np.ndarray:
        return scene.blocks

    def distance_to_go(self, scene: Scene) -> np.ndarray:
        return norm(self.aim(scene) - scene.pusher)

    def success(self, scene: Scene) -> np.ndarray:
        return self.distance_to_go(scene) < scene.tolerance_m


class ReachZone(Reach):
    """Move the hovering pusher over a zone."""

    name = "reach_zone"
    shows_blocks, shows_zones = False, True

    def instruction(self, layout: Layout) -> str:
        return f"go to the {ZONE_COLOURS[layout.first]} zone"

    def objects(self, scene: Scene) -> np.ndarray:
        return scene.zones


class TouchTwo(Family):
    """Move the hovering pusher over one block, then over a second; a black marker shows that the first is done."""

    name, horizon = "touch_two", 28

    def draw_goal(self, generator: np.random.Generator) -> tuple[int, int]:
        first, second = generator.permutation(NUM_COLOURS)[:2]
        return int(first), int(second)

    def instruction(self, layout: Layout) -> str:
        return f"touch the {BLOCK_COLOURS[layout.first]} block, then the {BLOCK_COLOURS[layout.second]} block"

    def aim(self, scene: Scene) -> np.ndarray:
        return np.where(scene.stage[:, None] == 0, scene.block(scene.first), scene.block(scene.second))

    def distance_to_go(self, scene: Scene) -> np.ndarray:
        between = norm(scene.block(scene.first) - scene.block(scene.second))
        return norm(self.aim(scene) - scene.pusher) + np.where(scene.stage == 0, between, 0.0)

    def touched(self, scene: Scene) -> np.ndarray:
        return (scene.stage == 0) & (norm(scene.block(scene.first) - scene.pusher) < scene.tolerance_m)

    def success(self, scene: Scene) -> np.ndarray:
        return (scene.stage == 1) & (norm(scene.block(scene.second) - scene.pusher) < scene.tolerance_m)


class Push(Family):
    """Push a block into a zone with the lowered pusher."""

    name, horizon, height = "push", 48, PUSH_HEIGHT_M
    shows_zones = True
    contact_m: ClassVar[float] = BLOCK_HALF_SIZE_M + PUSHER_RADIUS_M
    behind_m: ClassVar[float] = 0.065

    def draw_goal(self, generator: np.random.Generator) -> tuple[int, int]:
        return int(generator.integers(NUM_COLOURS)), int(generator.integers(NUM_COLOURS))

    def instruction(self, layout: Layout) -> str:
        return f"push the {BLOCK_COLOURS[layout.first]} block to the {ZONE_COLOURS[layout.second]} zone"

    def accepts(self, layout: Layout) -> bool:
        """Return whether the path behind the block and on to the zone is on the table and free of other blocks."""
        block, zone = layout.blocks[layout.first], layout.zones[layout.second]
        behind = block - self.behind_m * unit(zone - block)
        obstacles = np.delete(layout.blocks, layout.first, axis=0)
        return bool(
            np.abs(behind).max() < WORKSPACE_M + 0.05 and _segment_distance(obstacles, behind, zone).min() > 0.09
        )

    def aim(self, scene: Scene) -> np.ndarray:
        return scene.block(scene.first)

    def carry(self, scene: Scene) -> np.ndarray:
        return scene.zone(scene.second) - scene.block(scene.first)

    def distance_to_go(self, scene: Scene) -> np.ndarray:
        approach = np.maximum(norm(self.aim(scene) - scene.pusher) - self.contact_m, 0.0)
        return norm(self.carry(scene)) + approach

    def success(self, scene: Scene) -> np.ndarray:
        return norm(self.carry(scene)) < scene.tolerance_m

    def expert(self, scene: Scene, aim_offset_m: np.ndarray) -> np.ndarray:
        """Move around the block to the point behind it, then push towards the zone, correcting sideways errors."""
        block = self.aim(scene)
        forward = unit(self.carry(scene) + aim_offset_m)
        side = np.stack([-forward[:, 1], forward[:, 0]], axis=1)
        relative = scene.pusher - block
        along, across = (relative * forward).sum(1), (relative * side).sum(1)
        turn = np.where(across >= 0, 1.0, -1.0)[:, None]
        beside = block + 0.085 * turn * side - 0.02 * forward
        behind = block - self.behind_m * forward
        aligned = (along < -0.6 * self.contact_m) & (np.abs(across) < 0.035)
        clear = (along < -self.contact_m) | ((np.abs(across) > 0.06) & (along < 0.0))
        slower = np.clip(1.0 - np.abs(across) / 0.035, 0.0, 1.0)[:, None]
        push = 0.5 * STEP_M * slower * forward - 1.5 * across[:, None] * side
        way = np.where(aligned[:, None], push, np.where(clear[:, None], behind, beside) - scene.pusher)
        return straight(way)


FAMILIES: dict[str, Family] = {family.name: family for family in (Reach(), ReachZone(), TouchTwo(), Push())}


def norm(vectors: np.ndarray) -> np.ndarray:
    """Return Euclidean lengths over the last axis."""
    return np.sqrt((vectors * vectors).sum(-1))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1 (0 stays 0)."""
    return vectors / np.maximum(norm(vectors), 1e-9)[..., None]


def turned(vectors: np.ndarray, angles: np.ndarray | float) -> np.ndarray:
    """Return ``vectors [K, 2]`` rotated to the left by ``angles`` (radians, ``[K]`` or one for all)."""
    cos, sin, (x, y) = np.cos(angles), np.sin(angles), vectors.T
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=1)


def straight(way: np.ndarray) -> np.ndarray:
    """Return actions ``[K, 2]`` along ``way`` (metres): scaled, not clipped per axis, so that the path is straight."""
    actions = way / STEP_M
    return actions / np.maximum(np.abs(actions).max(-1, keepdims=True), 1.0)


def _spread(generator: np.random.Generator, count: int) -> np.ndarray:
    """Draw ``[count, 2]`` points in the workspace, at least ``MIN_DISTANCE_M`` apart."""
    points: list[tuple[float, float]] = []
    tries = 0
    while len(points) < count:
        if tries == 50:  # there may be no valid point left, so start over
            points, tries = [], 0
        # Plain floats are faster than array operations for so few points.
        x, y = generator.uniform(-WORKSPACE_M, WORKSPACE_M, 2).tolist()
        tries += 1
        if all(math.sqrt((a - x) * (a - x) + (b - y) * (b - y)) >= MIN_DISTANCE_M for a, b in points):
            points.append((x, y))
            tries = 0
    return np.array(points)


def _segment_distance(points: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the distances of ``points [N, 2]`` from a segment."""
    direction = end - start
    fraction = np.clip((points - start) @ direction / (direction @ direction), 0.0, 1.0)
    return norm(points - start - fraction[:, None] * direction)
