"""Creates a tiny vision-language model of a given family, with random weights, in the standard Hugging Face layout.

    python scripts/make_tiny_vlm.py qwen2_5_vl /tmp/tiny_vlm
    rlinf train model=hf_vla model.model_path=/tmp/tiny_vlm model.unnorm_key=tabletop model.override_config.n_action_bins=21

The folder contains the config, untrained weights, the packaged tiny tokenizer with the family's special tokens, and the family's
processor, which are all the parts of a real checkpoint used by `model=hf_vla`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlinf.models.embodiment.checkpoint_policy import no_progress_bars
from rlinf.models.embodiment.hf_vla.config import HfVlaConfig
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER

VOCAB_SIZE = 544
IMAGE_SIZE = 32
TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": IMAGE_SIZE,
    "patch_size": 8,
}  # fmt: skip
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
CHAT = (
    "{% for message in messages %}User: {% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

FAMILIES: dict[str, dict[str, Any]] = {
    "idefics3": {
        "config": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": 2},
        "tokens": {"image_token": "<image>"},
        "image_text": "<image>",
        "processor": {
            "image_seq_len": 4,
            "image_processor": {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": IMAGE_SIZE},
                                "max_image_size": {"longest_edge": IMAGE_SIZE}, "do_image_splitting": False},
        },
    },
    "llava": {
        "config": {"text_config": {"model_type": "llama", **TEXT}, "vision_feature_layer": -1,
                   "vision_config": {"model_type": "clip_vision_model", **VISION}},
        "tokens": {"image_token": "<image>"},
        "processor": {
            "patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
            "image_processor": {"image_processor_type": "CLIPImageProcessor", "size": SQUARE, "crop_size": SQUARE},
        },
    },
    "paligemma": {
        "config": {"text_config": {"model_type": "gemma", **TEXT}, "projection_dim": 32,
                   "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}},
        "tokens": {"image_token": "<image>"},
        "processor": {
            "image_processor": {"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "image_seq_length": 16},
        },
        "vocab_size": 2048,
    },
    "gemma3": {
        "config": {"text_config": {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], **TEXT},
                   "mm_tokens_per_image": 4,
                   "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}},
        "tokens": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "image_text": "<start_of_image>",
        "processor": {
            "image_seq_length": 4,
            "image_processor": {"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE},
        },
    },
    "qwen2_5_vl": {
        "config": {"text_config": {"rope_parameters": MROPE, **TEXT},
                   "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 8,
                                     "out_hidden_size": 32, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1]}},
        "tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
                   "vision_eos_token": "<|vision_end|>"},
        "image_text": "<|vision_start|><|image_pad|><|vision_end|>",
        "processor": {
            "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2,
                                "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}},
        },
        "videos": {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 8, "merge_size": 2,
                   "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}},
    },
    "qwen3_vl": {
        "config": {"text_config": {"rope_parameters": MROPE, **TEXT},
                   "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 8,
                                     "out_hidden_size": 32, "spatial_merge_size": 2, "num_position_embeddings": 16,
                                     "deepstack_visual_indexes": [0]}},
        "tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
                   "vision_eos_token": "<|vision_end|>"},
        "image_text": "<|vision_start|><|image_pad|><|vision_end|>",
        "processor": {
            "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2,
                                "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}},
        },
        "videos": {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 8, "merge_size": 2,
                   "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}},
    },
    "internvl": {
        "config": {"text_config": {"model_type": "qwen2", **TEXT}, "downsample_ratio": 0.5,
                   "vision_config": {**VISION, "image_size": [IMAGE_SIZE, IMAGE_SIZE], "patch_size": [8, 8]}},
        "tokens": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                   "video_token": "<video>"},
        "image_text": "<IMG_CONTEXT>\n",
        "processor": {
            "image_seq_length": 4,
            "image_processor": {"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "crop_to_patches": False},
        },
        "videos": {"video_processor_type": "InternVLVideoProcessor", "size": SQUARE},
    },
    "llava_onevision": {
        "config": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_feature_layer": -1,
                   "image_grid_pinpoints": [[IMAGE_SIZE, IMAGE_SIZE]],
                   "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}},
        "tokens": {"image_token": "<image>", "video_token": "<video>"},
        "image_text": "<image>",
        "processor": {
            "num_image_tokens": 16, "vision_feature_select_strategy": "full",
            "image_processor": {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE,
                                "image_grid_pinpoints": [[IMAGE_SIZE, IMAGE_SIZE]]},
        },
        "videos": {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE},
    },
}  # fmt: skip
# maps names of special tokens to the configuration fields that contain their IDs
TOKEN_FIELDS = {
    "image_token": ("image_token_id", "image_token_index"),
    "context_image_token": ("image_token_id",),
    "video_token": ("video_token_id", "video_token_index"),
    "boi_token": ("boi_token_index",),
    "eoi_token": ("eoi_token_index",),
    "vision_bos_token": ("vision_start_token_id",),
    "vision_eos_token": ("vision_end_token_id",),
}


def make_tiny_vlm(family: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a tiny model of ``family`` (a key of ``FAMILIES``) to ``folder``, and return the folder."""
    facts, folder = FAMILIES[family], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER, extra_special_tokens=facts["tokens"])
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(facts["processor"]), encoding="utf-8")
    if "image_text" in facts:
        (folder / "chat_template.jinja").write_text(CHAT.replace("IMAGE", facts["image_text"]), encoding="utf-8")
    fields = json.loads(json.dumps(facts["config"]))
    fields["text_config"]["vocab_size"] = facts.get("vocab_size", VOCAB_SIZE)
    known = AutoConfig.for_model(family).to_dict()
    for name, token in facts["tokens"].items():
        for field in TOKEN_FIELDS.get(name, ()):
            if field in known:
                fields[field] = tokenizer.convert_tokens_to_ids(token)
    config = AutoConfig.for_model(family, **fields)
    torch.manual_seed(seed)
    vlm = HfVlaConfig(vlm_config=config).vlm_class()(config)
    for parameter in vlm.parameters():
        if parameter.ndim > 1:  # large enough for every part of the input to affect the logits
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    with no_progress_bars():
        vlm.save_pretrained(folder)
    load_vlm_processor(folder, config).save_pretrained(folder)
    if "videos" in facts:  # required by AutoProcessor
        path = folder / "processor_config.json"
        parts = json.loads(path.read_text(encoding="utf-8")) | {"video_processor": facts["videos"]}
        path.write_text(json.dumps(parts, indent=2), encoding="utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_tiny_vlm(arguments.family, arguments.folder, arguments.seed))
