"""Configuration of pi0 and pi0.5; sizes are set by a public checkpoint's variant name or explicitly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.embodiment.modules.flow import NOISE_METHODS
from rlinf.models.loading import check_choice, check_model_type, checkpoint_folder, field_error, read_json
from rlinf.types import Statistics

_HEADS = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256}
GEMMA_SIZES = {
    "gemma_300m": {"width": 1024, "depth": 18, "mlp_dim": 4096, **_HEADS},
    "gemma_2b": {"width": 2048, "depth": 18, "mlp_dim": 16384, **_HEADS},
}
SIGLIP_SIZES = {
    "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304, "image_size": 224,
    "patch_size": 14,
}  # fmt: skip
NUM_CAMERA_SLOTS = 3
"""Number of camera inputs: public checkpoints were trained with a base camera and two wrist cameras, in this order."""
# Maps fields of lerobot's config.json to ours.
_LEROBOT_FIELDS = {
    "chunk_size": "action_horizon",
    "max_action_dim": "action_dim",
    "num_inference_steps": "num_steps",
    "tokenizer_max_length": "max_token_len",
    "paligemma_variant": "paligemma_variant",
    "action_expert_variant": "action_expert_variant",
}


class Pi0Config(PreTrainedConfig):
    """Configuration of pi0 (Black et al. 2024) and pi0.5 (Black et al. 2025): network, inputs and RL policy.

    Args:
        pi05: Use pi0.5, with time as input of adaptive norms and the state in the prompt, instead of pi0.
        paligemma_variant, action_expert_variant: Named sizes, used if ``vlm`` and ``expert`` are not set.
        vlm, expert: Sizes ``width, depth, mlp_dim, num_heads, num_kv_heads, head_dim``.
        vision: Sizes ``hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, image_size, patch_size``.
        action_dim: Width to which states and actions are padded with zeros.
        action_horizon: Number of predicted actions, of which ``model.action_chunks_len`` are executed.
        max_token_len: Maximum prompt length in tokens; None means 48 (pi0) or 200 (pi0.5).
        image_mean, image_std: Per-channel values for images in [0, 1]; 0.5 in public checkpoints. Small models trained
            from scratch need a mean near the background colour to see small objects.
        cameras: Env cameras by position: base, left wrist, right wrist (null if absent); None uses the env's first three.
        discrete_state_input: Include the state in the prompt, as 256 bins of [-1, 1]; None follows ``pi05``.
        use_quantile_norm: Normalise by q01 and q99 instead of mean and std; None follows ``pi05``.
        norm_stats: Statistics of ``action`` and ``proprio`` by data set name.
        num_steps: ``n``, the number of denoising steps.
        noise_method: Distribution of a step; see ``step_moments``. ``flow_ode`` has no log-probabilities.
        noise_level: ``a`` in ``flow_sde`` and ``flow_cps``.
        noise_std_range: Bounds of the std learned in ``flow_noise``; None uses those in the weights, or [0.08, 0.16].
        joint_logprob: Sample and score all steps instead of one random step per call.
        value_hidden_sizes, noise_hidden_sizes: Widths of the heads' hidden layers.
        freeze_vlm: Train only the action expert, its projections and the heads, as in public RL recipes.
    """

    model_type = "openpi"
    accepted_model_types: ClassVar[tuple[str | None, ...]] = (None, "openpi", "pi0", "pi05")
    config_files: ClassVar[tuple[str, ...]] = ("config.json", "tiny_config.json")
    manifest_fields: ClassVar[tuple[str, ...]] = (
        "pi05", "action_horizon", "num_steps", "discrete_state_input", "use_quantile_norm", "cameras", "image_mean", "image_std",
    )  # fmt: skip

    pi05: bool = False
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    vlm: dict[str, int] | None = None
    expert: dict[str, int] | None = None
    vision: dict[str, int] | None = None
    vocab_size: int = 257152
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    cameras: list[str | None] | None = None
    discrete_state_input: bool | None = None
    use_quantile_norm: bool | None = None
    norm_stats: Statistics | None = None
    num_steps: int = 10
    noise_method: str = "flow_sde"
    noise_level: float = 0.5
    noise_std_range: list[float] | None = None
    joint_logprob: bool = False
    value_hidden_sizes: list[int] | None = None
    noise_hidden_sizes: list[int] | None = None
    freeze_vlm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        gemma = ("width", "depth", "mlp_dim", *_HEADS)
        self.vlm = _sizes("vlm", self.vlm or _gemma_sizes("paligemma_variant", self.paligemma_variant), gemma)
        expert = self.expert or _gemma_sizes("action_expert_variant", self.action_expert_variant)
        self.expert = _sizes("expert", expert, gemma)
        self.vision = _sizes("vision", self.vision or SIGLIP_SIZES, tuple(SIGLIP_SIZES))
        self.image_mean = list(self.image_mean or [0.5] * 3)
        self.image_std = list(self.image_std or [0.5] * 3)
        self.cameras = None if self.cameras is None else list(self.cameras)
        self.norm_stats = self.norm_stats or {}
        self.noise_std_range = None if self.noise_std_range is None else list(self.noise_std_range)
        self.value_hidden_sizes = list(self.value_hidden_sizes or [512, 256, 128])
        self.noise_hidden_sizes = list(self.noise_hidden_sizes or [128, 64])
        # The converter's entry is ignored, because model.precision sets the number format.
        kwargs.pop("precision", None)
        super().__post_init__(**kwargs)
        self._check()

    @property
    def hidden_size(self) -> int:
        return self.vlm["width"]

    @property
    def image_sizes(self) -> list[int]:
        """Side of a square image in pixels."""
        return [self.vision["image_size"]]

    @property
    def longest_prompt(self) -> int:
        """``max_token_len``, or the model's default."""
        return (200 if self.pi05 else 48) if self.max_token_len is None else self.max_token_len

    @property
    def state_in_prompt(self) -> bool:
        """``discrete_state_input``, or the model's default."""
        return self.pi05 if self.discrete_state_input is None else self.discrete_state_input

    @property
    def by_quantiles(self) -> bool:
        """``use_quantile_norm``, or the model's default."""
        return self.pi05 if self.use_quantile_norm is None else self.use_quantile_norm

    @property
    def reads_state(self) -> bool:
        """Whether the policy needs ``Observation.state``."""
        return self.state_in_prompt or not self.pi05

    def _check(self) -> None:
        check_choice("noise_method", self.noise_method, NOISE_METHODS)
        if self.num_steps < 1:
            raise field_error(f"num_steps is {self.num_steps}; expected 1 or more", "num_steps=4")
        bounds = self.noise_std_range
        if bounds is not None and not (len(bounds) == 2 and 0.0 < bounds[0] <= bounds[1]):
            problem = f"noise_std_range is {bounds}; expected two positive values in increasing order, or null"
            raise field_error(problem, "noise_std_range=[0.08,0.16]")
        if self.state_in_prompt and not self.by_quantiles:
            problem = "discrete_state_input needs states in [-1, 1], but use_quantile_norm=False does not map them to this range"
            raise field_error(problem, "use_quantile_norm=true")
        shared = ("depth", "num_kv_heads", "head_dim")
        different = [name for name in shared if self.vlm[name] != self.expert[name]]
        if different:
            raise ConfigError(
                f"vlm and expert differ in {', '.join(different)} ({[self.vlm[name] for name in different]} and "
                f"{[self.expert[name] for name in different]}); expected equal values. Set model.init_config.expert."
                f"{different[0]}={self.vlm[different[0]]} for random weights, or model.model_path=<a different folder>"
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Read a folder's configuration in our, openpi's or lerobot's format, or from ``tiny_config.json``."""
        folder = checkpoint_folder(pretrained_model_name_or_path)
        path = next((folder / name for name in cls.config_files if (folder / name).is_file()), folder / "config.json")
        values = read_json(path)
        check_model_type(cls, values, folder)
        if str(values.get("type")) in ("pi0", "pi05"):
            pi05 = values["type"] == "pi05"
            values = {ours: values[name] for name, ours in _LEROBOT_FIELDS.items() if name in values} | {"pi05": pi05}
        # openpi's converter does not record whether this is pi0.5, but tensor names show it.
        if "pi05" not in values:
            values["pi05"] = any(name.removeprefix("model.") == "time_mlp_in.weight" for name in _tensor_names(folder))
        values["norm_stats"] = _openpi_statistics(folder) | (values.get("norm_stats") or {})
        return cls.from_dict(values, **kwargs)


def check_attention(implementation: str | None) -> None:
    """Reject attention kernels without mask support."""
    if implementation not in (None, "sdpa", "eager"):
        problem = f"model.attn_implementation is {implementation}, whose kernels do not support masks"
        raise ConfigError(f"{problem}. Set model.attn_implementation=sdpa")


def check_sizes(config: Pi0Config, action_dim: int, action_chunks_len: int) -> None:
    """Reject sizes in the config's ``model`` section that exceed the network's."""
    if action_dim > config.action_dim:
        raise ConfigError(
            f"model.action_token_len is {action_dim}, but the policy's actions have at most {config.action_dim} dimensions. "
            f"Set model.action_token_len={config.action_dim} or less"
        )
    if action_chunks_len > config.action_horizon:
        raise ConfigError(
            f"model.action_chunks_len is {action_chunks_len}, but the policy predicts {config.action_horizon} actions. "
            f"Set model.action_chunks_len={config.action_horizon} or less"
        )


def _gemma_sizes(field: str, variant: str) -> dict[str, int]:
    if variant not in GEMMA_SIZES:
        hint = " Merge the LoRA weights into the base weights first." if variant.endswith("_lora") else ""
        raise ConfigError(
            f"{field} is '{variant}'; expected one of {', '.join(GEMMA_SIZES)}.{hint} Set model.model_path=<folder of the "
            f'merged checkpoint>, or write e.g. "{field}": "{variant.removesuffix("_lora")}" into config.json'
        )
    return GEMMA_SIZES[variant]


def _sizes(field: str, given: Any, required: tuple[str, ...]) -> dict[str, int]:
    missing = [name for name in required if not isinstance(given, Mapping) or name not in given]
    if missing:
        raise ConfigError(
            f"{field} lacks {', '.join(missing)}; expected {', '.join(required)}. Set model.model_path=<folder of pi0>, or "
            f"model.init_config.{field}.{missing[0]}=<number> for random weights"
        )
    return dict(given)


def _tensor_names(folder: Path) -> list[str]:
    names: list[str] = []
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names += file.keys()
        except SafetensorError as error:
            raise CheckpointError(
                f"'{path}' cannot be read ({error}). Set model.model_path=<a different folder>"
            ) from error
    return names


def _openpi_statistics(folder: Path) -> Statistics:
    statistics = {}
    for path in sorted((folder / "assets").rglob("norm_stats.json")):
        values = read_json(path).get("norm_stats") or {}
        if not {"actions", "state"} <= values.keys():
            raise CheckpointError(
                f"'{path}' contains statistics of {sorted(values)} under 'norm_stats'; expected actions and state. Set "
                "model.model_path=<a different folder>, or move this file away"
            )
        name = path.parent.relative_to(folder / "assets").as_posix()
        statistics[name] = {"action": values["actions"], "proprio": values["state"]}
    return statistics
