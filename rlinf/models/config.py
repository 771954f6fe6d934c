"""Configuration of the policy network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf.options import PathText, option

MAX_EXP_GAP = 1.05
"""Largest accepted mean of exp |log-prob - log-prob of the same token elsewhere|, which rounding to 16 bits explains."""


@dataclass
class LoraConfig:
    """Low-rank adaptation (Hu et al. 2021); active when ``model.is_lora``."""

    rank: int = option(32, "Rank of the update matrices.", minimum=1)
    alpha: int = option(32, "Scale: the update is multiplied by alpha / rank.", minimum=1)
    dropout: float = option(
        0.0, "Dropout in front of the update; must be 0 for RL, where log-probs must repeat.", minimum=0
    )
    target_modules: list[str] | None = option(None, "Module name suffixes to adapt; null: what the model declares.")


@dataclass
class ModelConfig:
    """Which policy, from where, and how it is run. The keys of the guide `adding_a_model.md` keep their names."""

    model_type: str = option("openvla", "Registered model type (`rlinf models` lists them).")
    model_path: PathText | None = option(None, "Checkpoint folder or hub id; null: random weights from `init_config`.")
    init_config: dict[str, Any] = option({}, "Model config fields for random weights (only without `model_path`).")
    override_config: dict[str, Any] = option(
        {}, "Fields of the checkpoint's config.json to replace (only with `model_path`)."
    )
    url: str | None = option(
        None, "Address of a policy that acts elsewhere (`model=remote`): ws://host:8000. See serving.md."
    )
    keys: str | dict[str, Any] | None = option(
        None,
        "Names of the parts of an observation for a server of another project: libero, aloha, droid, or {image: <key>, "
        "state: <key>, prompt: <key>}; null: as `rlinf serve` says.",
    )
    timeout_s: float = option(60.0, "Longest wait for an answer of `url` or of `interpreter`.", minimum=0.1)
    connect_timeout_s: float = option(
        300.0,
        "Longest time without a server at `url`, at the start and when it is lost, and until `interpreter` has loaded a policy.",
        minimum=0,
    )
    api_key_env: str | None = option(None, "Environment variable that holds the key of the server at `url`.")
    interpreter: PathText | None = option(
        None,
        "Python that runs a policy of lerobot (`model=lerobot`); null: this one where it has lerobot, else RLINF_LEROBOT_PYTHON, else "
        "`.venv-lerobot`. See lerobot.md.",
    )
    action_token_len: int | None = option(2, "D: numbers (tokens) of one action; null: as the env has.", minimum=1)
    action_chunks_len: int = option(1, "C: actions of one policy call.", minimum=1)
    unnorm_key: str | None = option(None, "Key of the action statistics; null: the only one there is.")
    prompt_suffix: str | None = option(
        None,
        "Words that the policy reads after each instruction when it acts; null: none, and with sft.advantage_top_fraction the label of a good action.",
    )
    micro_batch_size: int = option(128, "Rows of one forward-backward pass on one rank.", minimum=1)
    val_micro_batch_size: int = option(256, "Rows of one forward pass without gradients.", minimum=1)
    precision: str = option(
        "fp32",
        "fp32; bf16: computes in bfloat16, learns in float32; bf16-mixed: float32 weights under autocast; fp16: evaluation "
        "only. See gpu.md.",
    )
    vocab_size: int | None = option(
        None, "Vocabulary without padding; checked against the checkpoint; null: unchecked."
    )
    hidden_size: int | None = option(
        None, "Width of the language model; checked against the checkpoint; null: unchecked."
    )
    image_size: list[int] | None = option(None, "[height, width] that the model sees; null: from the checkpoint.")
    is_lora: bool = option(False, "Train low-rank adapters (and the value head) instead of all weights.")
    lora: LoraConfig = option(LoraConfig(), "Adapter settings.")
    lora_path: PathText | None = option(None, "Adapter folder to continue from (needs is_lora).")
    value_head: bool = option(True, "Add a value head (PPO needs one).")
    detach_value: bool = option(True, "Stop the gradient of the value loss at the value head's input.")
    features: str = option(
        "hidden",
        "What a head reads of a frozen policy: hidden, the states from which actions are read; pooled, the mean over images and prompt; "
        "token, which cloning trains to hold these (RLT); inputs (of `mlp`, `cnn`), set by the actor `scratch`.",
        choices=("hidden", "pooled", "token", "inputs"),
    )
    attn_implementation: str = option("sdpa", "Attention kernel: sdpa, eager or flash_attention_2.")
    gradient_checkpointing: bool | str = option(
        "auto",
        "true: keep the inputs of each repeated block only, and recompute the rest in the backward pass: less memory, about a third more "
        "time. auto: of as many blocks as the GPU's memory asks for, and of none on CPUs. false: of none.",
        choices=("auto", True, False),
    )
    compile: bool = option(
        False,
        "Run the repeated blocks through torch.compile in updates; needs a C++ compiler on CPU, Triton on GPUs. See gpu.md.",
    )
    cuda_graph: bool = option(
        False,
        "Act by CUDA graphs, from pixels to tokens or to the denoised chain: OpenVLA, OpenVLA-OFT, pi0 and pi0.5 on a GPU. See "
        "gpu.md.",
    )
    low_cpu_mem_usage: bool = option(True, "Load weights without a second copy in memory.")
    trust_remote_code: bool = option(False, "Run Python code stored in the checkpoint folder.")
    strict: bool = option(
        True,
        "Raise what a registered class raises while it loads; false: log the traceback and fall back to the generic class.",
    )


@dataclass
class TokenizerConfig:
    """Where tokenizer and processors are loaded from."""

    tokenizer_model: PathText | None = option(
        None, "Folder or hub id; null: `model.model_path`, else the packaged tiny tokenizer."
    )
