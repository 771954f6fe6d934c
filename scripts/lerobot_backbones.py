"""Tiny language and vision backbones with random weights for policies of lerobot, built from their configurations, without a hub."""

import json
from pathlib import Path
from typing import Any

WORDS = (
    "pick", "up", "the", "red", "blue", "green", "block", "cube", "push", "put", "it", "on", "in", "to", "a", "zone", "stand",
    "still", "move", "reach", "gripper",
)  # fmt: skip
SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>", "<image>", "<fake>", "<global>", "<vision>", "</vision>", "<video>"]


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """Write a tokenizer of complete words, with the special tokens that vision-language models read."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    names = {"image_token": "<image>", "fake_image_token": "<fake>", "global_image_token": "<global>", "video_token": "<video>",
             "vision_start_token": "<vision>", "vision_end_token": "</vision>"}  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        extra_special_tokens=names, **settings,
    ).save_pretrained(folder)  # fmt: skip


def xvla(folder: Path) -> dict[str, Any]:
    """Write X-VLA's tokenizer, and return the settings of a policy whose Florence-2 has layers of 32 numbers."""
    write_tokenizer(folder / "vlm")
    vision = {"embed_dim": [16, 32], "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
              "patch_prenorm": [False, True], "num_heads": [2, 2], "num_groups": [2, 2], "window_size": 4, "drop_path_rate": 0.0,
              "projection_dim": 32}  # fmt: skip
    text = {"model_type": "bart", "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "max_position_embeddings": 128}  # fmt: skip
    return {
        "florence_config": {"vision_config": vision, "text_config": text, "pad_token_id": 0, "image_token_id": 4},
        "tokenizer_name": str(folder / "vlm"), "tokenizer_max_length": 12, "action_mode": "auto", "hidden_size": 32, "depth": 1,
        "num_heads": 2, "num_domains": 3, "len_soft_prompts": 2, "dim_time": 8, "max_len_seq": 64, "num_denoising_steps": 3,
    }  # fmt: skip


def groot(folder: Path) -> dict[str, Any]:
    """Write GR00T's base and Qwen3-VL with layers of 32 numbers, and return the settings of a policy."""
    import torch
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config
    from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLVideoProcessor

    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 64, "patch_size": 4,
              "out_hidden_size": 32, "deepstack_visual_indexes": [0]}  # fmt: skip
    Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=4, video_token_id=9, vision_start_token_id=7,
        vision_end_token_id=8, tie_word_embeddings=True,
    ).save_pretrained(folder / "vlm")  # fmt: skip
    parts = "{% if part['type'] == 'image' %}<vision><image></vision>{% else %}{{ part['text'] }}{% endif %}"
    template = "{% for message in messages %}{% for part in message['content'] %}" + parts + "{% endfor %}{% endfor %}"
    write_tokenizer(folder / "vlm", chat_template=template)
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32}
    for processor in (Qwen2VLImageProcessor, Qwen3VLVideoProcessor):
        processor(patch_size=4, temporal_patch_size=2, merge_size=2, size=pixels).save_pretrained(folder / "vlm")
    layers = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "positional_embeddings": None,
        "dropout": 0.0,
        "final_dropout": False,
    }
    config = GR00TN17Config(
        model_name=str(folder / "vlm"), dtype="float32", model_dtype="float32", select_layer=2, backbone_embedding_dim=32,
        hidden_size=32, input_embedding_dim=32, max_state_dim=48, max_action_dim=8, action_horizon=8, max_seq_len=16,
        diffusion_model_cfg={**layers, "num_layers": 4, "norm_type": "ada_norm", "output_dim": 32, "interleave_self_attention": True},
        vl_self_attention_cfg={**layers, "num_layers": 1}, state_dropout_prob=0.0, max_num_embodiments=11,
    )  # fmt: skip
    torch.manual_seed(0)
    GR00TN17(config, load_backbone_weights=False).save_pretrained(folder / "base")
    images = {"image_target_size": [32, 32], "image_crop_size": [32, 32]}
    (folder / "base" / "processor_config.json").write_text(json.dumps({"processor_kwargs": images}))
    return {
        "base_model_path": str(folder / "base"), "chunk_size": 8, "n_action_steps": 4, "max_state_dim": 48, "max_action_dim": 8,
        "use_bf16": False,
    }  # fmt: skip


def localise(folder: Path) -> None:
    """Name a policy folder's backbones by paths within it, so that it can be moved; lerobot itself then runs in that folder."""
    for file in ("config.json", "policy_preprocessor.json", "base/config.json"):
        if (folder / file).is_file():
            values = json.loads((folder / file).read_text())
            for place in (values, *(step.get("config", {}) for step in values.get("steps", []))):
                place.update(dict.fromkeys({"vlm_model_name", "tokenizer_name", "model_name"} & place.keys(), "vlm"))
                place.update(dict.fromkeys({"base_model_path"} & place.keys(), "base"))
            (folder / file).write_text(json.dumps(values, indent=1))


BACKBONES = {"xvla": xvla, "groot": groot}
"""Functions that write a type's backbone into a folder and return the policy's settings."""
