"""What pi0 reads: images, absent cameras, prompts; and weights that a configuration leaves out."""

import numpy as np
import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.models import get_model
from rlinf.models.embodiment.pi0.processing import discretize_state, resize_with_pad
from rlinf.types import Observation
from tests.unit.test_pi0_model import make, observe, saved, uniforms_for


def test_images_keep_their_aspect_between_black_borders():
    images = torch.full((1, 3, 10, 20), 200, dtype=torch.uint8)
    resized = resize_with_pad(images, 16)
    assert resized.shape == (1, 3, 16, 16)
    assert (resized[:, :, 4:12] == 200).all() and not resized[:, :, :4].any() and not resized[:, :, 12:].any()
    assert resize_with_pad(resized, 16) is resized


def test_images_are_resized_as_openpi_resizes_uint8_tensors():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 48, 64), dtype=np.uint8))
    inside = resize_with_pad(images, 32)[:, :, 4:28]
    assert torch.equal(inside, torch.nn.functional.interpolate(images, size=(24, 32), mode="bilinear"))
    floats = torch.nn.functional.interpolate(images.float(), size=(24, 32), mode="bilinear").round()
    gap = (floats - inside).abs()
    assert gap.max() <= 1 and gap.mean() > 0.01, "control: in float32 the numbers are others"


@torch.no_grad()
def test_images_that_were_resized_once_give_the_same_numbers():
    model, seen = make(), observe(2)
    size = model.config.vision["image_size"]
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (2, size + 8, size, 3), np.uint8) for name in seen.images}
    large = Observation(images, seen.state, seen.instruction)
    once = model.resize_images(large)
    assert all(image.shape[1:3] == (size, size) for image in once.images.values())
    for name, tensor in model.preprocess(large).items():
        assert torch.equal(model.preprocess(once)[name], tensor), name


def test_a_camera_that_is_absent_in_one_row_changes_that_row_as_if_it_were_not_there():
    model, observation = make(), observe(2)
    front = Observation({"front": observation.images["front"]}, observation.state, observation.instruction)
    mask = torch.tensor([[True, False], [True, True]])
    uniforms = uniforms_for(model, 2)
    found = model.predict_action_batch(**model.preprocess(observation, mask), uniforms=uniforms).actions
    both = model.predict_action_batch(**model.preprocess(observation), uniforms=uniforms).actions
    alone = model.predict_action_batch(**model.preprocess(front), uniforms=uniforms).actions
    torch.testing.assert_close(found, torch.cat([alone[:1], both[1:]]), atol=1e-5, rtol=0)
    assert (both[0] - alone[0]).abs().max() > 1e-4, "control: the second camera counts where it is there"
    with pytest.raises(ConfigError, match=r"image_mask has the shape \[2\]; expected \[2, 2\]"):
        model.preprocess(observation, mask[:, 0])


def test_a_noise_head_that_is_not_used_is_told_of(tmp_path, caplog):
    cfg = saved(tmp_path, noise_method="flow_noise")
    assert get_model(cfg).noise_head is not None and "noise_head" not in caplog.text
    assert get_model(cfg | {"override_config": {"noise_method": "flow_sde"}}).noise_head is None
    assert "weights of noise_head ignored" in caplog.text


def test_prompts_of_both_kinds():
    processor = make().processor
    ids, mask = processor.encode(["reach the_red\nblock ", "push"])
    text = processor.tokenizer.encode("reach the red block", add_special_tokens=False)
    newline = processor.tokenizer.encode("\n", add_special_tokens=False)
    assert ids[0].tolist() == [processor.tokenizer.bos_token_id, *text, *newline]
    assert mask[0].all() and not mask[1].all() and mask[1, 0]
    assert discretize_state(np.array([-1.5, -1.0, 0.0, 0.999, 2.0])).tolist() == [-1, 0, 128, 255, 255]
    ids, _ = processor.encode(["push"], np.array([[0.0, -1.0]]))
    text = processor.tokenizer.encode("Task: push, State: 128 0;\nAction: ", add_special_tokens=False)
    assert ids[0].tolist() == [processor.tokenizer.bos_token_id, *text]
