"""Tiny language and vision backbones with random weights for policies of lerobot, built from their configurations, without a hub."""

import json
from pathlib import Path
from typing import Any

WORDS = (
    "pick", "up", "the", "red", "blue", "green", "block", "cube", "push", "put", "it", "on", "in", "to", "a", "zone", "stand",
    "still", "move", "reach", "gripper",
)  # fmt: skip
SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>", "<image>", "<fake>", "<global>", "<vision>", "</vision>", "<video>"]


def write_tokenizer(folder: Path, image: str = "<image>", **settings: Any) -> None:
    """Write a tokenizer of whole words, with the special tokens that vision-language models read; ``image`` marks images."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    names = {"image_token": image, "fake_image_token": "<fake>", "global_image_token": "<global>"}
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


BACKBONES = {"xvla": xvla}
"""Functions that write a type's backbone into a folder and return the policy's settings."""
