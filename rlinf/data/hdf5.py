"""Read robomimic and LIBERO HDF5 demonstrations, one episode at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rlinf.envs.libero.tasks import instruction
from rlinf.errors import ConfigError, RLinfError, damaged, did_you_mean, import_extra
from rlinf.files import Json
from rlinf.flags import flags_of
from rlinf.options import PathText, option, override_text

CONTROL_FREQ_HZ = 20
"""Default env steps per second in robosuite, for files that do not specify a rate."""


@dataclass
class ConvertConfig:
    """Input and output of `rlinf convert`."""

    source: PathText | None = option(None, "HDF5 file (.hdf5, .h5) from robomimic or LIBERO, or a folder of them.")
    dataset: PathText | None = option(None, "New folder for the LeRobotDataset.")
    task: str | None = option(None, "Instruction for all episodes; null: read from each file.")
    cameras: list[str] | None = option(None, "Keys under obs to convert to cameras; null: all images.")
    state_keys: list[str] | None = option(None, "Keys under obs that form the state; []: no state; null: default.")
    mask: str | None = option(None, "Robomimic filter key: convert only episodes in mask/<key>; null: all.")
    rotate_images: bool | None = option(None, "Rotate images by 180 degrees; null: only for LIBERO.")
    seen_after_action: bool | None = option(None, "Row t was observed after action t; null: detected for LIBERO.")
    fps: int | None = option(None, "Env steps per second; null: from the file, or 20.", minimum=1)
    video: bool = option(False, "Store MP4 files (small, lossy); false: PNG images (exact).")


@dataclass(frozen=True)
class FileLayout:
    """A project's file layout: state keys under ``obs``, camera names by key, and settings of the matching rlinf env."""

    name: str
    state: tuple[str, ...]
    rotated: bool = False
    cameras: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)


