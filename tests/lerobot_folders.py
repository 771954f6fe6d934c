"""Tiny policy folders with random weights, written by lerobot itself: ``python tests/lerobot_folders.py <folder> act smolvla ...``.

Runs in a Python that has lerobot. Nothing comes from a hub: tokenizers and language models are made here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from lerobot_backbones import BACKBONES, WORDS, localise, write_tokenizer

SIZE, STATE, ACTIONS = 32, 4, 2
"""Pixels, and the widths of state and action: what `env=tabletop env.state=proprio env.image_size=32` has."""
TINY = {
    "act": {"chunk_size": 8, "n_action_steps": 4, "dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1,
            "n_vae_encoder_layers": 1, "latent_dim": 8, "pretrained_backbone_weights": None},
    "diffusion": {"horizon": 8, "n_action_steps": 4, "n_obs_steps": 2, "down_dims": (16, 32), "n_groups": 4, "crop_shape": None,
                  "resize_shape": None, "diffusion_step_embed_dim": 16, "spatial_softmax_num_keypoints": 4,
                  "num_train_timesteps": 10, "pretrained_backbone_weights": None, "use_group_norm": True, "noise_scheduler_type": "DDIM"},
    "vqbet": {"n_obs_steps": 2, "n_action_pred_token": 2, "action_chunk_size": 4, "crop_shape": None, "pretrained_backbone_weights": None,
              "use_group_norm": True, "n_vqvae_training_steps": 1,
              "spatial_softmax_num_keypoints": 4, "gpt_input_dim": 32, "gpt_output_dim": 32, "gpt_n_layer": 1, "gpt_n_head": 2,
              "gpt_hidden_dim": 32, "vqvae_n_embed": 4, "vqvae_embedding_dim": 16, "vqvae_enc_hidden_dim": 16},
    "smolvla": {"chunk_size": 8, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "resize_imgs_with_padding": (64, 64),
                "num_vlm_layers": 2, "num_steps": 2, "load_vlm_weights": False, "tokenizer_max_length": 12},
    **dict.fromkeys(("pi0", "pi05"), {"chunk_size": 8, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "dtype": "float32",
            "image_resolution": (28, 28), "num_inference_steps": 2, "tokenizer_max_length": 12}),
    "pi0_fast": {"chunk_size": 8, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "dtype": "float32",
                 "image_resolution": (28, 28), "tokenizer_max_length": 12, "max_decoding_steps": 6, "max_action_tokens": 6,
                 "validate_action_token_prefix": False},
    "xvla": {"chunk_size": 8, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 6, "num_image_views": 2,
             "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}},
    "groot": {},
}  # fmt: skip
"""The settings of each type, so small that a pass takes milliseconds."""


def features(cameras: tuple[str, ...] = ("front",)) -> tuple[dict, dict]:
    """Return input and output features: images, a state and an action."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for name in cameras}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE,))
    return inputs, {"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))}


def statistics(cameras: tuple[str, ...]) -> dict:
    """Return statistics of every kind, by feature, from a fixed seed."""
    generator = torch.Generator().manual_seed(7)

    def of(*shape: int) -> dict[str, torch.Tensor]:
        mean, std = torch.rand(shape, generator=generator) * 0.5, torch.rand(shape, generator=generator) * 0.5 + 0.25
        names = {"mean": mean, "std": std, "min": mean - 2 * std, "max": mean + 2 * std}
        return names | {"q01": mean - std, "q99": mean + std, "q10": mean - std / 2, "q90": mean + std / 2}

    images = {f"observation.images.{name}": of(3, 1, 1) for name in cameras}
    return {**images, "observation.state": of(STATE), "action": of(ACTIONS)}


def write_vlm(folder: Path) -> None:
    """Write configuration and processor of a SmolVLM of 64 numbers, as ``vlm_model_name`` names it."""
    from transformers import AutoTokenizer, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor

    text = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}  # fmt: skip
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    }
    write_tokenizer(folder)
    SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=4, pad_token_id=0
    ).save_pretrained(folder)
    image = SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 64})
    try:
        SmolVLMProcessor(image, AutoTokenizer.from_pretrained(folder), video_processor=None).save_pretrained(folder)
    except (TypeError, ImportError, ValueError):
        image.save_pretrained(folder)


