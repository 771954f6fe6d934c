"""The built-in simulator: language-conditioned tasks on a table, with many states but one renderer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rlinf.envs.base import VectorEnv
from rlinf.envs.graphics.backend import choose_backend
from rlinf.envs.graphics.renderer import StateRenderer, project
from rlinf.envs.steps import SimulatorStep
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.envs.tabletop.scene import CAMERAS, NUM_SUBSTEPS, TIMESTEP_S, WORKSPACE_M, TabletopSimulator
from rlinf.envs.tabletop.tasks import FAMILIES, NUM_COLOURS, Family, Reach, Scene, norm, straight, turned
from rlinf.errors import reject
from rlinf.options import override_text
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec, Observation

REWARD_PER_METRE = 3.0
SPEED_SCALE_M_PER_S = 0.5
MOVED_M = 0.03
"""Displacement used by ``moved``, in metres."""


class TabletopVectorEnv(VectorEnv):
    """Coloured blocks and zones on a table, and a pusher moved by ``(dx, dy)`` in all tasks.

    A task is a family (``rlinf.envs.tabletop.tasks``); colours, positions and the instruction derive from the ``EpisodeSpec``.
    The dense reward is 3 per metre of progress towards the goal. The GL context is created for the first image. Any thread may
    call the env, one at a time. Raises MissingDependencyError without MuJoCo or a GL for its images.
    """

    config_class = TabletopConfig
    suite: ClassVar[str] = "tabletop"
    camera_names: ClassVar[tuple[str, ...]] = CAMERAS
    packages: ClassVar[tuple[str, ...]] = ("mujoco",)
    config: TabletopConfig

    def __init__(self, config: TabletopConfig, num_envs: int, auto_reset: bool) -> None:
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(2), action_high=np.ones(2))
        self.metadata["render_fps"] = 1 / (TIMESTEP_S * NUM_SUBSTEPS)
        if config.cameras:
            choose_backend()
        self._simulator = TabletopSimulator(num_envs, config.camera_offset_m)
        self._renderers: dict[int, StateRenderer] = {}
        self._families: list[Family] = [FAMILIES[name] for name in self.task_names]
        self._family_ids = np.array([list(FAMILIES).index(name) for name in self.task_names])
        self._tasks = np.zeros(num_envs, dtype=np.int64)
        self._zones = np.zeros((num_envs, NUM_COLOURS, 2))
        self._shown = np.zeros((num_envs, 2 * NUM_COLOURS), dtype=bool)
        self._goals = np.zeros((num_envs, 2), dtype=np.int64)
        self._stages = np.zeros(num_envs, dtype=np.int64)
        self._to_go = np.zeros(num_envs)
        self._held = np.zeros(num_envs, dtype=np.int64)  # consecutive env steps at the goal, and at each object
        self._held_at = np.zeros((num_envs, NUM_COLOURS), dtype=np.int64)
        self._visited = np.zeros((num_envs, NUM_COLOURS), dtype=bool)
        self._instructions = [""] * num_envs

    @classmethod
    def all_task_names(cls, config: TabletopConfig) -> list[str]:
        return list(FAMILIES)

    @classmethod
    def state_width(cls, config: TabletopConfig) -> int:
        """Return 31 (full), 4 (proprio) or 0 (none); see ``_state``."""
        return {"full": 31, "proprio": 4, "none": 0}[config.state]

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        if not self.state_dim:
            return None
        high = np.array([1.0] * 4 + [2.0] * 16 + [1.0] * 11)[: self.state_dim]
        low = -np.where(np.arange(self.state_dim) < 20, high, 0.0)
        return low, high

    @classmethod
    def moved(cls, config: TabletopConfig, what: str) -> TabletopConfig | None:
        names = {"objects": "object_offset_m", "cameras": "camera_offset_m"}
        return replace(config, **{names[what]: MOVED_M}) if what in names else None

    @classmethod
    def check_names(cls, config: TabletopConfig) -> None:
        """Also raise ConfigError for ``wrong_object_ends`` with a goal of several objects, and ``hold_steps`` above the horizon."""
        super().check_names(config)
        simple = [name for name, family in FAMILIES.items() if isinstance(family, Reach)]
        names = cls.selected_tasks(config)
        if config.hold_steps > (horizon := min(cls.horizon_of(config, name) for name in names)):
            limit = f"at most {horizon}, the env steps of the shortest episode"
            reject(f"env.hold_steps={config.hold_steps}", limit, f"env.hold_steps={horizon}")
        if config.wrong_object_ends and not set(names) <= set(simple):
            reject(
                f"env.wrong_object_ends=true with env.tasks={override_text(names)}", f"only {' and '.join(simple)}",
                f"env.tasks={override_text([name for name in names if name in simple] or simple)}",
            )  # fmt: skip

    @classmethod
    def horizon_of(cls, config: TabletopConfig, task: str) -> int:
        return config.max_episode_steps or FAMILIES[task].horizon

    def _reset_env(self, index: int, spec: EpisodeSpec) -> None:
        family = self._families[spec.task_id]
        generator = np.random.default_rng(derive_seed(spec.seed, self.suite, family.name, spec.init_state_id))
        layout = family.sample(generator, self.config.distractors)
        if self.config.object_offset_m:
            layout = family.moved(layout, generator, self.config.object_offset_m, self.config.tolerance_m)
        self._simulator.place(index, layout.pusher, family.height, layout.blocks, layout.zones)
        self._tasks[index], self._stages[index] = spec.task_id, 0
        self._goals[index] = layout.first, layout.second
        self._zones[index] = layout.zones
        self._shown[index] = ~np.isnan(np.concatenate([layout.blocks, layout.zones])[:, 0])
        self._instructions[index] = family.instruction(layout)

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        super()._reset_envs(ids, specs)
        self._held[ids], self._held_at[ids], self._visited[ids] = 0, 0, False
        for rows, family in self._by_family(ids):
            self._to_go[ids[rows]] = family.distance_to_go(self._scene(ids[rows]))

    def _step_envs(self, ids: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        self._simulator.step(ids, actions)
        dense, hold_steps = np.zeros(len(ids), dtype=np.float32), self.config.hold_steps
        success, failure = np.zeros(len(ids), dtype=bool), np.zeros(len(ids), dtype=bool)
        for rows, family in self._by_family(ids):
            family_ids = ids[rows]
            scene = self._scene(family_ids)
            # The marker has no contacts, so it changes images but not the physics.
            for row in np.flatnonzero(family.touched(scene)):
                self._stages[family_ids[row]] = scene.stage[row] = 1
                self._simulator.mark(family_ids[row], scene.block(scene.first)[row])
            to_go = family.distance_to_go(scene)
            dense[rows] = REWARD_PER_METRE * (self._to_go[family_ids] - to_go)
            self._held[family_ids] = np.where(family.success(scene), self._held[family_ids] + 1, 0)
            success[rows] = self._held[family_ids] >= hold_steps
            failure[rows] = self._note_visits(family_ids, family, scene) & ~success[rows]
            self._to_go[family_ids] = to_go
        return SimulatorStep(dense, success, failure if self.config.wrong_object_ends else None)

    def _note_visits(self, ids: np.ndarray, family: Family, scene: Scene) -> np.ndarray:
        """Count the steps that pushers have spent at each object, and return whether any has stayed at a wrong one, bool ``[K]``."""
        objects = family.objects(scene)
        if objects is None:
            return np.zeros(len(ids), dtype=bool)
        near = norm(objects - scene.pusher[:, None]) < scene.tolerance_m
        self._held_at[ids] = np.where(near, self._held_at[ids] + 1, 0)
        stayed = self._held_at[ids] >= self.config.hold_steps
        self._visited[ids] |= stayed
        return (stayed & (np.arange(NUM_COLOURS) != scene.first[:, None])).any(1)

    def _observe(self, ids: np.ndarray) -> Observation:
        names = self.config.cameras
        images = {}
        if names:
            rendered = self._render(ids, [self._simulator.camera_ids[name] for name in names], self.config.image_size)
            images = dict(zip(names, rendered, strict=True))
        return Observation(images, self._state(ids), [self._instructions[index] for index in ids])

    def expert_actions(
        self,
        aim_offset_m: tuple[float, float] = (0.0, 0.0),
        aim_offset_rule: str = "constant",
        aim_turn_deg: float = 0.0,
    ) -> np.ndarray:
        """Return the scripted expert's actions, float32 ``[B, 2]``, with the aiming error of ``sft.expert``."""
        self._check_reset()
        actions = np.zeros((self.num_envs, 2), dtype=np.float32)
        offsets = np.tile(np.asarray(aim_offset_m, dtype=np.float64), (self.num_envs, 1))
        if aim_offset_rule == "by_instruction":
            number = self._tasks * NUM_COLOURS + self._goals[:, 0]
            angles = 2 * np.pi * number / (len(self._families) * NUM_COLOURS)  # to the left
            offsets = turned(offsets, angles)
        for rows, family in self._by_family(np.arange(self.num_envs)):
            scene = self._scene(rows)
            goal = family.aim(scene) + family.carry(scene)
            turn = turned(goal, np.radians(aim_turn_deg)) - goal
            actions[rows] = family.expert(scene, offsets[rows] + turn)
        return actions

    def uninstructed_actions(self) -> np.ndarray:
        """Return actions ``[B, 2]`` that stay at each object in turn, the nearest first, whatever the instruction names.

        Raise ConfigError for tasks whose goal has several objects.
        """
        self._check_reset()
        actions, running = np.zeros((self.num_envs, 2), dtype=np.float32), np.flatnonzero(~self._finished)
        for rows, family in self._by_family(running):
            ids = running[rows]
            scene = self._scene(ids)
            if (objects := family.objects(scene)) is None:
                return super().uninstructed_actions()
            ways = objects - scene.pusher[:, None]
            nearest = np.where(self._visited[ids], np.inf, norm(ways)).argmin(1)
            actions[ids] = straight(ways[np.arange(len(ids)), nearest])
        return actions

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        self._check_reset()
        return self._render(np.asarray(ids, dtype=np.int64), [self._simulator.camera_ids["front"]], size)[0]

    def chunk_paths(self, ids: Sequence[int], chunks: np.ndarray, size: int) -> np.ndarray:
        """Return the pushers' simulated paths, ``[K, C + 1, 2]``, assuming that no episode ends within the chunk."""
        self._check_reset()
        simulator, camera = self._simulator, self._simulator.camera_ids["front"]
        paths = [
            project(simulator.model, simulator.states[index], camera, simulator.path(index, chunk), size)
            for index, chunk in zip(ids, chunks, strict=True)
        ]
        return np.stack(paths)

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        self._check_reset()
        return [self._simulator.poses(int(index)) for index in ids]

    def offload(self) -> None:
        self.close_extras()

    def close_extras(self, **kwargs: object) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _render(self, ids: np.ndarray, camera_ids: list[int], size: int) -> np.ndarray:
        if size not in self._renderers:
            self._renderers[size] = StateRenderer(self._simulator.model, size)
        states = [self._simulator.states[index] for index in ids]
        return self._renderers[size].render(states, camera_ids, self._simulator.shown(ids))

    def _by_family(self, ids: np.ndarray) -> list[tuple[np.ndarray, Family]]:
        """Return (positions in ``ids``, family) for each family among ``ids``."""
        if len(self._families) == 1 and len(ids):
            return [(np.arange(len(ids)), self._families[0])]
        tasks = self._tasks[ids]
        return [
            (rows, family) for task, family in enumerate(self._families) if len(rows := np.flatnonzero(tasks == task))
        ]

    def _scene(self, ids: np.ndarray) -> Scene:
        return self._scene_of(ids, *self._simulator.read(ids)[::2])  # without velocities

    def _scene_of(self, ids: np.ndarray, pusher: np.ndarray, blocks: np.ndarray) -> Scene:
        first, second = self._goals[ids].T
        return Scene(pusher, blocks, self._zones[ids], first, second, self._stages[ids], self.config.tolerance_m)

    def _state(self, ids: np.ndarray) -> np.ndarray | None:
        """Return float32 ``[K, S]``; positions are in units of ``WORKSPACE_M``, hidden objects are 0.

        Columns of "full": pusher position (2) and velocity (2); vector to the next target (2); target object's remaining displacement
        (2); blocks (6) and zones (6) relative to the pusher; one-hot instruction colours (3 + 3) and family (4); stage (1).
        """
        if self.config.state == "none":
            return None
        pusher, velocity, blocks = self._simulator.read(ids)
        proprio = np.concatenate([pusher / WORKSPACE_M, velocity / SPEED_SCALE_M_PER_S], axis=1)
        if self.config.state == "proprio":
            return proprio.astype(np.float32)
        aim, carry = np.zeros((len(ids), 2)), np.zeros((len(ids), 2))
        for rows, family in self._by_family(ids):
            scene = self._scene_of(ids[rows], pusher[rows], blocks[rows])
            aim[rows], carry[rows] = family.aim(scene) - scene.pusher, family.carry(scene)
        objects = np.concatenate([blocks, self._zones[ids]], axis=1) - pusher[:, None]
        objects = np.where(self._shown[ids][:, :, None], objects, 0.0).reshape(len(ids), -1)
        one_hot = np.eye(NUM_COLOURS + 1)[:, :NUM_COLOURS]
        goals = one_hot[self._goals[ids]].reshape(len(ids), -1)
        families = np.eye(len(FAMILIES))[self._family_ids[self._tasks[ids]]]
        metres = np.concatenate([aim, carry, objects], axis=1) / WORKSPACE_M
        return np.concatenate([proprio, metres, goals, families, self._stages[ids, None]], axis=1).astype(np.float32)
