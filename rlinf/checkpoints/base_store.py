"""Storage of an actor's frozen base policy once per run folder, so that checkpoints contain only the actor."""

import os
import shutil
from pathlib import Path

from rlinf.checkpoints.checkpoint import on_rank_zero, write_policy
from rlinf.checkpoints.folders import policy_folder
from rlinf.files import naming
from rlinf.models.base_weights import weights_digest
from rlinf.models.embodiment.actor_policy import ActorPolicy, actor_settings, base_store_folder


def store_base(policy: ActorPolicy, run: Path, resumed: Path | None) -> None:
    """Write the base policy of ``policy`` to the run folder, where the run's checkpoints refer to it (a collective call).

    Skip the write if the folder already contains the base policy used by ``resumed``, the checkpoint from which ``policy`` was
    loaded. Raise CheckpointError if the write fails.
    """

    def store() -> str:
        known = None if resumed is None else actor_settings(policy_folder(resumed)).get("base_store")
        if known is not None and base_store_folder(run, known).is_dir():
            return known
        partial = base_store_folder(run, ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with naming(partial):
                write_policy(
                    partial, policy.base, {name: tensor.cpu() for name, tensor in policy.base.state_dict().items()}
                )
            digest = weights_digest(str(partial))
            if not base_store_folder(run, digest).is_dir():
                os.rename(partial, base_store_folder(run, digest))
            return digest
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    policy.base_store = on_rank_zero(store, f"write the frozen policy into {run}")
