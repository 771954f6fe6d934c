"""OpenVLA's vision transformers, built from transformers' own DINOv2 and SigLIP layers."""

import torch
from torch import Tensor, nn
from transformers import Dinov2WithRegistersConfig, SiglipVisionConfig
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from rlinf.models.embodiment.openvla.config import OpenVLAConfig, VisionTowerSpec
from rlinf.models.layers import run_in_turn

LAYER_NORM_EPS = 1e-6


class Film(nn.Module):
    """Feature-wise modulation ``x * (1 + scale(l)) + shift(l)`` (Perez et al. 2018), as used in OpenVLA-OFT."""

    def __init__(self, text_dim: int, embed_dim: int) -> None:
        super().__init__()
        self.scale = nn.Linear(text_dim, embed_dim)
        self.shift = nn.Linear(text_dim, embed_dim)

    def forward(self, hidden_states: Tensor, text: Tensor) -> Tensor:
        return torch.addcmul(self.shift(text).unsqueeze(1), hidden_states, 1 + self.scale(text).unsqueeze(1))


class DinoBlock(Dinov2WithRegistersLayer):
    """DINOv2 layer with optional FiLM after the attention residual, and an MLP of any width."""

    def __init__(self, config: Dinov2WithRegistersConfig, mlp_dim: int, film_dim: int | None) -> None:
        super().__init__(config)
        self.mlp.fc1 = nn.Linear(config.hidden_size, mlp_dim)
        self.mlp.fc2 = nn.Linear(mlp_dim, config.hidden_size)
        self.film = Film(film_dim, config.hidden_size) if film_dim else None

    def forward(self, hidden_states: Tensor, text: Tensor | None = None) -> Tensor:
        attended, _ = self.attention(self.norm1(hidden_states))
        hidden_states = hidden_states + self.layer_scale1(attended)
        if self.film is not None:
            hidden_states = self.film(hidden_states, text)
        return hidden_states + self.layer_scale2(self.mlp(self.norm2(hidden_states)))


class SiglipBlock(SiglipEncoderLayer):
    """SigLIP layer with optional FiLM after the attention residual."""

    def __init__(self, config: SiglipVisionConfig, film_dim: int | None) -> None:
        super().__init__(config)
        self.film = Film(film_dim, config.hidden_size) if film_dim else None

    def forward(self, hidden_states: Tensor, text: Tensor | None = None) -> Tensor:
        attended, _ = self.self_attn(self.layer_norm1(hidden_states))
        hidden_states = hidden_states + attended
        if self.film is not None:
            hidden_states = self.film(hidden_states, text)
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class PatchEmbedding(nn.Module):
    """Map non-overlapping patches to vectors by one linear layer, or two with a GELU in between (``mlp_stem_dim``)."""

    def __init__(self, spec: VisionTowerSpec) -> None:
        super().__init__()
        self.patch_size = spec.patch_size
        patch_dim = 3 * spec.patch_size**2
        if spec.mlp_stem_dim:
            self.stem = nn.Linear(patch_dim, spec.mlp_stem_dim)
            self.proj = nn.Linear(spec.mlp_stem_dim, spec.embed_dim)
        else:
            self.stem = None
            self.proj = nn.Conv2d(3, spec.embed_dim, kernel_size=spec.patch_size, stride=spec.patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map ``[B, 3, H, W]`` to ``[B, N, embed_dim]``, patches in row-major order."""
        batch, channels, height, width = pixel_values.shape
        size = self.patch_size
        # To keep pixel rows contiguous, reorder the weights, which are small, instead of the images.
        patches = pixel_values.permute(0, 2, 3, 1).reshape(batch, height // size, size, width // size, size * channels)
        patches = patches.transpose(2, 3).reshape(batch, -1, size * size * channels)
        first = self.proj if self.stem is None else self.stem
        # Reorder the columns from (channel, row, column) to (row, column, channel).
        weight = first.weight.reshape(len(first.weight), 3, -1).transpose(1, 2).flatten(1)
        embedded = nn.functional.linear(patches, weight, first.bias)
        return embedded if self.stem is None else self.proj(nn.functional.gelu(embedded))


class AttentionPool(nn.Module):
    """SigLIP's pooling head. OpenVLA never uses it, but public checkpoints contain it, so saved folders must as well."""

    def __init__(self, spec: VisionTowerSpec) -> None:
        super().__init__()
        width = spec.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, spec.mlp_dim), "fc2": nn.Linear(spec.mlp_dim, width)})


