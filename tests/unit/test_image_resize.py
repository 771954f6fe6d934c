"""The resizing of uint8 images against Pillow and TensorFlow."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlinf.models.embodiment.modules.image_resize import (
    bilinear_by_integers,
    crop_and_resize,
    jpeg_round_trip,
    resize_bicubic,
    resize_bilinear,
    resize_lanczos3,
)

SIDE = st.integers(1, 90)
TENSORFLOW = Path(__file__).parents[1] / "fixtures" / "tensorflow_images" / "images.npz"
AREA = 0.9


def tensor_of(*images):
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def with_pillow(image, height, width):
    """Both passes one after the other: Pillow 13 changes their order for some shapes."""
    columns = Image.fromarray(image).resize((width, image.shape[0]), Image.Resampling.BICUBIC)
    return np.asarray(columns.resize((width, height), Image.Resampling.BICUBIC))


def random_image(seed, height, width):
    """Noise, or black and white noise, whose edges overshoot 0 and 255."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image if seed % 2 else np.where(image > 127, 255, 0).astype(np.uint8)


@settings(max_examples=75, deadline=None)
@given(SIDE, SIDE, SIDE, SIDE, st.integers(0, 1000))
def test_every_size_up_and_down_gives_the_bits_of_pillow(height, width, new_height, new_width, seed):
    image = random_image(seed, height, width)
    resized = resize_bicubic(tensor_of(image), (new_height, new_width))
    assert resized.dtype == torch.uint8
    assert torch.equal(resized, tensor_of(with_pillow(image, new_height, new_width)))


@pytest.mark.parametrize("height, width", [(256, 256), (480, 640), (128, 128), (640, 480), (224, 300)])
def test_camera_sizes_give_the_bits_of_one_call_of_pillow(height, width):
    images = [random_image(seed, height, width) for seed in (0, 1)]
    expected = [np.asarray(Image.fromarray(each).resize((224, 224), Image.Resampling.BICUBIC)) for each in images]
    assert torch.equal(resize_bicubic(tensor_of(*images), (224, 224)), tensor_of(*expected))


def test_control_interpolation_of_torch_has_other_bits():
    image = tensor_of(random_image(1, 100, 80))
    other = torch.nn.functional.interpolate(image.float(), size=(32, 32), mode="bicubic", antialias=True)
    assert not torch.equal(resize_bicubic(image, (32, 32)), other.clamp(0, 255).round().to(torch.uint8))


def test_a_row_does_not_depend_on_its_batch_and_the_input_stays():
    images = tensor_of(*(random_image(seed, 30, 40) for seed in range(11)))
    before = images.clone()
    assert resize_bicubic(images, (30, 40)) is images, "they have the size already"
    resized = resize_bicubic(images, (17, 52))
    assert torch.equal(images, before)
    for row in range(11):
        assert torch.equal(resized[row], resize_bicubic(images[row : row + 1], (17, 52))[0])


def test_other_layouts_in_memory_give_the_same_bits():
    images = tensor_of(random_image(0, 33, 44), random_image(1, 33, 44))
    assert not images.is_contiguous()
    assert torch.equal(resize_bicubic(images, (20, 20)), resize_bicubic(images.contiguous(), (20, 20)))


@pytest.fixture(params=["smooth", "noise", "saturated"])
def tensorflow(request):
    """Images of one kind by step, ``[1, 3, H, W]``: "image" and what TensorFlow made of it."""
    arrays, kind = np.load(TENSORFLOW), f"{request.param}/"
    return {name.removeprefix(kind): tensor_of(arrays[name]) for name in arrays.files if name.startswith(kind)}


def size_of(image):
    return tuple(image.shape[-2:])


def agrees(image, expected):
    """The same but for one grey level in fewer than two of a thousand numbers."""
    off = (image.int() - expected.int()).abs()
    return off.max() <= 1 and (off > 0).float().mean() < 2e-3


def test_jpeg_and_crop_give_the_bits_of_tensorflow(tensorflow):
    assert torch.equal(jpeg_round_trip(tensorflow["image"]), tensorflow["jpeg"])
    assert torch.equal(crop_and_resize(tensorflow["image"], AREA, size_of(tensorflow["crop"])), tensorflow["crop"])


def test_lanczos3_is_that_of_tensorflow_but_for_the_last_bit_of_its_sine(tensorflow):
    assert agrees(resize_lanczos3(tensorflow["image"], size_of(tensorflow["lanczos3"])), tensorflow["lanczos3"])


