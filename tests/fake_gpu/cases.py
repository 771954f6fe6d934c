"""The models whose work on a GPU is counted: full width, four layers."""

from __future__ import annotations

TOWERS = "vision_overrides: [{depth: 4}, {depth: 4}]"
LLAMA = "text_config: {vocab_size: 32064, pad_token_id: 32000, num_hidden_layers: 4}"
GEMMA = "num_heads: 8, num_kv_heads: 1, head_dim: 256, depth: 4"
PI0 = (
    f"vlm: {{width: 2048, mlp_dim: 16384, {GEMMA}}}, expert: {{width: 1024, mlp_dim: 4096, {GEMMA}}}, "
    "vision: {hidden_size: 1152, num_hidden_layers: 4, num_attention_heads: 16, intermediate_size: 4304, image_size: 224, "
    "patch_size: 14}, num_steps: 4, noise_method: flow_sde, freeze_vlm: true"
)
INTERNVL = [
    f"model.init_config.vlm_config.{part}_config.{name}={value}"
    for part, sizes in {
        "text": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4, "num_attention_heads": 14,
                 "num_key_value_heads": 2, "max_position_embeddings": 1024},
        "vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
                   "image_size": "[224,224]", "patch_size": "[14,14]"},
    }.items()
    for name, value in sizes.items()
] + [
    "model.init_config.processor_config.image_seq_length=256",
    "model.init_config.processor_config.image_processor.size={height: 224, width: 224}",
    "model.hidden_size=896", "model.image_size=[224,224]",
]  # fmt: skip
"""InternVL 3 1B, with the packaged vocabulary."""
RANDOM = [
    "model.override_config={}",
    "model.unnorm_key=null",
    "model.micro_batch_size=4",
    "model.val_micro_batch_size=8",
]
LORA = ["model.is_lora=true", "model.gradient_checkpointing=true"]

MODELS: dict[str, list[str]] = {
    "openvla": ["model=openvla", f"model.init_config={{{LLAMA}, {TOWERS}}}", *RANDOM],
    "openvla_oft": ["model=openvla_oft", f"model.init_config={{{LLAMA}, {TOWERS}}}", *RANDOM],
    "pi0": ["model=pi0", f"model.init_config={{{PI0}}}", *RANDOM],
    "pi05": ["model=pi05", f"model.init_config={{pi05: true, {PI0}}}", *RANDOM],
    "hf_vla": ["model=hf_vla_tiny", *INTERNVL, "model.micro_batch_size=4", "model.val_micro_batch_size=8"],
    "mlp": ["experiment=tabletop_ppo_mlp", "model.micro_batch_size=1024"],
}
"""Overrides of each family."""
