"""Images as RGB: orientation, transparency, number formats, addresses, and messages of bounded length."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from rlinf.data.frames import EncodedFrames
from rlinf.images import ImageError, open_image
from rlinf.recipes.packers import open_image as open_of_row
from rlinf.recipes.samples import BadRowError
from rlinf.serving import MessageError
from rlinf.serving.codec import _image

ROWS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **options)
    return stored.getvalue()


def frames(*contents: bytes, shape: tuple[int, int], folder: Path) -> EncodedFrames:
    (folder / "images").write_bytes(b"".join(contents))
    lengths = np.array([len(content) for content in contents])
    numbers = np.zeros(len(contents), int)
    return EncodedFrames(
        [open(folder / "images", "rb")], numbers, lengths.cumsum() - lengths, lengths, shape, ["images"]
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_file_says_everywhere(tmp_path, orientation):
    """As transformers reads it; 3 rows of the 8 orientations are those of a landscape image that stays one."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(ROWS), exif=exif)
    (tmp_path / "photo.png").write_bytes(data)
    expected = np.asarray(load_image(str(tmp_path / "photo.png")))
    assert (expected.shape == ROWS.shape) == (orientation < 5), "control"
    assert np.array_equal(open_of_row("photo.png", tmp_path), expected)
    assert np.array_equal(frames(data, shape=expected.shape[:2], folder=tmp_path).read(np.array([0]))[0], expected)
    sent = {"format": "png", "data": data, "shape": list(expected.shape)}
    assert np.array_equal(_image(sent, _Budget()), expected)


class _Budget:
    def take(self, number: int) -> None:
        """Allow any number of pixels."""


def test_transparent_pixels_are_white():
    half = Image.fromarray(np.uint8([[[200, 100, 0, 255], [0, 0, 0, 0], [100, 0, 0, 102]]]))
    expected = [[[200, 100, 0], [255, 255, 255], [193, 153, 153]]]  # 0.4 * 100 + 0.6 * 255, 0.6 * 255
    assert np.asarray(open_image(encoded(half))).tolist() == expected
    assert np.asarray(open_image(np.asarray(half))).tolist() == expected
    palette = Image.fromarray(ROWS).quantize(18)
    shown = np.asarray(open_image(encoded(palette, transparency=palette.getpixel((0, 0)))))
    assert shown[0, 0].tolist() == [255] * 3 and shown[1, 1].tolist() == list(palette.convert("RGB").getpixel((1, 1)))
    assert np.array_equal(open_image(encoded(Image.fromarray(ROWS).convert("RGBA"))), ROWS), "control"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_numbers_of_more_than_8_bits_are_rejected_by_name(tmp_path, dtype):
    """Depth in millimetres would become white, and 0 to 1 black."""
    deep = np.full((2, 3), 400, dtype)
    with pytest.raises(ImageError, match=np.dtype(dtype).name):
        open_image(deep)
    data = encoded(Image.fromarray(deep), "TIFF")
    mode = Image.open(io.BytesIO(data)).mode
    for read in (open_image, lambda data: frames(data, shape=(2, 3), folder=tmp_path).read(np.array([0]))):
        with pytest.raises(ImageError, match=f"'{mode}'.*uint8"):
            read(data)
    with pytest.raises(BadRowError, match=f"'{mode}'"):
        open_of_row({"bytes": data, "path": None}, tmp_path)


def test_a_served_image_of_16_bits_is_rejected():
    data = encoded(Image.fromarray(np.full((2, 3), 400, np.uint16)))
    with pytest.raises(MessageError, match="mode 'I;16'"):
        _image({"format": "png", "data": data, "shape": [2, 3, 1]}, _Budget())


@pytest.mark.parametrize("shape", [(3,), (2, 3, 2), (0, 3, 3), (1, 2, 3, 3)])
def test_pixels_of_another_shape_are_rejected(shape):
    with pytest.raises(ImageError, match=str(shape[0])):
        open_image(np.zeros(shape, np.uint8))
    assert open_image(np.zeros((2, 3, 1), np.uint8)).size == (3, 2), "control"


def test_an_image_may_be_a_data_uri_and_no_message_repeats_its_content():
    uri = "data:image/png;base64," + base64.b64encode(encoded(Image.fromarray(ROWS))).decode()
    assert np.array_equal(open_image(uri), ROWS) and np.array_equal(open_image(uri.replace("+", "%2B")), ROWS)
    broken = (
        "data:image/png;base64," + "A" * 500_000,
        "data:image/png," + "A" * 500_000,
        "A" * 500_000,
        "https://x.org/" + "a" * 9000,
    )
    for image in (*broken, "data:image/png;base64,@@"):
        with pytest.raises(ImageError) as caught:
            open_image(image)
        assert len(str(caught.value)) < 500
