"""Vision towers learn along the derivative of their features: no residual, modulation or position has lost its gradient."""

import pytest
import torch

from rlinf.models.embodiment.openvla.config import OpenVLAConfig
from rlinf.models.embodiment.openvla.vision_tower import VisionTower

TEXT_DIM, STEP = 6, 1e-5
TOWERS = {
    "dinov2 with registers": {"timm_model_ids": ["vit_large_patch14_reg4_dinov2"]},
    "dinov2 without registers": {"timm_model_ids": ["vit_base_patch14_dinov2"]},
    "siglip": {"timm_model_ids": ["vit_so400m_patch14_siglip_224"]},
    "siglip of small images": {"timm_model_ids": ["vit_so400m_patch14_siglip_224"], "mlp_stem_dim": 10},
}


@pytest.mark.parametrize("is_modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("name", TOWERS)
def test_gradients_of_features_are_central_differences(name, is_modulated):
    """In float64, along a random direction of the images, of the text and of every weight that is used."""
    small = {"embed_dim": 8, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    text = {
        "hidden_size": TEXT_DIM,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 32,
    }
    config = OpenVLAConfig(
        **TOWERS[name], image_sizes=[28], vision_overrides=[small], vision_feature_layer=-1, use_film=is_modulated,
        use_fused_vision_backbone=False, text_config=text, pad_token_id=0,
        attn_implementation="sdpa",  # eager attention has weights in float32
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tower = VisionTower(config.vision_towers()[0], config).double()
    with torch.no_grad():
        for weight in tower.parameters():
            weight.copy_(0.3 * drawn(*weight.shape))
    inputs = {"images": drawn(2, 3, 28, 28), "text": drawn(2, TEXT_DIM)}
    moved = dict(tower.named_parameters()) | (inputs if is_modulated else {"images": inputs["images"]})
    for tensor in moved.values():
        tensor.requires_grad_()
    projection = drawn(2, 4, 8)

    def loss():
        return (tower(inputs["images"], inputs["text"]) * projection).sum()

    gradients = torch.autograd.grad(loss(), list(moved.values()))
    with torch.no_grad():
        for (which, tensor), gradient in zip(moved.items(), gradients, strict=True):
            direction = drawn(*tensor.shape)
            ends = []
            for sign in (1, -2):
                tensor += sign * STEP * direction
                ends.append(float(loss()))
            tensor += STEP * direction
            wanted = (ends[0] - ends[1]) / (2 * STEP)
            assert float((gradient * direction).sum()) == pytest.approx(wanted, rel=1e-5, abs=1e-6), which
