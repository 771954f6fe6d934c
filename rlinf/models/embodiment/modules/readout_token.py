"""Modules that behaviour cloning trains on the states of images and prompt, for features of a frozen policy."""

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlinf.models.precision import without_autocast

TOKEN_WIDTH = 256
KEYFRAME_SCALE = 0.25  # sums of tens of actions would outweigh the cloning loss
NAME, READOUT_FILE = "readout_token", "readout_token.safetensors"
"""Attribute name in policies, prefix of the weight names, and name of a separate file if a policy's own cannot store them."""


class ReadoutToken(nn.Module):
    """Encode the states of images and prompt into one token, from which a decoder reconstructs each of them (RLT, 2604.23073).

    The encoder is a small transformer over the states and a learned token. The decoder reads the token and a position.
    (RLT's decoder also reads earlier states, from which the next state is easy to guess without the token.)
    """

    num_actions = 0

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(TOKEN_WIDTH))
        self.read = nn.Linear(hidden_size, TOKEN_WIDTH)
        layer = nn.TransformerEncoderLayer(
            TOKEN_WIDTH, 4, 2 * TOKEN_WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(TOKEN_WIDTH), enable_nested_tensor=False)
        width = 2 * TOKEN_WIDTH
        self.decoder = nn.Sequential(nn.Linear(TOKEN_WIDTH, width), nn.GELU(), nn.Linear(width, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights with torch's defaults, and the token with std 1."""
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module._reset_parameters()
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.normal_(self.token)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return the token, float32 ``[B, TOKEN_WIDTH]``, for ``states [B, P, H]``; ``mask`` is bool, false on padding."""
        with without_autocast(states):
            standard, positions = self._inputs(states, mask)
            token = self.token.expand(len(states), 1, -1)
            sequence = torch.cat([token, self.read(standard) + positions], dim=1)
            ignored = None if mask is None else nn.functional.pad(~mask, (1, 0), value=False)
            return self.encoder(sequence, src_key_padding_mask=ignored)[:, 0]

    def loss(self, states: Tensor, mask: Tensor | None, *_: object) -> Tensor:
        """Return the mean squared error ``[B]`` of the reconstructed states, each scaled to mean 0 and std 1."""
        states = states.detach()
        with without_autocast(states):
            standard, positions = self._inputs(states, mask)
            decoded = self.decoder(self(states, mask).unsqueeze(1) + positions)
            errors = (decoded - standard).square().mean(-1)
            if mask is None:
                return errors.mean(1)
            return (errors * mask).sum(1) / mask.sum(1)

    def _inputs(self, states: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return standardised states ``[B, P, H]``, and position codes ``[B or 1, P, width]`` that skip padding."""
        standard = nn.functional.layer_norm(states.float(), states.shape[-1:])
        numbers = torch.arange(states.shape[1], device=states.device)[None] if mask is None else mask.cumsum(1) - 1
        halves = torch.arange(TOKEN_WIDTH // 2, device=states.device)
        scales = torch.exp(halves * (-math.log(10_000.0) * 2 / TOKEN_WIDTH))
        angles = numbers[..., None].float() * scales
        return standard, torch.cat([angles.sin(), angles.cos()], dim=-1)


class KeyframeReadout(nn.Module):
    """Predict, from the mean state, the sum of the actions until the gripper next opens or closes, a keyframe (2105.14829).

    A centimetre in an object's position hardly changes the next actions until the hand is near. It always changes this sum,
    and with it the features, because the loss also trains the policy.

    Args:
        hidden_size: Width of the states.
        action_dim: Width of an action; the last dimension commands the gripper.
        state_dim: Width of the robot's state for policies whose prefix does not include it.
    """

    num_actions = 64
    """Actions per row that the loss reads; rows with a later keyframe have the loss 0."""

    def __init__(self, hidden_size: int, action_dim: int, state_dim: int = 0) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size + state_dim, action_dim - 1)

    def reset_parameters(self) -> None:
        """Initialise the weights with torch's defaults."""
        self.head.reset_parameters()

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mean float32 ``[B, H]`` of ``states [B, P, H]`` over positions where ``mask`` is true."""
        return masked_mean(states, mask)

    def loss(self, states: Tensor, mask: Tensor | None, actions: Tensor, state: Tensor | None = None) -> Tensor:
        """Return the mean Huber loss ``[B]`` for ``actions [B, num_actions, D]``, normalised to a zero action of 0."""
        with without_autocast(states):
            mean = self(states, mask)
            predicted = self.head(mean if state is None else torch.cat([mean, state.float()], 1))
            is_closing = actions[..., -1] > 0
            is_before = (is_closing == is_closing[:, :1]).cumprod(1)
            target = KEYFRAME_SCALE * (actions[..., :-1] * is_before.unsqueeze(-1)).sum(1)
            losses = nn.functional.smooth_l1_loss(predicted, target.float(), reduction="none").mean(1)
            return losses * ~is_before.all(1)


def make_readout(features: str, hidden_size: int, action_dim: int, state_dim: int = 0) -> nn.Module | None:
    """Return the module that ``model.features`` needs; see ``KeyframeReadout`` for the other arguments."""
    if features == "keyframe":
        return KeyframeReadout(hidden_size, action_dim, state_dim)
    return ReadoutToken(hidden_size) if features == "token" else None


def masked_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean float32 ``[B, H]`` of ``states [B, P, H]`` over positions where ``mask`` is true (None means all)."""
    if mask is None:
        return states.float().mean(1)
    weights = mask.float().unsqueeze(-1)
    return (states.float() * weights).sum(1) / weights.sum(1)


def holds_readout_token(folder: str | Path) -> bool:
    """Return whether the folder of a policy or its adapters contains the weights of a ``ReadoutToken``."""
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if file.name == READOUT_FILE or any(name.startswith(f"{NAME}.") for name in opened.keys()):
                return True
    return False
