"""Augmentation of cloning: every operation against a slow one, purity of the random numbers, and that nothing else is augmented."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch.nn.functional import grid_sample

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.data.augment import augment, augment_image
from rlinf.data.config import AugmentConfig
from rlinf.errors import ConfigError
from rlinf.models.embodiment.openvla.processing import PrismaticImageProcessor
from rlinf.preflight.validation import validate
from rlinf.types import Observation

ALL = AugmentConfig(crop_area=0.9, brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05)
"""OpenVLA's."""
MIDDLE = np.full(6, 0.5)
ROUNDING = 1
"""Grey levels between float32 and other arithmetic, at .5."""


def image(seed: int = 0, height: int = 24, width: int = 32) -> np.ndarray:
    """Smooth colours with black, white, grey and saturated patches."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [
        127 + 120 * np.sin(rng.uniform(0.05, 0.3) * x + rng.uniform(0.05, 0.3) * y + rng.uniform(0, 6))
        for _ in range(3)
    ]
    made = np.stack(waves, axis=-1).astype(np.uint8)
    made[:3, :3], made[:3, 3:6], made[:3, 6:9], made[:3, 9:12], made[:3, 12:15] = (
        0,
        255,
        128,
        (255, 0, 0),
        (10, 200, 10),
    )
    return made


def only(**fields: float) -> AugmentConfig:
    return replace(AugmentConfig(), **fields)


def drawn(**numbers: float) -> np.ndarray:
    """Six uniform numbers, all 0.5 (no change of a colour) but those given."""
    names = ("top", "left", "brightness", "contrast", "saturation", "hue")
    return np.array([numbers.get(name, 0.5) for name in names])


def gap(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other).max())


@pytest.mark.parametrize(("top", "left"), [(0.0, 0.0), (0.3, 0.9), (0.999, 0.5)])
@pytest.mark.parametrize("area", [0.9, 0.25])
def test_a_crop_is_that_of_torch(area, top, left):
    source = image()
    side = np.sqrt(area)
    height, width = source.shape[:2]
    unit = [place * (1 - side) + side * np.linspace(0, 1, size) for place, size in ((top, height), (left, width))]
    grid = np.stack(np.broadcast_arrays(2 * unit[1][None, :] - 1, 2 * unit[0][:, None] - 1), axis=-1)
    pixels = torch.from_numpy(source).permute(2, 0, 1)[None].double()
    expected = grid_sample(pixels, torch.from_numpy(grid)[None], align_corners=True)[0].permute(1, 2, 0).round().numpy()
    found = augment_image(source, only(crop_area=area), drawn(top=top, left=left))
    assert gap(found, expected) <= ROUNDING and found.shape == source.shape and found.dtype == np.uint8
    assert gap(found, source) > 20, "another place is told apart"
    assert gap(augment_image(source, only(crop_area=area), drawn(top=1 - top, left=left)), expected) > 5 or top == 0.5


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999])
def test_brightness_adds_a_share_of_the_range(uniform):
    source = image()
    shift = (2 * uniform - 1) * 0.2 * 255
    expected = np.clip(source.astype(float) + shift, 0, 255).round()
    assert gap(augment_image(source, only(brightness=0.2), drawn(brightness=uniform)), expected) <= ROUNDING


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999])
def test_contrast_stretches_each_channel_about_its_mean(uniform):
    source = image()
    factor = 1 + (2 * uniform - 1) * 0.2
    found = augment_image(source, only(contrast=0.2), drawn(contrast=uniform))
    for channel in range(3):
        # Pillow stretches a grey image about its mean, rounded to a whole level.
        grey = Image.fromarray(source[..., channel])
        expected = np.asarray(ImageEnhance.Contrast(grey).enhance(factor))
        assert gap(found[..., channel], expected) <= ROUNDING
    assert gap(found, source) > 5


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_saturation_and_hue_are_those_of_colorsys(name, uniform):
    source, most = image(), {"saturation": 0.9, "hue": 0.4}[name]
    change = (2 * uniform - 1) * most
    expected = np.empty_like(source)
    for y, x in np.ndindex(source.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(source[y, x] / 255))
        if name == "hue":
            hue = (hue + change) % 1.0
        else:
            saturation = min(saturation * (1 + change), 1.0)
        expected[y, x] = np.round(np.array(colorsys.hsv_to_rgb(hue, saturation, value)) * 255)
    found = augment_image(source, only(**{name: most}), drawn(**{name: uniform}))
    assert gap(found, expected) <= ROUNDING and gap(found, source) > 20
    assert np.array_equal(found[:3, :9], source[:3, :9]), "black, white and grey have neither"


def test_operations_follow_each_other_in_the_order_of_openvla():
    source, uniforms = image(), np.array([0.2, 0.7, 0.9, 0.1, 0.8, 0.3])
    found = augment_image(source, ALL, uniforms)
    stepwise, backwards = source, source
    names = list(AugmentConfig.__dataclass_fields__)
    for name in names:
        stepwise = augment_image(stepwise, only(**{name: getattr(ALL, name)}), uniforms)
    for name in reversed(names):
        backwards = augment_image(backwards, only(**{name: getattr(ALL, name)}), uniforms)
    assert gap(found, stepwise) <= 5, "a grey level of rounding in each of five steps"
    assert gap(found, backwards) > gap(found, stepwise)


def test_nothing_is_changed_where_nothing_is_asked_for():
    source = image()
    assert np.array_equal(augment_image(source, AugmentConfig(), np.linspace(0, 0.9, 6)), source)
    observation = Observation({"front": source[None]}, None, ["go"])
    assert augment(observation, AugmentConfig(), 0, np.zeros(1, np.int64)) is observation
    assert gap(augment_image(source, only(hue=0.5, saturation=1, brightness=1, contrast=1), MIDDLE), source) <= ROUNDING


def observed(num_rows: int) -> Observation:
    images = np.stack([image(row) for row in range(num_rows)])
    return Observation(
        {"front": images, "wrist": images.copy()}, np.zeros((num_rows, 2), np.float32), ["go"] * num_rows
    )


def test_an_image_follows_from_seed_row_and_camera_alone():
    whole, rows = observed(6), np.arange(6)
    found = augment(whole, ALL, 3, rows)
    for index in (rows[::2], rows[1::2], rows[::-1]):  # the rows of two ranks, and another order
        part = augment(whole.select(index), ALL, 3, index)
        for camera, images in part.images.items():
            np.testing.assert_array_equal(images, found.images[camera][index])
    other_step = augment(whole, ALL, 4, rows)
    same_picture = Observation({"front": whole.images["front"][[0, 0]]}, None, ["go", "go"])
    twice = augment(same_picture, ALL, 3, np.arange(2)).images["front"]
    for one, other in (
        (found.images["front"], other_step.images["front"]),
        (found.images["front"], found.images["wrist"]),  # a crop of its own for each camera
        (twice[0], twice[1]),
        (found.images["front"], whole.images["front"]),
    ):
        assert gap(one, other) > 10
    assert found.state is whole.state and found.instruction == whole.instruction
    assert np.array_equal(whole.images["front"][0], image(0)), "the dataset's own rows stay as they are"


def test_numbers_cover_the_whole_range():
    flat = np.full((500, 4, 4, 3), 128, np.uint8)
    seen = augment(Observation({"front": flat}, None, ["go"] * 500), only(brightness=0.2), 0, np.arange(500)).images[
        "front"
    ]
    shifts = seen[:, 0, 0, 0].astype(int) - 128
    assert (shifts.min(), shifts.max()) == (-51, 51) or (shifts.min() <= -50 and shifts.max() >= 50)
    assert abs(shifts.mean()) < 4 and 25 < shifts.std() < 34, "uniform: 51 / sqrt(3) = 29.4"


def test_a_random_crop_takes_the_place_of_the_centre_crop():
    processor = PrismaticImageProcessor(input_sizes=[(3, 16, 16)], do_center_crop=True)
    plain = PrismaticImageProcessor(input_sizes=[(3, 16, 16)])
    frames = torch.from_numpy(image()).permute(2, 0, 1)[None]
    assert torch.equal(processor.preprocess_tensors(frames, is_cropped=True), plain.preprocess_tensors(frames))
    assert not torch.equal(processor.preprocess_tensors(frames), plain.preprocess_tensors(frames))
    observation = augment(observed(2), ALL, 0, np.arange(2))
    assert observation.is_cropped and observation.select([1]).is_cropped
    assert not augment(observed(2), only(hue=0.05), 0, np.arange(2)).is_cropped, "colours alone leave the centre crop"


@pytest.mark.parametrize(
    ("model", "area", "fits"),
    [("true", "0.9", True), ("true", "0.8", False), ("false", "0.9", False), ("false", "1", True), ("true", "1", True)],
)
def test_the_crop_is_the_part_that_the_policy_sees_in_an_evaluation(model, area, fits):
    words = [f"+model.init_config.center_crop={model}", f"sft.augment.crop_area={area}"]
    config = build_config(compose_config(["env=tabletop", "model=openvla_tiny", "sft.max_steps=1", *words]))
    validate(
        build_config(compose_config(["env=tabletop", "model=cnn", "sft.max_steps=1", words[1]])), "sft"
    )  # any area
    if fits:
        validate(config, "sft")
    else:
        with pytest.raises(
            ConfigError,
            match="a policy that crops .* expected the same area, or no crop.*init_config.center_crop=true sft.augment",
        ):
            validate(config, "sft")
