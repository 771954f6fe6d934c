"""Additional data for an off-policy run: demonstrations, and the replay buffer of an earlier run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.algorithms.offpolicy_config import OffPolicyConfig
from rlinf.checkpoints.folders import policy_folder
from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.process_group import rank
from rlinf.errors import CheckpointError
from rlinf.manifest import POLICY_FIELDS, Manifest, compare
from rlinf.models.embodiment.actor_policy import ActorPolicy, actor_settings
from rlinf.offpolicy.base_outputs import DatasetOutputs, query_dataset
from rlinf.offpolicy.demonstrations import OfflineData, offline_data
from rlinf.offpolicy.replay import Batch, ReplayBuffer
from rlinf.options import override_text
from rlinf.preflight.conditions import build_manifest
from rlinf.run_folder import ACTOR_WEIGHTS, TRAINER_FOLDER
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import TrainerContext


class Offline:
    """Demonstrations from which a fraction of each batch is sampled.

    Args:
        policy: Computes features and chunks on rank 0, unless they are cached.

    Attributes:
        num_queries: Number of base-policy queries for demonstrations in the entire run.
    """

    def __init__(
        self,
        parts: TrainerContext,
        dataset: StoredDemonstrations,
        policy: ActorPolicy,
        autocast: Callable[[], AbstractContextManager],
    ) -> None:
        config, self.config = parts.config, cast(OffPolicyConfig, parts.config.algorithm)
        manifest = build_manifest(config, policy, policy_version=0)
        seed = derive_seed(config.seed, "offline replay")

        def query(rows: np.ndarray) -> DatasetOutputs:
            def on_rank_0() -> DatasetOutputs | None:
                if rank() > 0:
                    return None
                return query_dataset(
                    dataset,
                    rows,
                    policy,
                    conditions={name: getattr(manifest, name) for name in POLICY_FIELDS},
                    batch_size=config.rollout.num_envs,
                    autocast=autocast,
                    seed=seed,
                    progress=lambda done, total: parts.loop.progress.update("demonstrations", done, total),
                )

            # The remaining ranks wait; after a signal, StopRequested is raised on all ranks.
            return parts.loop.stop_signal.together(on_rank_0)[0]

        self.data: OfflineData = offline_data(dataset, policy, config.env, self.config.offline_episodes, seed, query)
        self.num_queries = self.data.num_queries

    def join(self, online: Batch) -> Batch:
        """Append ``algorithm.num_offline_rows`` transitions from the demonstrations."""
        config = self.config
        return Batch.concatenate(
            [online, self.data.replay.sample(config.num_offline_rows, config.gamma, config.n_step)]
        )

    def metrics(self) -> dict[str, float]:
        """Return the demonstrations' success rate and the number of queries."""
        return {
            "rollout/success_rate_offline": self.data.success_rate,
            "rollout/base_policy_queries_offline": self.num_queries,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return generator and counter, with a digest instead of the demonstrations themselves."""
        return {
            "generator": self.data.replay.generator.get_state(),
            "digest": torch.tensor(list(bytes.fromhex(self.data.digest)), dtype=torch.uint8),
            "num_queries": torch.tensor(self.num_queries),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Restore the ``state_dict`` from ``folder``; raise CheckpointError if its demonstrations differ."""
        if not state or bytes(state["digest"].tolist()).hex() != self.data.digest:
            dataset = f"algorithm.offline_dataset={override_text(self.config.offline_dataset)}"
            raise CheckpointError(
                f"{folder} was not trained with the demonstrations of {dataset} under algorithm.offline_episodes="
                f"{self.config.offline_episodes}. Set both as in its config.yaml, or start a new run with its policy: "
                f"init_from={folder} resume=null output_dir=<a new folder>"
            )
        self.data.replay.generator.set_state(state["generator"])
        self.num_queries = int(state["num_queries"])


def take_over_replay(
    folder: Path, replay: ReplayBuffer, policy: ActorPolicy, manifest: Manifest, prefix: str, more: Sequence[str]
) -> dict[str, Tensor]:
    """Fill an empty buffer from an earlier run's replay buffer.

    Raise CheckpointError if the earlier run's base policy or conditions differ.

    Args:
        policy: Policy whose base must match the earlier run's.
        manifest: Conditions that must match the earlier run's.
        more: Names of additional checkpoint tensors to return.
    """
    settings = actor_settings(policy_folder(folder))
    if settings.get("base_sha256") != policy.base_sha256:
        raise CheckpointError(
            f"The replay buffer of {folder} is from a different frozen policy: its weights have the digest "
            f"{str(settings.get('base_sha256'))[:12]}, but this run's weights have {str(policy.base_sha256)[:12]}. "
            f"Set init_from={folder} to start with its policy, or algorithm.replay_from=null"
        )
    mismatches = compare(Manifest.load(folder), manifest)
    differences = [str(mismatch) for mismatch in mismatches if mismatch.field.partition(".")[0] in POLICY_FIELDS]
    if differences:
        raise CheckpointError(
            f"The frozen policy's outputs in the replay buffer of {folder} are from different conditions: {'; '.join(differences)}. "
            "Restore them, or set algorithm.replay_from=null"
        )
    bounds = load_file(policy_folder(folder) / ACTOR_WEIGHTS)
    for name in ("action_low", "action_high"):
        if not torch.equal(bounds[name], getattr(policy, name).cpu()):
            raise CheckpointError(
                f"The replay buffer of {folder} contains actions with {name}={bounds[name].tolist()}, but this run's env has "
                f"{getattr(policy, name).tolist()}. Set algorithm.replay_from=null"
            )
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in read_entries(folder / TRAINER_FOLDER).items()
        if name.startswith(prefix) or name in more
    }
    read_tensors(folder / TRAINER_FOLDER, tensors)
    replay.take_over({name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)})
    return {name: tensors[name] for name in more}
