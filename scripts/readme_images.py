"""Creates the README's images from a quickstart run: the top of its report, and an episode before and after RL.

    python scripts/readme_images.py outputs/quickstart/latest [--episode 2]

``--episode`` is an index into the evaluation episodes. By default, the first episode that failed before RL and succeeded
afterwards is used. Requires Chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import imageio.v3 as iio
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlinf.cli import main as rlinf
from rlinf.cli.doctor import BROWSERS

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
REPORT_SIZE = (1200, 965)  # down to the table of success per task
VIDEO_SIZE = 320
MARGIN = 28
END_S = 1.5  # duration of the last image


def first_repaired(run: Path) -> int:
    """Return the index of the first episode that failed before RL and succeeded afterwards."""
    before, after = (json.loads((run / "eval" / name / "result.json").read_text(encoding="utf-8"))["results"]
                     for name in ("before_rl", "after_rl"))  # fmt: skip
    return next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if b["success"] and not a["success"])


def screenshot(report: Path, output: Path) -> None:
    """Write the top of a report as a palette PNG."""
    browser = next(path for name in BROWSERS if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "report.png"
        subprocess.run([browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", f"--screenshot={image}",
                        f"--window-size={REPORT_SIZE[0]},{REPORT_SIZE[1]}", report.resolve().as_uri()],
                       check=True, capture_output=True, timeout=120)  # fmt: skip
        Image.open(image).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            output
        )


def play(checkpoint: Path, episode: int, folder: Path) -> tuple[list[np.ndarray], float]:
    """Run an episode, and return its frames and frame rate."""
    video = folder / f"{checkpoint.name}.mp4"
    status = rlinf(["play", f"checkpoint={checkpoint}", f"episode={episode}", f"output={video}", "window=false",
                    f"evaluation.video_size={VIDEO_SIZE}"])  # fmt: skip
    if status != 0:
        sys.exit(status)
    return list(iio.imiter(video)), iio.immeta(video)["fps"]


def animation(run: Path, episode: int, output: Path) -> None:
    """Write a GIF of an episode, with the policy before RL on the left and after RL on the right."""
    checkpoints = [max((run / "checkpoints").glob(f"{phase}_*")) for phase in ("sft", "rl")]
    with tempfile.TemporaryDirectory() as folder:
        (before, fps), (after, _) = (play(checkpoint, episode, Path(folder)) for checkpoint in checkpoints)
    length = max(len(before), len(after))
    pairs = [[video[min(i, len(video) - 1)] for video in (before, after)] for i in range(length)]
    frames = [beside(*pair).quantize(64, dither=Image.Dither.NONE) for pair in pairs]
    durations = [1000 / fps] * (length - 1) + [1000 * END_S]
    frames[0].save(output, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)


def beside(left: np.ndarray, right: np.ndarray) -> Image.Image:
    """Combine two images side by side with titles above them."""
    height, width = left.shape[:2]
    canvas = Image.new("RGB", (2 * width + MARGIN, height + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for image, title, x in ((left, "before RL", 0), (right, "after RL", width + MARGIN)):
        canvas.paste(Image.fromarray(image), (x, MARGIN))
        draw.text((x + 4, 4), title, fill="black", font=ImageFont.load_default(16))
    return canvas


def main() -> None:
    """Write both images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--episode", type=int)
    arguments = parser.parse_args()
    episode = first_repaired(arguments.run) if arguments.episode is None else arguments.episode
    IMAGES.mkdir(exist_ok=True)
    screenshot(arguments.run / "report.html", IMAGES / "report.png")
    animation(arguments.run, episode, IMAGES / "before_after.gif")
    for name in ("report.png", "before_after.gif"):
        print(f"docs/images/{name}: {(IMAGES / name).stat().st_size / 1e3:.0f} kB, episode {episode}")


if __name__ == "__main__":
    main()
