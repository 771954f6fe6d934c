"""Configuration of OpenVLA, with the fields of public ``config.json`` files and options for models from scratch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import LlamaConfig, PreTrainedConfig

from rlinf.errors import ConfigError
from rlinf.models.loading import check_choice, checkpoint_folder, dataset_statistics, field_error
from rlinf.types import Statistics

OPENVLA_PROMPT = "In: What action should the robot take to {instruction}?\nOut:"

# (width, depth, heads, ratio of MLP width to width) of the vision transformers named in public checkpoints
_VIT_SIZES = {
    "tiny": (192, 12, 3, 4.0),
    "small": (384, 12, 6, 4.0),
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "so400m": (1152, 27, 16, 3.7362),
}


@dataclass(frozen=True)
class VisionTowerSpec:
    """Description of a vision transformer; sizes are in pixels.

    Attributes:
        kind: ``dinov2`` (class and register tokens, LayerScale) or ``siglip``.
        num_prefix_tokens: Number of class and register tokens, which are removed from the output.
        feature_layer: Index of the layer whose output, without final norm, is used (negative counts from the end).
        mlp_stem_dim: Hidden width of a two-layer patch embedding; None uses one linear layer.
        film_dim: Width of the text vector for FiLM; None disables FiLM.
    """

    kind: str
    image_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    num_prefix_tokens: int
    feature_layer: int
    hidden_act: str
    mlp_stem_dim: int | None
    film_dim: int | None

    @property
    def grid_size(self) -> int:
        """Number of patches per side."""
        return self.image_size // self.patch_size

    @property
    def num_used_blocks(self) -> int:
        """Number of layers that are run; the remaining ones only exist in the checkpoint."""
        return self.depth + self.feature_layer + 1 if self.feature_layer < 0 else self.feature_layer + 1


CROP_AREA = 0.9
"""Crop area for models trained with random crops (``image_aug`` in the public fine-tuning)."""


class OpenVLAConfig(PreTrainedConfig):
    """Configuration of OpenVLA (Kim et al. 2024). Fields not listed below are as in public files.

    Args:
        timm_model_ids: Names of one or two vision transformers, which encode kind, size and patch size.
        image_sizes: Image side in pixels per tower.
        image_resize_strategy: ``resize-naive``, ``letterbox`` or ``resize-crop``.
        use_fused_vision_backbone: Use two towers and concatenate their features.
        timm_override_act_layers: Activation per tower; None uses erf GELU.
        text_config: Differences from ``LlamaConfig`` defaults.
        pad_to_multiple_of: Number of padding rows at the end of the vocabulary, right after the action tokens.
        norm_stats: Action statistics by data set name.
        vision_overrides: Values per tower for ``embed_dim, depth, num_heads, mlp_ratio, patch_size, hidden_act``.
        vision_feature_layer: Layer whose output is used; -2 in public checkpoints.
        action_decoding: ``autoregressive``, or ``parallel``: one action token is read at each placeholder token after
            the prompt, with bidirectional attention (OpenVLA-OFT, Kim et al. 2025, without chunks).
        learned_placeholders: Train the placeholder embeddings; if false, they are zeros, as in OpenVLA-OFT.
        action_bin_rule: ``midpoints`` (public) or ``grid``; see ``ActionTokenizer``.
        use_film: Modulate vision layers by the mean text embedding (OpenVLA-OFT's form of Perez et al. 2018).
        mlp_stem_dim: Hidden width of a two-layer patch embedding; None uses one linear layer.
        patches_per_token: Number of neighbouring patches per image token: square blocks if possible, else runs in a row.
        num_images_in_input: Number of cameras that the model reads, in the observation's order.
        prompt_suffix_token_id: Token appended to prompts that do not end with it, or None.
        image_mean, image_std: Per-channel values for images in [0, 1] in a new processor; None uses the towers' own.
            Small models trained from scratch need a mean near the background colour to see small objects.
        image_preparation: ``rlds`` applies a JPEG round trip and a Lanczos-3 resize first, as in RLDS data sets and the
            public LIBERO evaluation; ``none`` only applies the resize above.
        center_crop: Crop the centre (0.9 of the area) and enlarge it, as in public evaluations after ``image_aug``.
        weight_init: Random initialisation: ``normal`` (std ``text_config.initializer_range``) or ``fan_in`` (std
            1/sqrt(inputs), 1 for embeddings), with which small models learn faster.
        max_prompt_len: Length to which prompts are padded; None uses the longest prompt in the batch.
    """

    model_type = "openvla"
    sub_configs = {"text_config": LlamaConfig}
    accepted_model_types: ClassVar[tuple[str, ...]] = ("openvla",)
    action_bounds: ClassVar[tuple[str, str]] = ("q01", "q99")
    unnormalize_epsilon: ClassVar[float] = 0.0

    vision_backbone_id: str = "dinosiglip-vit-so-224px"
    llm_backbone_id: str = "llama2-7b-pure"
    arch_specifier: str = "no-align+fused-gelu-mlp"
    hf_llm_id: str = "meta-llama/Llama-2-7b-hf"
    timm_model_ids: list[str] | None = None
    timm_override_act_layers: list[str | None] | None = None
    image_sizes: list[int] | None = None
    image_resize_strategy: str = "resize-naive"
    use_fused_vision_backbone: bool | None = None
    text_config: dict[str, Any] | LlamaConfig | None = None
    llm_max_length: int = 2048
    pad_token_id: int = 32000
    pad_to_multiple_of: int = 64
    output_projector_states: bool = False
    n_action_bins: int = 256
    norm_stats: Statistics | None = None
    vision_overrides: list[dict[str, Any]] | None = None
    vision_feature_layer: int = -2
    action_decoding: str = "autoregressive"
    learned_placeholders: bool = False
    action_bin_rule: str = "midpoints"
    use_film: bool = False
    mlp_stem_dim: int | None = None
    patches_per_token: int = 1
    num_images_in_input: int = 1
    prompt_template: str = OPENVLA_PROMPT
    prompt_suffix_token_id: int | None = 29871
    weight_init: str = "normal"
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    image_preparation: str = "none"
    center_crop: bool = False
    max_prompt_len: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.timm_model_ids = list(
            self.timm_model_ids or ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
        )
        num_towers = len(self.timm_model_ids)
        self.timm_override_act_layers = list(self.timm_override_act_layers or [None] * num_towers)
        self.image_sizes = list(self.image_sizes or [224] * num_towers)
        if self.use_fused_vision_backbone is None:
            self.use_fused_vision_backbone = num_towers == 2
        self.norm_stats = self.norm_stats or {}
        self.vision_overrides = list(self.vision_overrides or [{} for _ in range(num_towers)])
        if not isinstance(self.text_config, LlamaConfig):
            llama2 = {"vocab_size": 32064, "pad_token_id": self.pad_token_id}
            self.text_config = LlamaConfig(**(self.text_config or llama2))
        super().__post_init__(**kwargs)
        self._check()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Read ``config.json``; ``dataset_statistics.json`` is merged into ``norm_stats`` and takes precedence."""
        folder = checkpoint_folder(pretrained_model_name_or_path)
        result = super().from_pretrained(folder, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config.norm_stats = {**config.norm_stats, **dataset_statistics(folder)}
        return result

    def _check(self) -> None:
        towers, fused = 2 if self.use_fused_vision_backbone else 1, "use_fused_vision_backbone"
        for name in ("timm_model_ids", "image_sizes", "timm_override_act_layers", "vision_overrides"):
            if (count := len(getattr(self, name))) != towers:
                problem = f"{name} has {count} entries with {fused}={self.use_fused_vision_backbone}"
                fix = f"{fused if name == 'timm_model_ids' else name}=null"
                raise field_error(f"{problem}; expected one per vision tower ({towers})", fix)
        check_choice("action_decoding", self.action_decoding, ("autoregressive", "parallel"))
        check_choice("weight_init", self.weight_init, ("normal", "fan_in"))
        check_choice("image_preparation", self.image_preparation, ("rlds", "none"))
        if not isinstance(self.center_crop, bool):
            problem = f"center_crop is '{self.center_crop}'; expected true (0.9 of the area) or false"
            raise field_error(problem, "center_crop=true")
        if len(set(self.image_sizes)) > 1 and (self.center_crop or self.image_preparation != "none"):
            raise ConfigError(
                f"image_sizes are {self.image_sizes}; required for center_crop and image_preparation: equal sizes. "
                "Set model.override_config.center_crop=false model.override_config.image_preparation=none"
            )
        if self.text_config.model_type != "llama":
            raise ConfigError(
                f"text_config.model_type is '{self.text_config.model_type}'; expected llama. "
                "Set model.model_type=hf_vla for a vision-language model of a different kind"
            )

    @property
    def crop_area(self) -> float:
        """Fraction of the image area that the policy sees, except in cloning with augmentation."""
        return CROP_AREA if self.center_crop else 1.0

    @property
    def action_vocab_size(self) -> int:
        """Vocabulary size without padding; the last ``n_action_bins`` ids are the action tokens."""
        return self.text_config.vocab_size - self.pad_to_multiple_of

    def vision_towers(self) -> list[VisionTowerSpec]:
        """Parse the towers from their names, image sizes and overrides."""
        towers = [self._tower(i) for i in range(len(self.timm_model_ids))]
        if len({tower.grid_size for tower in towers}) > 1:
            sizes = ",".join(str(towers[0].grid_size * tower.patch_size) for tower in towers)
            raise field_error(
                f"image_sizes are {self.image_sizes}, i.e. {[tower.grid_size for tower in towers]} patches per side; "
                "expected equal numbers for both towers", f"image_sizes=[{sizes}]",
            )  # fmt: skip
        return towers

    def token_block(self) -> tuple[int, int]:
        """Return the height and width of an image token, in patches."""
        grid_size, patches = self.vision_towers()[0].grid_size, self.patches_per_token
        side = round(patches**0.5)
        if side * side == patches and grid_size % side == 0:
            return side, side
        if grid_size % patches == 0:
            return 1, patches
        raise field_error(
            f"patches_per_token is {patches}; expected a number that divides a grid of {grid_size} x {grid_size} patches "
            "into square blocks or into runs within a row", "patches_per_token=1",
        )  # fmt: skip

    def _tower(self, index: int) -> VisionTowerSpec:
        name, override = self.timm_model_ids[index], dict(self.vision_overrides[index])
        size = next((_VIT_SIZES[word] for word in name.split("_") if word in _VIT_SIZES), None)
        patch = re.search(r"patch(\d+)", name)
        kind = "dinov2" if "dinov2" in name else "siglip" if "siglip" in name else None
        if kind is None or size is None or patch is None:
            raise field_error(
                f"Vision tower '{name}' is not supported; expected a name such as vit_large_patch14_reg4_dinov2.lvd142m or "
                f"vit_so400m_patch14_siglip_224 (sizes: {', '.join(_VIT_SIZES)})", "timm_model_ids=null",
            )  # fmt: skip
        defaults = dict(zip(("embed_dim", "depth", "num_heads", "mlp_ratio"), size, strict=True))
        defaults |= {"patch_size": int(patch[1]), "hidden_act": None}
        if unknown := sorted(override.keys() - defaults):
            problem = f"vision_overrides[{index}] has unknown keys: {', '.join(unknown)}; known: {', '.join(defaults)}"
            raise field_error(problem, "vision_overrides=null")
        sizes = defaults | override
        depth, patch_size, registers = sizes["depth"], sizes["patch_size"], re.search(r"reg(\d+)", name)
        spec = VisionTowerSpec(
            kind=kind,
            image_size=self.image_sizes[index],
            patch_size=patch_size,
            embed_dim=sizes["embed_dim"],
            depth=depth,
            num_heads=sizes["num_heads"],
            mlp_dim=int(sizes["embed_dim"] * sizes["mlp_ratio"]),
            num_prefix_tokens=1 + int(registers[1] if registers else 0) if kind == "dinov2" else 0,
            feature_layer=self.vision_feature_layer,
            hidden_act=sizes["hidden_act"] or self.timm_override_act_layers[index] or "gelu",
            mlp_stem_dim=self.mlp_stem_dim,
            film_dim=self.text_config.hidden_size if self.use_film else None,
        )
        if not 1 <= spec.num_used_blocks <= depth:
            problem = f"vision_feature_layer is {self.vision_feature_layer}; expected an index into {depth} layers"
            raise field_error(problem, "vision_feature_layer=-1")
        if spec.image_size % patch_size:
            fitting = [size // patch_size * patch_size for size in self.image_sizes]
            problem = f"image_sizes are {self.image_sizes}; expected multiples of {patch_size}, '{name}'s patch size"
            raise field_error(problem, f"image_sizes={fitting}".replace(" ", ""))
        return spec
