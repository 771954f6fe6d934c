"""Write MP4 videos of episodes that any browser can show, with the instruction, env step and outcome above the image."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.errors import MissingDependencyError
from rlinf.files import naming

SUCCESS_COLOUR, FAILURE_COLOUR = (46, 160, 90), (205, 75, 75)
BAND_COLOUR, TEXT_COLOUR = (24, 26, 31), (236, 238, 242)


def wrap_text(text: str, font: Any, width: int) -> list[str]:
    """Break ``text`` into lines of at most ``width`` pixels, splitting any word that is longer."""
    lines = [""]
    for word in text.split():
        extended = f"{lines[-1]} {word}".strip()
        if font.getlength(extended) <= width:
            lines[-1] = extended
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def overlay(frame: np.ndarray, instruction: str, step: int, num_steps: int, success: bool | None) -> np.ndarray:
    """Return a frame with a band of text above it, uint8 ``[H + band, W, 3]``; both dimensions are even, as H.264 requires.

    ``success`` is None while the episode is running.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width = frame.shape[:2]
    width += width % 2
    font_size = max(10, round(width / 16))
    font = ImageFont.load_default(font_size)
    margin, line_height = max(3, font_size // 3), round(font_size * 1.3)
    lines = wrap_text(instruction, font, width - 2 * margin)
    band = margin * 2 + line_height * (len(lines) + 1)
    band += (height + band) % 2
    canvas = Image.new("RGB", (width, height + band), BAND_COLOUR)
    canvas.paste(Image.fromarray(frame), (0, band))
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        draw.text((margin, margin + number * line_height), line, fill=TEXT_COLOUR, font=font)
    bottom = margin + len(lines) * line_height
    draw.text((margin, bottom), f"step {step}/{num_steps}", fill=TEXT_COLOUR, font=font)
    if success is not None:
        word, colour = ("success", SUCCESS_COLOUR) if success else ("failure", FAILURE_COLOUR)
        draw.text((width - margin - font.getlength(word), bottom), word, fill=colour, font=font)
        draw.rectangle((0, band - 2, width, band), fill=colour)
    return np.asarray(canvas)


def write_video(
    path: str | os.PathLike,
    frames: Sequence[np.ndarray],
    instruction: str,
    success: bool | None,
    fps: int = 6,
    hold_s: float = 1.0,
) -> Path:
    """Write an MP4 (H.264, yuv420p, index at the front) atomically, and return its path.

    ``frames`` are uint8 ``[H, W, 3]``, one for the first observation and one after each env step. The last one shows the outcome and is
    held for ``hold_s`` seconds.
    """
    try:
        import imageio_ffmpeg
    except ImportError as error:
        fix = "Install it with `pip install imageio-ffmpeg` or set evaluation.num_videos_per_task=0."
        raise MissingDependencyError(f"Videos need the package 'imageio-ffmpeg'. {fix}") from error
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    num_steps = len(frames) - 1
    images = [overlay(f, instruction, i, num_steps, success if i == num_steps else None) for i, f in enumerate(frames)]
    images += [images[-1]] * round(hold_s * fps)
    height, width = images[0].shape[:2]
    partial = path.with_name(f".{path.stem}.tmp.mp4")
    # Start ffmpeg directly: imageio_ffmpeg.write_frames forks a process that runs Python code, which may wait forever for a lock
    # that a different thread held at the fork. Running in its own process group protects ffmpeg from Ctrl-C.
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "warning",
        "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-", "-an",
        "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2",  # the codec requires even sizes
        "-codec:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", "-threads", "1", "-movflags", "+faststart", str(partial),
    ]  # fmt: skip
    try:
        with naming(path):
            ffmpeg = subprocess.run(command, input=np.stack(images).tobytes(), process_group=0)
            if ffmpeg.returncode:  # ffmpeg has printed its own message to stderr
                raise OSError(f"ffmpeg exited with code {ffmpeg.returncode}")
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
