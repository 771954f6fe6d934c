"""The resizing of uint8 images against Pillow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlinf.models.embodiment.modules.image_resize import resize_bicubic

SIDE = st.integers(1, 90)


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


@settings(max_examples=150, deadline=None)
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
    resized = resize_bicubic(images, (17, 52))
    assert torch.equal(images, before)
    for row in range(11):
        assert torch.equal(resized[row], resize_bicubic(images[row : row + 1], (17, 52))[0])


def test_an_image_of_the_wanted_size_is_returned_as_it_is():
    images = tensor_of(random_image(0, 20, 30))
    assert resize_bicubic(images, (20, 30)) is images


def test_other_layouts_in_memory_give_the_same_bits():
    images = tensor_of(random_image(0, 33, 44), random_image(1, 33, 44))
    assert not images.is_contiguous()
    assert torch.equal(resize_bicubic(images, (20, 20)), resize_bicubic(images.contiguous(), (20, 20)))
