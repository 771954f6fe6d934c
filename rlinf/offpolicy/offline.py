"""What an actor learns from besides the run's own episodes: demonstrations, and the replay buffer of another run."""

from __future__ import annotations

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
from rlinf.offpolicy.demonstrations import OfflineData, offline_data
from rlinf.offpolicy.proposals import Answers, answers_about
from rlinf.offpolicy.replay import Batch, ReplayBuffer
from rlinf.options import override_text
from rlinf.preflight.conditions import build_manifest
from rlinf.run_folder import ACTOR_WEIGHTS, TRAINER_FOLDER
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import TrainerContext


class Offline:
    """Demonstrations of which a fraction of each batch is drawn. Raises StopRequested if a signal comes while the policy is asked.

    Args:
        dataset: The demonstrations, opened with what came of their actions.
        policy: Says features and chunks of them, on rank 0, unless it has said so in an earlier run.
        autocast: Makes the context in which the frozen policy computes.

    Attributes:
        num_calls: Observations of them about which the frozen policy was asked, in the whole run.
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

        def ask(rows: np.ndarray) -> Answers:
            def of_rank_0() -> Answers | None:
                if rank() > 0:
                    return None
                return answers_about(
                    dataset,
                    rows,
                    policy,
                    conditions={name: getattr(manifest, name) for name in POLICY_FIELDS},
                    batch_size=config.rollout.num_envs,
                    autocast=autocast,
                    seed=seed,
                    progress=lambda done, total: parts.loop.progress.update("demonstrations", done, total),
                )

            return parts.loop.stop_signal.together(of_rank_0)[0]

        self.data: OfflineData = offline_data(dataset, policy, config.env, self.config.offline_episodes, seed, ask)
        self.num_calls = self.data.num_asked

    def join(self, online: Batch) -> Batch:
        """Append drawn transitions, ``algorithm.num_offline_rows``."""
        config = self.config
        return Batch.concatenate(
            [online, self.data.replay.sample(config.num_offline_rows, config.gamma, config.n_step)]
        )

    def metrics(self) -> dict[str, float]:
        """Return the success rate of the demonstrations, and what they cost."""
        return {
            "rollout/success_rate_offline": self.data.success_rate,
            "rollout/base_policy_queries_offline": self.num_calls,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: not the demonstrations, which stay where they are, but what they are."""
        return {
            "generator": self.data.replay.generator.get_state(),
            "digest": torch.tensor(list(bytes.fromhex(self.data.digest)), dtype=torch.uint8),
            "num_calls": torch.tensor(self.num_calls),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Restore what ``state_dict`` returned, which ``folder`` holds. Raise CheckpointError if it is of other demonstrations."""
        if not state or bytes(state["digest"].tolist()).hex() != self.data.digest:
            found = f"algorithm.offline_dataset={override_text(self.config.offline_dataset)}"
            raise CheckpointError(
                f"{folder} was not made with the demonstrations of {found} under algorithm.offline_episodes="
                f"{self.config.offline_episodes}. Set both as in its config.yaml, or start a new run with its policy: "
                f"init_from={folder} resume=null output_dir=<a new folder>"
            )
        self.data.replay.generator.set_state(state["generator"])
        self.num_calls = int(state["num_calls"])


def take_over_replay(
    folder: Path, replay: ReplayBuffer, policy: ActorPolicy, manifest: Manifest, prefix: str, more: Sequence[str]
) -> dict[str, Tensor]:
    """Fill an empty buffer with another run's.

    Raise CheckpointError if it was filled by another frozen policy, or under other conditions.

    Args:
        folder: Checkpoint of the other run.
        policy: Says which frozen policy the buffer must be of.
        manifest: Says under which conditions the buffer must have asked it.
        prefix: Of the names of the buffer's tensors.
        more: Names of other tensors of the checkpoint, which are returned.
    """
    settings = actor_settings(policy_folder(folder))
    if settings.get("base_sha256") != policy.base_sha256:
        raise CheckpointError(
            f"The replay buffer of {folder} holds what another frozen policy said: the weights there have the digest "
            f"{str(settings.get('base_sha256'))[:12]}, and the weights of this run {str(policy.base_sha256)[:12]}. "
            f"Set init_from={folder} to start with its policy, or algorithm.replay_from=null"
        )
    others = [
        str(each) for each in compare(Manifest.load(folder), manifest) if each.field.partition(".")[0] in POLICY_FIELDS
    ]
    if others:
        raise CheckpointError(
            f"The replay buffer of {folder} holds what the frozen policy said under other conditions: {'; '.join(others)}. "
            "Restore them, or set algorithm.replay_from=null"
        )
    bounds = load_file(policy_folder(folder) / ACTOR_WEIGHTS)
    for name in ("action_low", "action_high"):
        if not torch.equal(bounds[name], getattr(policy, name).cpu()):
            raise CheckpointError(
                f"The replay buffer of {folder} holds actions with {name}={bounds[name].tolist()}, and the env of this run has "
                f"{getattr(policy, name).tolist()}. Set algorithm.replay_from=null"
            )
    held = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in read_entries(folder / TRAINER_FOLDER).items()
        if name.startswith(prefix) or name in more
    }
    read_tensors(folder / TRAINER_FOLDER, held)
    replay.take_over({name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)})
    return {name: held[name] for name in more}
