"""Loading a checkpoint straight into shards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from rlinf.distributed.fsdp import shard
from rlinf.distributed.process_group import rank
from rlinf.models.hf_model import HFModel, load_config


def load_sharded(
    path: str | Path,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> HFModel:
    """Load a checkpoint over all ranks (a collective call): rank 0 holds it once, every rank its shards.

    Args:
        path: As in ``HFModel.from_pretrained``.
        device: ``cpu`` or ``cuda``.
        dtype: Number format of the weights.
        attn_implementation: Attention kernel.
        trust_remote_code: Run the Python code of the folder.
    """
    arguments = {"dtype": dtype, "attn_implementation": attn_implementation}
    full = {}
    if rank() == 0:
        whole = HFModel.from_pretrained(path, trust_remote_code=trust_remote_code, **arguments)
        full = whole.state_dict()
    config = load_config(path, trust_remote_code)
    model = HFModel.from_config(config, meta=True, **arguments)
    shard(model, device)
    model.materialize(device)
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model