ROBOMIMIC = FileLayout("robomimic", ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"))
LIBERO = FileLayout(
    "LIBERO",
    ("ee_states", "gripper_states"),
    rotated=True,
    cameras={"agentview_rgb": "agentview", "eye_in_hand_rgb": "wrist"},
    env={"name": "libero", "gripper": "env", "rendering": "full"},
)
"""``ee_states`` (hand position and axis-angle rotation) and ``gripper_states`` together form the state of ``env=libero``."""


@dataclass(frozen=True)
class Hdf5Episode:
    """An episode's file, group, instruction and number of rows, and whether row ``t`` was observed after action ``t``."""

    path: Path
    name: str
    task: str
    num_rows: int
    seen_after_action: bool


@dataclass(frozen=True)
class Hdf5Demonstrations:
    """Validated episodes; images are read one episode at a time. ``cameras`` and ``state_keys`` refer to keys under ``obs``."""

    layout: FileLayout
    episodes: list[Hdf5Episode]
    cameras: dict[str, str]
    image_shapes: dict[str, tuple[int, int]]
    state_keys: tuple[str, ...]
    state_dim: int
    action_dim: int
    rotate_images: bool
    fps: int
    env_args: Json

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of ``LeRobotWriter.add_episode``, episode by episode."""
        for path in dict.fromkeys(episode.path for episode in self.episodes):
            with _opened(path) as file:
                for episode in [episode for episode in self.episodes if episode.path == path]:
                    with _reading(f"{episode.name} of {path}"):
                        arguments = self._read(file["data"][episode.name], episode)
                    yield arguments  # outside `_reading`, which must not catch the consumer's exceptions

    def _read(self, demo: Any, episode: Hdf5Episode) -> dict[str, Any]:
        seen = slice(0, episode.num_rows)
        done = slice(1, None) if episode.seen_after_action else seen
        images = {camera: demo[f"obs/{key}"][seen] for camera, key in self.cameras.items()}
        if self.rotate_images:
            images = {camera: np.ascontiguousarray(image[:, ::-1, ::-1]) for camera, image in images.items()}
        rewards = np.asarray(demo["rewards"][done], np.float32).reshape(-1)
        success = rewards >= 1.0
        ended = success[-1]
        # robomimic's `dones` may also mark successes in mid-episode, so only the last value is used.
        if "dones" in list(demo):
            ended = flags_of(demo["dones"][-1], f"`dones` of {episode.name}").all()
        return {
            "images": images,
            "state": _state(demo, self.state_keys)[seen] if self.state_keys else None,
            "actions": np.asarray(demo["actions"][done], np.float32).reshape(episode.num_rows, -1),
            "task": episode.task,
            "rewards": rewards,
            "success": success,
            "truncated": not bool(ended),
        }


def open_demonstrations(config: ConvertConfig) -> Hdf5Demonstrations:
    """Open all episodes of ``config.source`` and validate all but their pixels. All files must match the first one."""
    if config.task is not None and not config.task.strip():
        raise ConfigError(f"task='{config.task}'; expected the instruction. Set 'task=<what the robot is to do>'")
    paths = _files(config)
    episodes: list[Hdf5Episode] = []
    first: Hdf5Demonstrations | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with _opened(path) as file, _reading(path):
            names, late = _names(file, path, config.mask), None
            for name in names:
                demo, place = file["data"][name], f"{name} of {path}"
                if first is None:
                    first = _describe(file, demo, path, config)
                demo_shapes = _checked_shapes(demo, first, place)
                if shapes and demo_shapes != shapes:
                    key = next(key for key in shapes if shapes[key] != demo_shapes[key])
                    raise ConfigError(
                        f"{key} of {place} has rows of shape {list(demo_shapes[key])}, but {list(shapes[key])} in "
                        f"{episodes[0].name} of {episodes[0].path}; expected one shape. Convert them to two datasets"
                    )
                shapes = demo_shapes
                if late is None:
                    late = _seen_after_action(file, names, path, first.layout, config)
                num_rows = len(demo["actions"]) - late
                if num_rows < 1:
                    raise ConfigError(
                        f"{place} has {len(demo['actions'])} actions; expected at least {1 + late}. Use a different file"
                    )
                task = _task(file, demo, path, first.layout, config)
                episodes.append(Hdf5Episode(path, name, task, num_rows, late))
    if not episodes:
        raise ConfigError(f"mask={config.mask} selects no episodes in {config.source}. Set mask=null")
    return replace(first, episodes=episodes, action_dim=int(np.prod(shapes["actions"])))


def _files(config: ConvertConfig) -> list[Path]:
    source = Path(config.source).expanduser()
    if source.is_file():
        return [source]
    if paths := sorted(path for path in source.rglob("*") if path.suffix in (".hdf5", ".h5")):
        return paths
    what = "has no file *.hdf5 or *.h5" if source.is_dir() else "does not exist"
    raise ConfigError(f"source='{config.source}' {what}. Set source=<HDF5 file, or folder of such files>")


def import_h5py() -> ModuleType:
    return import_extra("h5py", "`rlinf convert`", "lerobot")


@contextmanager
def _reading(place: object) -> Iterator[None]:
    """Convert any h5py exception caused by an unreadable file to a ConfigError."""
    try:
        yield
    except RLinfError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        raise damaged(place, error) from error


def _opened(path: Path) -> Any:
    with _reading(path):
        return import_h5py().File(path, "r")


def _child(group: Any, path: str) -> Any:
    """Return the object at ``path``, or None if no group lists it. Unlike ``group.get``, raise an error for a damaged link."""
    for name in path.split("/"):
        if not isinstance(group, import_h5py().Group) or name not in list(group):
            return None
        group = group[name]
    return group


def _listed(group: Any) -> list[str]:
    return list(group) if isinstance(group, import_h5py().Group) else []


def _names(file: Any, path: Path, mask: str | None) -> list[str]:
    group, data = import_h5py().Group, _child(file, "data")
    names = [name for name in data if isinstance(data[name], group)] if isinstance(data, group) else []
    if not names:
        has = ", ".join(file) or "nothing"
        raise ConfigError(
            f"{path} has no episodes under 'data' (it contains {has}); expected the layout of robomimic or LIBERO. Use a different file"
        )
    names = sorted(names, key=lambda name: (len(name), name))
    if mask is None:
        return names
    masks = _listed(_child(file, "mask"))
    if mask not in masks:
        has = f"mask/ with {', '.join(masks)}" if masks else "no group 'mask'"
        raise ConfigError(
            f"mask={mask}, but {path} has {has}.{did_you_mean(mask, masks)} Set mask={masks[0] if masks else 'null'}"
        )
    if isinstance(file["mask"][mask], group):
        raise ConfigError(f"mask/{mask} of {path} is a group; expected a list of episodes. Set mask=null")
    wanted = {_text(name) for name in np.ravel(file["mask"][mask][()])}
    if unknown := sorted(wanted - set(names)):
        raise damaged(path, f"mask/{mask} names {unknown[0]}, which is not under 'data'")
    return [name for name in names if name in wanted]


def _describe(file: Any, demo: Any, path: Path, config: ConvertConfig) -> Hdf5Demonstrations:
    observed = _listed(_child(demo, "obs"))
    if not observed:
        raise ConfigError(
            f"{demo.name[1:]} of {path} has no observations ('obs'), only {', '.join(demo)}. Extract them first, with robomimic's "
            "dataset_states_to_obs.py or LIBERO's create_dataset.py"
        )
    layout = LIBERO if set(LIBERO.cameras) & set(observed) else ROBOMIMIC
    images = [key for key in observed if _is_image(demo[f"obs/{key}"])]
    keys = images if config.cameras is None else config.cameras
    _check_named("cameras", keys, images, observed, path)
    cameras: dict[str, str] = {}
    for key in keys:
        name = layout.cameras.get(key, key.removesuffix("_image"))
        cameras[key if name in cameras else name] = key
    vectors = [key for key in observed if key not in images and _is_numbers(demo[f"obs/{key}"])]
    state_keys = layout.state if config.state_keys is None else tuple(config.state_keys)
    if state_keys:
        _check_named("state_keys", state_keys, vectors, observed, path)
    convention = _text(file["data"].attrs.get("macros_image_convention", "opengl"))
    if layout.rotated and config.rotate_images is None and convention != "opengl":
        raise ConfigError(
            f"{path} has macros_image_convention={convention}; expected opengl, as in LIBERO's own files, which are "
            "upside down. Check an image, and set rotate_images=true or rotate_images=false"
        )
    env_args = _json(file["data"].attrs.get("env_args"), f"env_args of {path}")
    return Hdf5Demonstrations(
        layout=layout,
        episodes=[],
        cameras=cameras,
        image_shapes={camera: demo[f"obs/{key}"].shape[1:3] for camera, key in cameras.items()},
        state_keys=tuple(state_keys),
        state_dim=sum(int(np.prod(demo[f"obs/{key}"].shape[1:])) for key in state_keys),
        action_dim=0,  # set after the checks
        rotate_images=layout.rotated if config.rotate_images is None else config.rotate_images,
        fps=config.fps or _control_freq(env_args, path),
        env_args=env_args,
    )


def _check_named(
    option_name: str, keys: Sequence[str], known: Sequence[str], observed: Sequence[str], path: Path
) -> None:
    what = "images (uint8, [T, H, W, 3])" if option_name == "cameras" else "vectors"
    example = f"Set '{option_name}={override_text(known[:2])}'"
    example += "" if option_name == "cameras" else " or state_keys=[]"
    wrong = next((key for key in keys if key not in known), None)
    if wrong is not None or not keys:
        problem = f"{option_name} names '{wrong}'" if keys else "There are no images"
        raise ConfigError(
            f"{problem}; {path} has the {what} {', '.join(known) or '(none)'} among {', '.join(observed)}. {example}"
        )
    if len(set(keys)) < len(keys):
        raise ConfigError(
            f"{option_name} is {override_text(list(keys))}, which repeats a key; expected distinct keys. {example}"
        )


def _control_freq(env_args: Mapping[str, Any], path: Path) -> int:
    settings = env_args.get("env_kwargs")
    value = settings.get("control_freq") if isinstance(settings, dict) else None
    if value is None:
        return CONTROL_FREQ_HZ
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (value >= 1 and value % 1 == 0):
        raise ConfigError(
            f"env_args of {path} has control_freq={value!r}; expected an integer of env steps per second, at least 1. "
            "Set fps=<n>"
        )
    return int(value)


def _is_numbers(data: Any) -> bool:
    return isinstance(data, import_h5py().Dataset) and bool(data.shape) and data.dtype.kind in "biuf"


def _is_image(data: Any) -> bool:
    return getattr(data, "dtype", None) == np.uint8 and data.ndim == 4 and data.shape[-1] == 3


def _checked_shapes(demo: Any, described: Hdf5Demonstrations, place: str) -> dict[str, tuple[int, ...]]:
    """Check that all keys exist, have equal lengths and are finite if numeric; return each key's row shape."""
    images = [f"obs/{key}" for key in described.cameras.values()]
    numbers = ["actions", "rewards", *(f"obs/{key}" for key in described.state_keys)]
    measured = [*numbers, "dones"] if "dones" in list(demo) else numbers
    datasets = {key: _child(demo, key) for key in (*measured, *images)}
    for key, data in datasets.items():
        if data is None:
            known = [*demo, *(f"obs/{name}" for name in _listed(_child(demo, "obs")))]
            raise ConfigError(
                f"{place} has no '{key}'; it has {', '.join(known)}. Use a different file, cameras= or state_keys="
            )
        if not (_is_image(data) if key in images else _is_numbers(data)):
            what = f"{data.dtype} {data.shape}" if hasattr(data, "dtype") else "a group"
            needed = "images (uint8, [T, H, W, 3])" if key in images else "a row of numbers for each step"
            raise ConfigError(f"'{key}' of {place} is {what}; expected {needed}. Use a different file")
    lengths = {key: data.shape[0] for key, data in datasets.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise damaged(place, f"its numbers of rows are {counts}; expected equal numbers")
    for key in measured:
        width, single = int(np.prod(datasets[key].shape[1:])), key in ("rewards", "dones")
        if width != 1 and (single or not width):
            needed = "one" if single else "at least one"
            raise ConfigError(f"'{key}' of {place} has {width} values per row; expected {needed}. Use a different file")
        with _reading(place):
            values = np.asarray(datasets[key][()], np.float64).reshape(-1, width)
        bad = np.flatnonzero(~np.isfinite(values).all(1))
        if len(bad):
            raise damaged(place, f"{key} of row {bad[0]} is not finite")
    return {key: datasets[key].shape[1:] for key in (*numbers, *images)}


def _seen_after_action(file: Any, names: Sequence[str], path: Path, layout: FileLayout, config: ConvertConfig) -> bool:
    """Return whether row ``t`` of a file's episodes was observed after action ``t``.

    LIBERO's own script replays the actions and reads the sensors after each one, while ``states[t]`` is the state before it. This
    is detected from the arm's joints, which are in both (right after the time in ``states``), in the first episode with motion.
    """
    if config.seen_after_action is not None or layout is not LIBERO:
        return bool(config.seen_after_action)
    choice = "Set seen_after_action=true (as LIBERO's own script writes: row t was observed after action t) or seen_after_action=false"
    unknown = "so whether its rows were observed after their actions cannot be determined"
    for name in names:
        demo = file["data"][name]
        datasets = {key: _child(demo, key) for key in ("obs/joint_states", "states")}
        for key, data in datasets.items():
            if not _is_numbers(data) or data.ndim != 2:
                raise ConfigError(
                    f"{name} of {path} has no vectors '{key}', {unknown}; expected one for each row. {choice}"
                )
        joints, states = (data[()] for data in datasets.values())
        arm = states[:, 1 : 1 + joints.shape[1]]
        if joints.shape != arm.shape:
            raise ConfigError(
                f"{name} of {path} has obs/joint_states of shape {list(joints.shape)} and states of shape {list(states.shape)}, "
                f"{unknown}; expected as many rows, and the joints after the time in states. {choice}"
            )
        if len(arm) > 1 and not np.array_equal(arm[1:], arm[:-1]):
            return bool(np.abs(joints[:-1] - arm[1:]).mean() < np.abs(joints[:-1] - arm[:-1]).mean())
    raise ConfigError(f"No arm moves in the episodes of {path}, {unknown}; expected two rows that differ. {choice}")


def _task(file: Any, demo: Any, path: Path, layout: FileLayout, config: ConvertConfig) -> str:
    """Return the instruction from the option, LIBERO's file name (as in published evaluations), or the file's metadata."""
    if config.task is not None:
        return config.task
    if layout is LIBERO and path.stem.endswith("_demo"):
        return instruction(path.stem.removesuffix("_demo"))
    about = _json(demo.attrs.get("ep_meta"), f"ep_meta of {demo.name[1:]} in {path}")
    problem = _json(file["data"].attrs.get("problem_info"), f"problem_info of {path}")
    value = about.get("lang") or problem.get("language_instruction")
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "".join(value)
    if isinstance(value, str) and (text := value.strip('" ')):
        return text
    raise ConfigError(
        f"{path} has no instruction for {demo.name[1:]} (neither problem_info nor lang in ep_meta). "
        "Set 'task=<what the robot is to do>'"
    )


def _state(demo: Any, keys: Sequence[str]) -> np.ndarray:
    parts = [np.asarray(demo[f"obs/{key}"][()], np.float32) for key in keys]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _json(value: Any, place: str) -> Json:
    """Parse an attribute that contains a JSON object; return an empty dictionary if it is missing."""
    if value is None:
        return {}
    try:
        content = json.loads(_text(value))
    except ValueError as error:
        raise damaged(place, error) from error
    if not isinstance(content, (dict, type(None))):
        raise damaged(place, f"it is {content!r}; expected a JSON object")
    return content or {}
