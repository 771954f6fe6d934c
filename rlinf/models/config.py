"""The ``model`` and ``tokenizer`` sections of a run configuration."""

from dataclasses import dataclass
from typing import Any

from rlinf.options import PathText, option

MAX_EXP_GAP = 1.05
"""Maximum mean of exp |log-prob gap| per token between rollout and training that 16-bit rounding can explain."""


@dataclass
class LoraConfig:
    """Low-rank adaptation (Hu et al. 2021); active when ``model.is_lora``."""

    rank: int = option(32, "Rank of the update matrices.", minimum=1)
    alpha: int = option(32, "Scale: the update is multiplied by alpha / rank.", minimum=1)
    dropout: float = option(0.0, "Dropout before the update; must be 0 for RL.", minimum=0)
    target_modules: list[str] | None = option(None, "Name suffixes of the modules to adapt; null: the model's default.")


@dataclass
class ModelConfig:
    """Which policy to load or build, and how to run it."""

    model_type: str = option("openvla", "Registered model type (`rlinf models` lists them).")
    model_path: PathText | None = option(None, "Checkpoint folder or hub id; null: random weights from `init_config`.")
    init_config: dict[str, Any] = option({}, "Model config fields for random weights (only without `model_path`).")
    override_config: dict[str, Any] = option({}, "New values for fields in the checkpoint's config.json.")
    url: str | None = option(None, "Address of a remote policy, ws://host:8000 (`model=remote`).")
    keys: str | dict[str, Any] | None = option(
        None,
        "Observation keys that a third-party server expects: libero, aloha, droid, or {image: <key>, state: <key>, prompt: <key>}.",
    )
    timeout_s: float = option(60.0, "Maximum wait for a reply from `url` or `interpreter`.", minimum=0.1)
    connect_timeout_s: float = option(
        300.0, "Maximum wait to connect to `url`, or for `interpreter` to load a policy.", minimum=0
    )
    api_key_env: str | None = option(None, "Environment variable with the API key of the server at `url`.")
    interpreter: PathText | None = option(
        None, "Python interpreter for lerobot policies; null: this one, RLINF_LEROBOT_PYTHON, or `.venv-lerobot`."
    )
    action_token_len: int | None = option(2, "D: number of action dimensions (tokens); null: the env's.", minimum=1)
    action_chunks_len: int = option(1, "C: number of actions per policy call.", minimum=1)
    unnorm_key: str | None = option(None, "Key of the action statistics to use; null: the only key.")
    prompt_suffix: str | None = option(None, "Text appended to each instruction; null: none, or the good-action label.")
    micro_batch_size: int = option(128, "Rows per forward-backward pass on one rank.", minimum=1)
    val_micro_batch_size: int = option(256, "Rows per forward pass without gradients.", minimum=1)
    precision: str = option(
        "fp32",
        "fp32; bf16: bf16 compute, fp32 master weights; bf16-mixed: fp32 weights, autocast; fp16: evaluation only.",
    )
    vocab_size: int | None = option(None, "Expected vocabulary size without padding; null: unchecked.")
    hidden_size: int | None = option(None, "Expected width of the language model; null: unchecked.")
    image_size: list[int] | None = option(None, "Expected [height, width] of the model's images; null: unchecked.")
    is_lora: bool = option(False, "Train LoRA adapters (and the value head) instead of all weights.")
    lora: LoraConfig = option(LoraConfig(), "Adapter settings.")
    lora_path: PathText | None = option(None, "Adapter folder to continue from (needs is_lora).")
    value_head: bool = option(True, "Add a value head (required by PPO).")
    detach_value: bool = option(True, "Stop the gradient of the value loss at the value head's input.")
    features: str = option(
        "hidden",
        "Features that actors read from a frozen policy: action states, their prefix mean (keyframe: cloning also trains it to predict "
        "the motion until the gripper next opens or closes), a trained token, or raw inputs.",
        choices=("hidden", "pooled", "keyframe", "token", "inputs"),
    )
    attn_implementation: str = option("sdpa", "Attention kernel.", choices=("sdpa", "eager", "flash_attention_2"))
    gradient_checkpointing: bool | str = option(
        "auto", "Recompute activations in updates; auto: of as many layers as necessary.", choices=("auto", True, False)
    )
    compile: bool = option(False, "Compile the layers with torch.compile for updates.")
    cuda_graph: bool = option(False, "Run policy calls of OpenVLA, OpenVLA-OFT, pi0 and pi0.5 as CUDA graphs.")
    low_cpu_mem_usage: bool = option(True, "Load weights without a second copy in memory.")
    trust_remote_code: bool = option(False, "Run Python code stored in the checkpoint folder.")
    strict: bool = option(True, "Raise loading errors of a registered class; false: fall back to the generic class.")


@dataclass
class TokenizerConfig:
    """Settings for loading the tokenizer and processors."""

    tokenizer_model: PathText | None = option(
        None, "Folder or hub id; null: `model.model_path` or, without one, the packaged tiny tokenizer."
    )
