"""Rollouts small enough for a hand calculation."""

from dataclasses import replace

import torch

from rlinf.types import Observation, RolloutBatch


def rollout_batch(*shape: int, num_actions: int = 1, width: int = 1, **fields) -> RolloutBatch:
    """Return a rollout of zeros in which all actions were executed and all calls count; ``fields`` take the place of its own.

    Args:
        shape: Calls and envs, or rows where it is flattened.
        num_actions: Of a call.
        width: Tokens of an action.
    """
    zeros, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    tokens = torch.zeros(*shape, num_actions * width)
    own = {
        "observation": Observation({}, None, ["go"] * zeros.numel()), "action_tokens": tokens.long(), "rollout_logprobs": tokens,
        "action_rewards": torch.zeros(*shape, num_actions), "action_mask": torch.ones(*shape, num_actions, dtype=torch.bool),
        "loss_mask": torch.ones(shape, dtype=torch.bool), "terminated": zeros.bool(), "truncated": zeros.bool(),
        "bootstrap_values": zeros, "group_ids": ids, "episode_ids": ids.clone(), "policy_version": ids.clone(),
    }  # fmt: skip
    return RolloutBatch(**own | fields)


def select_envs(batch: RolloutBatch, columns: torch.Tensor) -> RolloutBatch:
    """Return the envs ``columns`` of a time-major rollout, with all ``episodes``."""
    rows = torch.arange(batch.loss_mask.numel()).view(batch.loss_mask.shape)[:, columns].flatten()
    tensors = {name: tensor[:, columns] for name, tensor in batch.tensors().items()}
    return replace(batch, observation=batch.observation.select(rows.numpy()), **tensors)
