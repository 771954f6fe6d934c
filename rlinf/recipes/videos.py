"""Find the video files that rows refer to, and read their frames."""

import fcntl
import math
import os
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from rlinf.data.video import import_av
from rlinf.recipes.datasets import cosmos_cache, local_folder
from rlinf.recipes.samples import BadRowError

MAX_FRAMES = 64
SUFFIXES = (".mp4", ".avi", ".mov")


def find_video(name: str, dataset: str, subset: str = "") -> Path:
    """Return a video's path by its base name; the first call unpacks the clip archives.

    The search covers the dataset's folder and ``$COSMOS_CACHE/datasets/<dataset>/<subset>/video_clips``.
    """
    videos, folders = _videos(dataset, subset, cosmos_cache())
    path = videos.get(Path(name).name)
    if path is None:
        places = " and ".join(f"'{folder}'" for folder in folders)
        raise BadRowError(
            f"its video '{name}' is not among the {len(videos)} videos in {places}; expected a file of this name there."
        )
    return path


@lru_cache(maxsize=8)
def _videos(dataset: str, subset: str, cache: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the videos by base name, and the folders that were searched."""
    folder = local_folder(dataset)
    name = dataset if folder is None or not Path(dataset).expanduser().exists() else folder.name
    clips = cache / "datasets" / name / subset / "video_clips"
    if folder is None:
        from huggingface_hub import snapshot_download

        patterns = [f"{subset}/clips/*", f"{subset}/clips.tar.gz"]
        folder = Path(snapshot_download(dataset, repo_type="dataset", allow_patterns=patterns))
    unpack_clips(folder / subset, clips)
    folders = list(dict.fromkeys(path for path in (folder / subset, clips) if path.is_dir()))
    files = [path for searched in folders for path in sorted(searched.rglob("*")) if path.suffix.lower() in SUFFIXES]
    return {path.name: path for path in files}, folders


def unpack_clips(folder: Path, target: Path) -> None:
    """Unpack ``clips/*.tar.gz`` or ``clips.tar.gz`` in a dataset's folder once; concurrent processes wait."""
    archives = sorted([*folder.glob("clips/*.tar.gz"), *folder.glob("clips.tar.gz")])
    if not archives or (target / ".prepared").exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".video_clips.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A different process may have unpacked them while this one waited.
        if (target / ".prepared").exists():
            return
        target.mkdir(exist_ok=True)
        # Unpack next to the target and move file by file, so that an interruption leaves no partial video in the target.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".video_clips") as unpacked:
            for archive in archives:
                with tarfile.open(archive) as opened:
                    opened.extractall(unpacked, filter="data")
            for path in sorted(Path(unpacked).rglob("*")):
                if path.suffix.lower() in SUFFIXES:
                    os.replace(path, target / path.name)
        (target / ".prepared").touch()


def read_frames(
    path: Path, fps: float = 1.0, max_pixels: int | None = None, max_frames: int = MAX_FRAMES
) -> list[Image.Image]:
    """Read frames of a video at regular intervals, starting with the first frame.

    Frames are scaled down to ``max_pixels`` without changing the aspect ratio, and subsampled evenly if there are more than ``max_frames``.
    """
    av = import_av(f"Reading {path}")
    frames: list[Image.Image] = []
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                seconds = float(frame.time or 0.0)
                if seconds + 1e-6 >= len(frames) / fps:
                    frames.append(_scaled(frame.to_image(), max_pixels))
    except (OSError, IndexError, av.error.FFmpegError) as error:
        raise BadRowError(f"the video '{path}' cannot be read ({type(error).__name__}: {error}).") from error
    if not frames:
        raise BadRowError(f"the video '{path}' has no frames; expected at least one.")
    if len(frames) > max_frames:
        frames = [frames[round(index)] for index in np.linspace(0, len(frames) - 1, max_frames)]
    return frames


def _scaled(image: Image.Image, max_pixels: int | None) -> Image.Image:
    scale = 1.0 if max_pixels is None else math.sqrt(max_pixels / (image.width * image.height))
    if scale >= 1:
        return image
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))), Image.Resampling.BICUBIC)