class VisionTower(nn.Module):
    """A vision transformer that is run up to ``feature_layer``; later layers only exist for saving."""

    def __init__(self, spec: VisionTowerSpec, config: OpenVLAConfig) -> None:
        super().__init__()
        self.spec = spec
        width, num_patches = spec.embed_dim, spec.grid_size**2
        self.patch_embed = PatchEmbedding(spec)
        if spec.kind == "dinov2":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            num_registers = spec.num_prefix_tokens - 1
            self.reg_token = nn.Parameter(torch.zeros(1, num_registers, width)) if num_registers else None
            num_patches += 0 if num_registers else 1
        self.blocks = nn.ModuleList(_new_block(spec, config._attn_implementation) for _ in range(spec.depth))
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, width))
        if spec.feature_layer != -1:
            self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
            if spec.kind == "siglip":
                self.attn_pool = AttentionPool(spec)

    @property
    def unused(self) -> list[str]:
        """Names of the layers after the feature layer."""
        blocks = [f"blocks.{index}" for index in range(self.spec.num_used_blocks, self.spec.depth)]
        return blocks + [name for name in ("norm", "attn_pool") if hasattr(self, name)]

    def forward(self, pixel_values: Tensor, text: Tensor | None = None) -> Tensor:
        """Map ``[B, 3, H, W]`` to patch features ``[B, N, embed_dim]``; ``text [B, film_dim]`` is the input of FiLM."""
        hidden_states = self.patch_embed(pixel_values)
        if self.spec.kind == "dinov2":
            # With registers, neither they nor the class token have positions; without them, the class token has the first.
            cls_token = self.cls_token.expand(len(hidden_states), -1, -1)
            if self.reg_token is None:
                hidden_states = torch.cat([cls_token, hidden_states], dim=1) + self.pos_embed
            else:
                registers = self.reg_token.expand(len(hidden_states), -1, -1)
                hidden_states = torch.cat([cls_token, registers, hidden_states + self.pos_embed], dim=1)
        else:
            hidden_states = hidden_states + self.pos_embed
        hidden_states = run_in_turn(list(self.blocks)[: self.spec.num_used_blocks], hidden_states, text)
        return hidden_states[:, self.spec.num_prefix_tokens :]


class VisionBackbone(nn.Module):
    """One tower (``featurizer``), or two with concatenated features (``fused_featurizer`` reads channels 3..5)."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        specs = config.vision_towers()
        self.featurizer = VisionTower(specs[0], config)
        self.fused_featurizer = VisionTower(specs[1], config) if len(specs) == 2 else None
        self.embed_dim = sum(spec.embed_dim for spec in specs)
        self.grid_size = specs[0].grid_size

    def forward(self, pixel_values: Tensor, text: Tensor | None = None) -> Tensor:
        """Map ``[B, 3 * towers * images, H, W]`` to ``[B, images * N, embed_dim]``."""
        channels = 3 if self.fused_featurizer is None else 6
        features = []
        for image in pixel_values.split(channels, dim=1):
            tower_features = self.featurizer(image[:, :3], text)
            if self.fused_featurizer is not None:
                tower_features = torch.cat([tower_features, self.fused_featurizer(image[:, 3:], text)], dim=-1)
            features.append(tower_features)
        return features[0] if len(features) == 1 else torch.cat(features, dim=1)


class Projector(nn.Module):
    """Map patch features to language tokens, after concatenating ``patches_per_token`` neighbours."""

    def __init__(self, config: OpenVLAConfig, vision_dim: int, grid_size: int) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.block_height, self.block_width = config.token_block()
        vision_dim, hidden = vision_dim * config.patches_per_token, config.text_config.hidden_size
        if config.use_fused_vision_backbone:
            self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
            self.fc2 = nn.Linear(4 * vision_dim, hidden)
            self.fc3 = nn.Linear(hidden, hidden)
        else:
            self.fc1 = nn.Linear(vision_dim, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.fc3 = None

    @property
    def tokens_per_image(self) -> int:
        return self.grid_size**2 // (self.block_height * self.block_width)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[B, images * N, vision_dim]`` to ``[B, images * tokens_per_image, hidden_size]``."""
        batch, _, width = features.shape
        height, run = self.block_height, self.block_width
        # The patches of a token come from several image rows, which are not adjacent in memory.
        if height > 1:
            features = features.reshape(batch, -1, height, self.grid_size // run, run, width).transpose(2, 3)
        hidden_states = self.fc2(nn.functional.gelu(self.fc1(features.reshape(batch, -1, height * run * width))))
        return hidden_states if self.fc3 is None else self.fc3(nn.functional.gelu(hidden_states))


def _new_block(spec: VisionTowerSpec, attn_implementation: str | None) -> DinoBlock | SiglipBlock:
    sizes = {"hidden_size": spec.embed_dim, "num_attention_heads": spec.num_heads, "hidden_act": spec.hidden_act}
    sizes |= {"layer_norm_eps": LAYER_NORM_EPS, "attn_implementation": attn_implementation}
    if spec.kind == "dinov2":
        return DinoBlock(Dinov2WithRegistersConfig(**sizes, mlp_ratio=1), spec.mlp_dim, spec.film_dim)
    return SiglipBlock(SiglipVisionConfig(**sizes, intermediate_size=spec.mlp_dim), spec.film_dim)