def test_all_steps_together_are_those_of_tensorflow(tensorflow):
    size = size_of(tensorflow["all"])
    resized = resize_lanczos3(jpeg_round_trip(tensorflow["image"]), size)
    assert agrees(crop_and_resize(resized, AREA, size), tensorflow["all"])


def test_the_published_sizes_give_the_bytes_of_tensorflow():
    rows, columns = np.indices((256, 256))
    channels = [rows * rows // 97 + columns, 3 * columns + rows * columns // 61, 255 - abs(rows - columns)]
    image = tensor_of((np.stack(channels, -1) % 256).astype(np.uint8))

    def digest(images):
        return hashlib.sha256(images[0].permute(1, 2, 0).contiguous().numpy().tobytes()).hexdigest()

    decoded = jpeg_round_trip(image)
    assert digest(decoded) == "cc252267d15cd490b9bb62341dfc59db4c4d4ca15c8d750da98ae5af35e8aa87"
    resized = resize_lanczos3(decoded, (224, 224))
    assert digest(resized) == "a1a0a79fb61a91f0f84c341f73cd6c3909e27bac15a525f3d79ccce3470c0c0a"
    cropped = crop_and_resize(resized, AREA, (224, 224))
    assert digest(cropped) == "4d7586d1ddfbc58f5a12e890988bd131796c061deee075dadb43a9efebd7cf2f"


def test_control_pillow_decodes_and_resizes_and_torch_crops_otherwise(tensorflow):
    size, image = size_of(tensorflow["lanczos3"]), tensorflow["image"][0].permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    assert not agrees(tensor_of(np.asarray(Image.open(file))), tensorflow["jpeg"])
    resized = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC))
    assert not agrees(tensor_of(resized), tensorflow["lanczos3"])
    height, width = tensorflow["image"].shape[-2:]
    top, left = (round(side * (1 - AREA**0.5) / 2) for side in (height, width))
    centre = tensorflow["image"][..., top : height - top, left : width - left].float()
    other = torch.nn.functional.interpolate(centre, size=size_of(tensorflow["crop"]), mode="bilinear")
    assert not agrees(other.round(), tensorflow["crop"])


@pytest.mark.parametrize(
    "step",
    [jpeg_round_trip, lambda x: resize_lanczos3(x, (28, 30)), lambda x: crop_and_resize(x, AREA, (28, 30))],
    ids=["jpeg", "lanczos3", "crop"],
)
def test_a_row_of_the_tensorflow_steps_does_not_depend_on_its_batch_and_the_input_stays(step):
    images = tensor_of(*(random_image(seed, 33, 40) for seed in range(9)))
    before = images.clone()
    result = step(images)
    assert torch.equal(images, before) and result.dtype == torch.uint8
    for row in range(len(images)):
        assert torch.equal(result[row], step(images[row : row + 1].contiguous())[0])


def test_the_crop_keeps_the_middle_and_its_borders():
    ramp = torch.arange(0, 201, 2, dtype=torch.uint8).expand(1, 3, 101, 101)  # 2 grey levels per pixel
    border = 100 * (1 - AREA**0.5) / 2
    cropped = crop_and_resize(ramp, AREA, (101, 101))[0, 0, 50]
    for place, expected in ((0, 2 * border), (50, 100), (100, 200 - 2 * border)):
        assert abs(int(cropped[place]) - expected) <= 1


@settings(max_examples=75, deadline=None)
@given(SIDE, SIDE, SIDE, SIDE, st.integers(0, 1000))
def test_a_gpu_resizes_bilinearly_to_the_bits_of_torch_on_a_cpu(height, width, new_height, new_width, seed):
    images = tensor_of(random_image(seed, height, width))
    expected = resize_bilinear(images, (new_height, new_width))
    assert torch.equal(bilinear_by_integers(images, new_height, new_width), expected)


@pytest.mark.parametrize(("height", "width", "new_height"), [(480, 640, 168), (256, 256, 224), (720, 1280, 126)])
def test_camera_sizes_give_the_bits_of_torch_on_a_cpu(height, width, new_height):
    images = tensor_of(random_image(1, height, width), random_image(2, height, width))
    expected = resize_bilinear(images, (new_height, 224))
    assert torch.equal(bilinear_by_integers(images, new_height, 224), expected)
    in_float32 = torch.nn.functional.interpolate(images.float(), size=(new_height, 224), mode="bilinear")
    assert not torch.equal(in_float32.round().to(torch.uint8), expected), "control: other numbers round otherwise"
