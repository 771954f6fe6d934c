"""Videos: what a browser needs, and a text that never covers the image."""

import subprocess

import imageio_ffmpeg
import numpy as np
import pytest

from rlinf.evaluation.video import overlay, write_video


def frames_of(num_frames: int, size: int = 64) -> list[np.ndarray]:
    return [np.full((size, size, 3), 255 * i // num_frames, np.uint8) for i in range(num_frames)]


def test_video_is_h264_yuv420p_with_the_index_first(tmp_path):
    path = write_video(tmp_path / "a" / "episode.mp4", frames_of(9), "reach the red block", True, fps=8, hold_s=1)
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    frames = list(reader)
    assert meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p")
    assert len(frames) == 9 + 8
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")
    assert [p.name for p in path.parent.iterdir()] == ["episode.mp4"], "no temporary file may stay"
    odd = write_video(tmp_path / "odd.mp4", frames_of(3, size=65), "x", False)
    meta = next(imageio_ffmpeg.read_frames(str(odd)))
    assert meta["size"][0] % 2 == 0 and meta["size"][1] % 2 == 0


def test_picture_is_intact_below_the_band():
    frame = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    image = overlay(frame, "push the green block to the yellow zone and then back to where it came from", 3, 16, False)
    assert image.shape[1] == 64 and image.shape[0] > 64 and image.shape[0] % 2 == 0
    assert np.array_equal(image[-63:], frame[-63:])
    assert not np.array_equal(overlay(frame, "other", 3, 16, False)[:20], image[:20])


def test_a_video_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "false")
    with pytest.raises(OSError, match=r"MiB free.*episode.mp4"):
        write_video(tmp_path / "episode.mp4", frames_of(3), "reach", True)
    assert not list(tmp_path.iterdir())


def test_a_video_is_written_by_a_process_that_begins_without_python_code(tmp_path, monkeypatch):
    """Such code can wait for ever for a lock that another thread held as the process was forked."""
    write_video(tmp_path / "first.mp4", frames_of(1), "reach", True)  # the first call also asks ffmpeg for its version
    started = []
    popen = subprocess.Popen.__init__

    def recorded(self, *arguments, **keywords):
        started.append(keywords)
        popen(self, *arguments, **keywords)

    monkeypatch.setattr(subprocess.Popen, "__init__", recorded)
    write_video(tmp_path / "episode.mp4", frames_of(3), "reach", True)
    (keywords,) = started
    assert keywords.get("preexec_fn") is None and keywords["process_group"] == 0
