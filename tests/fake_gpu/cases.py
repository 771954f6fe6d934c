"""The models whose work on a GPU is counted: full width, two layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOWERS = "vision_overrides: [{depth: 2}, {depth: 2}]"
LLAMA = "text_config: {vocab_size: 32064, pad_token_id: 32000, num_hidden_layers: 2}"
GEMMA = "num_heads: 8, num_kv_heads: 1, head_dim: 256, depth: 2"
PI0 = (
    f"vlm: {{width: 2048, mlp_dim: 16384, {GEMMA}}}, expert: {{width: 1024, mlp_dim: 4096, {GEMMA}}}, "
    "vision: {hidden_size: 1152, num_hidden_layers: 2, num_attention_heads: 16, intermediate_size: 4304, image_size: 224, "
    "patch_size: 14}, num_steps: 4, noise_method: flow_sde, freeze_vlm: true, use_quantile_norm: true"
)
INTERNVL = [
    f"model.init_config.vlm_config.{part}_config.{name}={value}"
    for part, sizes in {
        "text": {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2, "num_attention_heads": 14,
            "num_key_value_heads": 2, "max_position_embeddings": 1024,
        },
        "vision": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 16,
            "image_size": "[224,224]", "patch_size": "[14,14]",
        },
    }.items()
    for name, value in sizes.items()
]  # fmt: skip
INTERNVL += [
    "model.init_config.processor_config.image_seq_length=256",
    "model.init_config.processor_config.image_processor.size={height: 224, width: 224}",
    "model.hidden_size=896",
    "model.image_size=[224,224]",
]
"""InternVL 3 of 1 billion parameters, with the packaged vocabulary."""
RANDOM = ["model.override_config={}", "model.unnorm_key=null"]
FOUR_ROWS = ["model.micro_batch_size=4", "model.val_micro_batch_size=8"]
LORA = ["model.is_lora=true", "model.gradient_checkpointing=true"]
MODELS = {
    "openvla": ["model=openvla", f"model.init_config={{{LLAMA}, {TOWERS}}}", *RANDOM, *FOUR_ROWS],
    "openvla_oft": ["model=openvla_oft", f"model.init_config={{{LLAMA}, {TOWERS}}}", *RANDOM, *FOUR_ROWS],
    "pi0": ["model=pi0", f"model.init_config={{{PI0}}}", *RANDOM, *FOUR_ROWS],
    "pi05": ["model=pi05", f"model.init_config={{pi05: true, {PI0}}}", *RANDOM, *FOUR_ROWS],
    "hf_vla": ["model=hf_vla_tiny", *INTERNVL, *FOUR_ROWS],
    "mlp": ["experiment=tabletop_ppo_mlp"],
}
"""Overrides of each family."""
WHOLE_OFT = ["model=openvla_oft", "model.init_config={n_action_bins: 256}", *RANDOM, *LORA, "model.micro_batch_size=8"]
"""OFT with all of its 7.5 billion parameters; one camera, micro-batches of 8."""
HEAD = ["algorithm=sac", "model.features=pooled", "algorithm.actor.hidden_size=256"]
RL, CLONING = ("policy_call", "score", "update", "push"), ("sft_step",)


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the phases that are counted, in their order.

    Attributes:
        run: ``ActionRun``, ``TokenRun`` or ``HeadRun``.
        settings: Overrides; of a token policy, its keyword arguments.
        phases: Methods of the run.
        rows: Envs, or rows of a batch.
    """

    run: str
    settings: Any
    phases: tuple[str, ...] = RL + CLONING
    rows: int = 8


@dataclass(frozen=True)
class _Token(Case):
    run: str = "TokenRun"
    settings: Any = field(default_factory=dict)
    phases: tuple[str, ...] = ("generate", "score", "sft_step")


HALF = {"torch_dtype": "bfloat16", "micro_batch_size": 4}
CASES = {
    "openvla, LoRA": Case("ActionRun", [*MODELS["openvla"], *LORA]),
    "openvla_oft, LoRA": Case("ActionRun", [*MODELS["openvla_oft"], *LORA]),
    "openvla_oft, LoRA, merged": Case(
        "ActionRun", [*MODELS["openvla_oft"], *LORA, "rollout.merge_adapters=true"], ("policy_call", "update", "push")
    ),
    "openvla_oft, all weights": Case("ActionRun", MODELS["openvla_oft"]),
    "openvla_oft, LoRA, bf16-mixed": Case(
        "ActionRun", [*MODELS["openvla_oft"], *LORA, "model.precision=bf16-mixed"], RL
    ),
    "openvla_oft, 7.5 billion, LoRA": Case("ActionRun", WHOLE_OFT, ("policy_call", "update"), rows=16),
    "pi0, action expert": Case("ActionRun", MODELS["pi0"]),
    "pi05, action expert": Case("ActionRun", MODELS["pi05"]),
    "hf_vla, all weights, fp32": Case("ActionRun", MODELS["hf_vla"]),
    "hf_vla, LoRA, bf16-mixed": Case("ActionRun", [*MODELS["hf_vla"], *LORA, "model.precision=bf16-mixed"], RL),
    "mlp": Case("ActionRun", MODELS["mlp"], rows=32),
    "qwen2, all weights": _Token(settings=HALF),
    "qwen2, LoRA": _Token(settings=HALF | {"lora": {}, "gradient_checkpointing": True}),
    "qwen2, all weights, packed": _Token(
        settings=HALF | {"max_tokens_per_microbatch": 1024, "sequence_packing": True}, phases=("score", "sft_step")
    ),
    "openvla_oft, actor": Case("HeadRun", [*MODELS["openvla_oft"], *HEAD], ("policy_call", "update")),
    "pi0, actor": Case("HeadRun", [*MODELS["pi0"], *HEAD], ("policy_call", "update")),
}
"""What ``budgets.txt`` has rows of."""
