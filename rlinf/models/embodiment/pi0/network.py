"""The network of pi0 and pi0.5, and its file formats."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from rlinf.distributed.deferred import Weight, in_memory
from rlinf.errors import CheckpointError
from rlinf.files import write_text
from rlinf.models.embodiment.checkpoint_policy import CheckpointPolicy
from rlinf.models.embodiment.folder_policy import open_safetensors
from rlinf.models.embodiment.modules.flow import time_embedding
from rlinf.models.embodiment.modules.readout_token import make_readout
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.pi0.config import Pi0Config
from rlinf.models.embodiment.pi0.gemma_expert import AdaRMSNorm, GemmaStack, SiglipTower
from rlinf.models.precision import without_autocast

NEW_STD_RANGE = (0.08, 0.16)


@dataclass
class Prefix:
    """Encoded images and text, which the action expert attends to.

    Attributes:
        keys_values: Keys and values ``[2, B, kv_heads, P, head_dim]`` for each layer.
        mask: bool ``[B, P]``, true for present keys.
        states: Input of the language model's last layer, ``[B, P, width]``.
    """

    keys_values: list[Tensor]
    mask: Tensor
    states: Tensor

    def repeated(self, times: int) -> Prefix:
        """Return ``times`` adjacent copies of each row."""
        keys_values = [tensor.repeat_interleave(times, dim=1) for tensor in self.keys_values]
        return Prefix(keys_values, *(tensor.repeat_interleave(times, dim=0) for tensor in (self.mask, self.states)))


class Pi0Network(CheckpointPolicy):
    """SigLIP and Gemma read images and text; the action expert attends to their keys and predicts velocities."""

    config_class = Pi0Config
    base_model_prefix = "pi0"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["GemmaActionLayer", "SiglipEncoderLayer"]

    def __init__(self, config: Pi0Config, value_head: bool, features: str = "hidden", action_dim: int = 7) -> None:
        super().__init__(config)
        attention, width = config._attn_implementation, config.expert["width"]
        self.vision_tower = SiglipTower(config.vision, attention)
        self.projector = nn.Linear(config.vision["hidden_size"], config.hidden_size)
        self.language_model = GemmaStack(config.vlm, attention)
        self.language_model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.expert = GemmaStack(config.expert, attention, adaptive=config.pi05)
        # Never used, but part of public checkpoints.
        self.expert_lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        if config.pi05:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.action_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        for name, head in _heads(config, value_head).items():
            setattr(self, name, head)
        self._add_readout_token(features, config.hidden_size, action_dim, _state_dim(config))
        self.post_init()
        self._init_composites()
        self._freeze()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embed_tokens

    @property
    def frozen_modules(self) -> list[str]:
        """Modules on which no output depends and, with ``freeze_vlm``, all modules that read images and text."""
        # The expert only reads the language model's keys and values, so the rest of its last layer is never used.
        if self.config.freeze_vlm:
            return ["expert_lm_head", "vision_tower", "projector", "language_model"]
        last = f"language_model.layers.{self.config.vlm['depth'] - 1}"
        parts = ("self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp")
        return ["expert_lm_head", "language_model.norm", *(f"{last}.{part}" for part in parts)]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise weights with std 1/sqrt(inputs), embeddings with output std 1, and adaptive norms with zeros."""
        super()._init_weights(module)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        elif isinstance(module, nn.Embedding):
            # Later, token embeddings are multiplied by sqrt(width), but position embeddings are not.
            is_position = module is self.vision_tower.embeddings.position_embedding
            init.normal_(module.weight, std=1.0 if is_position else module.embedding_dim**-0.5)
        elif type(module).__name__ == "GemmaRMSNorm":
            init.zeros_(module.weight)

    @torch.no_grad()
    def _init_composites(self) -> None:
        """Initialise heads and norms, because transformers skips modules without direct parameters."""
        if self.value_head is not None:
            self.value_head.reset_parameters()
        if self.readout_token is not None:
            self.readout_token.reset_parameters()
        for norm in self.modules():
            if isinstance(norm, AdaRMSNorm):
                init.zeros_(norm.dense.weight)
                init.zeros_(norm.dense.bias)

    # -- forward pass --------------------------------------------------------------------------------------------

    def embed_prefix(
        self, pixel_values: Tensor, image_mask: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[B, P, width]``, cameras first, and their bool mask ``[B, P]``.

        ``pixel_values`` are ``[B, cameras, 3, H, W]``, ``image_mask`` is bool ``[B, cameras]``, ids and mask are ``[B, L]``.
        """
        images = self.projector(self.vision_tower(pixel_values.flatten(0, 1))).unflatten(0, pixel_values.shape[:2])
        text = self.language_model.embed_tokens(input_ids) * self.config.hidden_size**0.5
        seen = image_mask.repeat_interleave(images.shape[2], dim=1)
        return torch.cat([images.flatten(1, 2), text], dim=1), torch.cat([seen, attention_mask.bool()], dim=1)

    def encode_prefix(
        self,
        pixel_values: Tensor,
        image_mask: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        state: Tensor | None = None,
    ) -> Prefix:
        """Run the language model on images and text with full attention; ``state`` is ignored."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.freeze_vlm):
            embeddings, mask = self.embed_prefix(pixel_values, image_mask, input_ids, attention_mask)
            positions = prefix_positions(mask)
            keys_values, states = self.language_model.keys_and_values(embeddings, mask[:, None, None], positions)
        return Prefix(keys_values, mask, states)

    def velocity(self, prefix: Prefix, state: Tensor | None, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Predict ``noise - action`` at ``x [B, horizon, action_dim]`` and ``t [B]`` in float32; also return the expert's outputs."""
        dtype, (batch, horizon, _) = self.action_in_proj.weight.dtype, x.shape
        with without_autocast(x):
            time = time_embedding(t, self.config.expert["width"]).to(dtype)
            tokens, condition = self.action_in_proj(x.to(dtype)), None
            if self.config.pi05:
                condition = nn.functional.silu(self.time_mlp_out(nn.functional.silu(self.time_mlp_in(time))))
            else:
                tokens = torch.cat([tokens, time[:, None].expand(-1, horizon, -1)], dim=-1)
                tokens = self.action_time_mlp_out(nn.functional.silu(self.action_time_mlp_in(tokens)))
                tokens = torch.cat([self.state_proj(state.to(dtype))[:, None], tokens], dim=1)
        prefix_dtype, num_tokens = prefix.keys_values[0].dtype, tokens.shape[1]
        tokens, condition = tokens.to(prefix_dtype), None if condition is None else condition.to(prefix_dtype)
        self_mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.device)
        # The state does not attend to the actions.
        self_mask[: num_tokens - horizon, num_tokens - horizon :] = False
        keys = prefix.mask[:, None, None].expand(-1, 1, num_tokens, -1)
        mask = torch.cat([keys, self_mask.expand(batch, 1, -1, -1)], dim=-1)
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(num_tokens, device=x.device)
        output = self.expert(tokens, mask, positions, prefix.keys_values, condition)[:, -horizon:]
        with without_autocast(x):
            return self.action_out_proj(output.to(dtype)).float(), output

    # -- files ---------------------------------------------------------------------------------------------------

    @classmethod
    def _read_weights(cls, folder: Path, config: Pi0Config, arguments: dict[str, Any]) -> dict[str, Weight]:
        state_dict = from_public(open_safetensors(folder))
        if config.noise_std_range is not None and any(name.startswith("noise_head.") for name in state_dict):
            bounds = std_bounds(config.noise_std_range)
            state_dict |= {f"noise_head.{name}": bound for name, bound in bounds.items()}
        return state_dict

    @classmethod
    def _new_heads(cls, config: Pi0Config, arguments: dict[str, Any]) -> dict[str, nn.Module | None]:
        readout = make_readout(arguments["features"], config.hidden_size, arguments["action_dim"], _state_dim(config))
        return {**_heads(config, arguments["value_head"]), "readout_token": readout}

    def _public_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_public(state_dict)

    @classmethod
    def _fix(cls, config: Pi0Config) -> dict[str, Any]:
        return {"override_config.pi05": not config.pi05}

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        for name, stats in self.config.norm_stats.items():
            if "proprio" in stats:
                path = Path(save_directory) / "assets" / name / "norm_stats.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                values = {"state": stats["proprio"], "actions": stats["action"]}
                write_text(path, json.dumps({"norm_stats": values}, indent=1))


def prefix_positions(mask: Tensor) -> Tensor:
    """Return positions ``[B, P]``, counting only present tokens."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def _state_dim(config: Pi0Config) -> int:
    """Return the width of the state that the expert reads, because the prefix does not include it; 0 if it does."""
    return 0 if config.pi05 else config.action_dim


def _heads(config: Pi0Config, value_head: bool) -> dict[str, nn.Module | None]:
    width, noise_head = config.expert["width"], None
    if config.noise_method == "flow_noise":
        std_range = config.noise_std_range or NEW_STD_RANGE
        noise_head = StdHead(width, config.noise_hidden_sizes, config.action_dim, std_range)
    return {
        "value_head": ValueHead(width, config.value_hidden_sizes, nn.ReLU, bias=True) if value_head else None,
        "noise_head": noise_head,
    }


class StdHead(nn.Module):
    """Predicts the std of a denoising step by a tanh MLP with bounded output (ReinFlow, Zhang et al. 2025).

    ``log var = low + (high - low) (tanh(mlp(h)) + 1) / 2``, with the log variances ``low`` and ``high`` of the bounds.
    """

    def __init__(self, width: int, hidden_sizes: Sequence[int], action_dim: int, std_range: Sequence[float]) -> None:
        super().__init__()
        sizes = [width, *hidden_sizes, action_dim]
        layers = []
        for index, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            parts = OrderedDict(linear_1=nn.Linear(fan_in, fan_out))
            if index < len(sizes) - 2:
                parts["act_1"] = nn.Tanh()
            layers.append(nn.Sequential(parts))
        self.mlp_logvar = nn.Module()
        self.mlp_logvar.moduleList = nn.ModuleList(layers)
        for name, bound in std_bounds(std_range).items():
            self.register_buffer(name, bound)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, H, W]`` to float32 stds ``[B, H, action_dim]``."""
        output = hidden_states.to(self.mlp_logvar.moduleList[0].linear_1.weight.dtype)
        with without_autocast(hidden_states):
            for layer in self.mlp_logvar.moduleList:
                output = layer(output)
        low, high = self.logvar_min.float(), self.logvar_max.float()
        return torch.exp(0.5 * (low + (high - low) * (torch.tanh(output.float()) + 1.0) / 2.0))


def std_bounds(std_range: Sequence[float]) -> dict[str, Tensor]:
    """Return the buffers of a ``StdHead``, i.e. the log variances of both bounds."""
    low, high = (torch.tensor([2.0 * math.log(bound)]) for bound in std_range)
    return {"logvar_min": low, "logvar_max": high}


LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EMBED_TOKENS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
# Maps prefixes of public names to ours; the remaining names are identical.
_PREFIXES = {
    "paligemma_with_expert.paligemma.model.vision_tower.vision_model.": "vision_tower.",
    "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.": "projector.",
    "paligemma_with_expert.paligemma.model.language_model.": "language_model.",
    "paligemma_with_expert.gemma_expert.model.": "expert.",
    "paligemma_with_expert.gemma_expert.lm_head.": "expert_lm_head.",
}


def from_public(state_dict: Mapping[str, Weight]) -> dict[str, Weight]:
    """Rename the tensors of an openpi or lerobot checkpoint, in which the token embedding is tied to ``lm_head``."""
    if all(name.startswith("model.") for name in state_dict):
        state_dict = {name.removeprefix("model."): tensor for name, tensor in state_dict.items()}
    tensors = dict(state_dict)
    head = tensors.pop(LM_HEAD, None)
    if head is not None:
        if EMBED_TOKENS in tensors and not torch.equal(in_memory(head), in_memory(tensors[EMBED_TOKENS])):
            raise CheckpointError(
                f"'{EMBED_TOKENS}' and '{LM_HEAD}' are tied in pi0, but differ here. "
                "Set model.model_path=<a different folder>"
            )
        tensors[EMBED_TOKENS] = head
    return {_renamed(name, _PREFIXES): tensor for name, tensor in tensors.items()}


def to_public(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``from_public``; the result has openpi's names (plus our heads)."""
    names = {ours: public for public, ours in _PREFIXES.items()}
    tensors = {_renamed(name, names): tensor for name, tensor in state_dict.items()}
    tensors[LM_HEAD] = tensors.pop(EMBED_TOKENS)
    return tensors


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