def make(kind: str, folder: Path, cameras: tuple[str, ...] = ("front",), seed: int = 0, **changes: object) -> Path:
    """Write a folder of a type, as lerobot's training does: config, weights, and both processors with statistics."""
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    folder.mkdir(parents=True, exist_ok=True)
    options = {**TINY[kind], **changes}
    if kind in ("pi0", "pi05", "pi0_fast"):
        write_tokenizer(folder / "vlm")
    if kind == "pi0_fast":
        for name in ("lerobot/fast-action-tokenizer", "google/paligemma-3b-pt-224"):  # where they would lie
            (folder / name).mkdir(parents=True)
    if kind in BACKBONES:
        options = {**BACKBONES[kind](folder), **options}
    if kind == "smolvla":
        write_vlm(folder / "vlm")
        options["vlm_model_name"] = str(folder / "vlm")
    inputs, outputs = features(cameras)
    config = make_policy_config(
        kind, input_features=inputs, output_features=outputs, device="cpu", push_to_hub=False, **options
    )
    torch.manual_seed(seed)
    policy = get_policy_class(kind)(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
        if kind == "pi0_fast":  # it says no token that its tokenizer has not
            policy.model.paligemma_with_expert.paligemma.lm_head.weight[len(WORDS) :] = 0
    pipelines = make_pre_post_processors(config, dataset_stats=statistics(cameras))
    policy.save_pretrained(folder)
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)
    localise(folder)
    return folder


def patch_pi0(kind: str, monkeypatch: Any) -> None:
    """Let pi0, pi0.5 or pi0-FAST be built with layers of 64 numbers, and find its tokenizers without a hub.

    lerobot writes the widths of PaliGemma into the code. The tokenizer of actions stands in for the published one (a DCT and a
    byte-pair encoding): each token is one coefficient.
    """
    import importlib

    from lerobot.processor import tokenizer_processor
    from transformers import PaliGemmaConfig, SiglipVisionConfig

    module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    sizes = {"depth": 2, "mlp_dim": 64, "num_heads": 8, "num_kv_heads": 1, "head_dim": 8}
    small = {"gemma_2b": module.GemmaConfig(width=64, **sizes), "gemma_300m": module.GemmaConfig(width=32, **sizes)}
    monkeypatch.setattr(module, "get_gemma_config", small.get)
    assign = SiglipVisionConfig.__setattr__

    def narrow(config: Any, name: str, value: Any) -> None:
        assign(config, name, 64 if name in ("projection_dim", "intermediate_size") else value)

    monkeypatch.setattr(SiglipVisionConfig, "__setattr__", narrow)
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14, "image_size": 28}

    def paligemma() -> PaliGemmaConfig:
        config = PaliGemmaConfig()
        config.vision_config = SiglipVisionConfig(**vision, projection_dim=64)
        return config

    monkeypatch.setattr(module, "CONFIG_MAPPING", {"paligemma": paligemma, "gemma": module.CONFIG_MAPPING["gemma"]})
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        own = tokenizer_processor.AutoTokenizer.from_pretrained(folder)
    coefficients = SimpleNamespace(decode=lambda tokens: "".join(chr(int(each) % 32) for each in tokens))
    actions = SimpleNamespace(bpe_tokenizer=coefficients, min_token=-16, scale=4.0)
    for place in (tokenizer_processor, module):
        for loader, part, found in (("AutoTokenizer", "paligemma", own), ("AutoProcessor", "fast-action", actions)):
            if hasattr(place, loader):
                instead = functools.partial(_find, getattr(place, loader), part, found)
                monkeypatch.setattr(place, loader, SimpleNamespace(from_pretrained=instead))


def _find(loader: Any, part: str, found: Any, name: str, **given: Any) -> Any:
    """Return ``found`` for names that have ``part`` in them."""
    return found if part in str(name) else loader.from_pretrained(name, **given)


def theirs(folder: Path) -> tuple:
    """Return lerobot's own policy and processors of a folder."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_backbone_weights = None
    overrides = {}
    if (folder / "vlm").exists():
        overrides = {"tokenizer_processor": {"tokenizer_name": str(folder / "vlm")}}
    if hasattr(config, "vlm_model_name"):
        config.vlm_model_name = str(folder / "vlm")
    if config.type == "groot":
        config.base_model_path = str(folder / "base")
        overrides = {"groot_n1_7_vlm_encode_v1": {"model_name": str(folder / "vlm")}}
    with contextlib.chdir(folder):
        policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    return policy, *make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=overrides)


def theirs_of(rows: Any) -> dict:
    """Return the rows as lerobot's own evaluation makes them (``preprocess_observation``)."""
    images = torch.from_numpy(rows.images["front"]).movedim(-1, -3).contiguous().float() / 255
    return {
        "observation.images.front": images,
        "observation.state": torch.from_numpy(rows.state),
        "task": rows.instruction,
    }


if __name__ == "__main__":
    place, *kinds = sys.argv[1:]
    for name in kinds:
        print(make(name, Path(place) / name))
