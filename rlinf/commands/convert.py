"""Converts HDF5 demonstrations to a LeRobotDataset."""

import os
from pathlib import Path

from rlinf.data.hdf5 import ConvertConfig, Hdf5Demonstrations, Hdf5Episode, import_h5py, open_demonstrations
from rlinf.data.lerobot_dataset import OWN_FILE
from rlinf.data.lerobot_format import import_pyarrow
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.errors import ConfigError, reject
from rlinf.files import Json
from rlinf.options import override_text, to_mapping
from rlinf.preflight.compatibility import require_package
from rlinf.preflight.folders import check_writable
from rlinf.tracking.progress import Progress
from rlinf.training.stop_signal import sigterm_is_ctrl_c

SHOWN_TASKS = 10


def convert(config: ConvertConfig) -> Path:
    """Check all episodes of ``config.source``, and write them one by one into the new folder ``config.dataset``."""
    for key in ("source", "dataset"):
        if getattr(config, key) is None:
            usage = "rlinf convert source=<HDF5 file or folder> dataset=data/<name>"
            raise ConfigError(f"`rlinf convert` needs {key}=<path>. Run {usage}")
    if os.path.lexists(Path(config.dataset).expanduser()):
        reject(f"dataset='{config.dataset}' exists", "a new folder", "dataset=<a new folder>")
    check_writable(config.dataset, "dataset")
    import_h5py()
    import_pyarrow("`rlinf convert`")
    if config.video:
        require_package("av", "video=true", "av", "video=false")
    demonstrations = open_demonstrations(config)
    for camera, (height, width) in demonstrations.image_shapes.items():
        if config.video and (height % 2 or width % 2):
            actual = f"The images of '{camera}' have {height} x {width} pixels"
            reject(actual, "even sides for MP4 files", "video=false")
    writer = LeRobotWriter(
        config.dataset,
        fps=demonstrations.fps,
        image_shapes=demonstrations.image_shapes,
        state_dim=demonstrations.state_dim,
        action_dim=demonstrations.action_dim,
        video=config.video,
        robot_type=demonstrations.layout.name.lower(),
    )
    progress, outcomes = Progress(), []
    with sigterm_is_ctrl_c(), writer:
        for arguments in demonstrations.read():
            writer.add_episode(**arguments)
            outcomes.append(bool(arguments["success"].any()))
            progress.update("convert", len(outcomes), len(demonstrations.episodes))
        writer.about[OWN_FILE] = _conditions(config, demonstrations, outcomes)
    progress.close()
    print(_summary(writer.folder, demonstrations, outcomes), flush=True)
    return writer.folder


def _conditions(config: ConvertConfig, demonstrations: Hdf5Demonstrations, outcomes: list[bool]) -> Json:
    """Return the contents of ``meta/rlinf.json``, which complements the format's own files."""

    def describe(number: int, episode: Hdf5Episode) -> Json:
        return {
            "episode_index": number,
            "file": episode.path.name,
            "name": episode.name,
            "num_env_steps": episode.num_rows,
            "success": outcomes[number],
            "seen_after_action": episode.seen_after_action,
        }

    return {
        "demonstrator": "hdf5",
        "layout": demonstrations.layout.name,
        "convert": to_mapping(config),
        "cameras": demonstrations.cameras,
        "state_keys": list(demonstrations.state_keys),
        "rotate_images": demonstrations.rotate_images,
        "env": dict(demonstrations.layout.env),
        "env_args": demonstrations.env_args,
        "whole": True,
        "episodes": [describe(number, episode) for number, episode in enumerate(demonstrations.episodes)],
    }


def _summary(folder: Path, demonstrations: Hdf5Demonstrations, outcomes: list[bool]) -> str:
    """Return the closing summary: episodes, pairing of observations and actions, and the overrides for training on them."""
    episodes = demonstrations.episodes
    late = sum(episode.seen_after_action for episode in episodes)
    tasks = list(dict.fromkeys(episode.task for episode in episodes))
    sizes = ", ".join(f"{name} {height} x {width}" for name, (height, width) in demonstrations.image_shapes.items())
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    num_frames = sum(episode.num_rows for episode in episodes)
    lines = [
        f"read      {len(episodes)} episodes in the layout of {demonstrations.layout.name}, {sum(outcomes)} with a reward of 1 (success)",
        f"images    {sizes}{', rotated by 180 degrees' if demonstrations.rotate_images else ''}",
        *(f"task      {task}" for task in tasks[:SHOWN_TASKS]),
        f"stored    {len(episodes)} episodes, {num_frames:,} frames, {num_bytes / 2**20:.1f} MiB",
        f"dataset   {folder}",
        f"train     sft.dataset={folder} 'sft.cameras={override_text(list(demonstrations.cameras))}'",
    ]
    if len(tasks) > SHOWN_TASKS:
        lines.insert(-3, f"          and {len(tasks) - SHOWN_TASKS} more")
    if late < len(episodes):
        lines.insert(2, f"paired    each observation with the action of its frame in {len(episodes) - late} episodes")
    if late:
        reason = "because they record observations after the action"
        lines.insert(2, f"paired    each observation with the next action in {late} episodes, {reason}")
    return "\n".join(lines)
