"""Data of an off-policy run from before it: demonstrations in each batch, the replay buffer of an earlier run, and checks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.algorithms.offpolicy_config import ActorConfig, OffPolicyConfig
from rlinf.checkpoints.folders import (
    has_policy,
    is_checkpoint,
    policy_folder,
    read_loop_state,
    read_saved_config,
    resolve_checkpoint,
)
from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.config.schema import RunConfig
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.process_group import rank
from rlinf.envs import ENVS
from rlinf.errors import CheckpointError, reject
from rlinf.manifest import POLICY_FIELDS, Manifest, compare
from rlinf.models.actors.kinds import ACTORS
from rlinf.models.embodiment.actor_policy import ActorPolicy, actor_settings, has_actor
from rlinf.offpolicy.base_outputs import DatasetOutputs, query_dataset
from rlinf.offpolicy.demonstrations import OfflineData, offline_data
from rlinf.offpolicy.replay import Batch, ReplayBuffer
from rlinf.options import from_mapping, override_of, override_text, to_mapping
from rlinf.preflight.compatibility import check_dataset
from rlinf.preflight.conditions import build_manifest
from rlinf.run_folder import ACTOR_WEIGHTS, TRAINER_FOLDER
from rlinf.seeding import derive_seed
from rlinf.types import ClassAndConfig

if TYPE_CHECKING:
    from rlinf.training.action_trainer import TrainerContext  # a dry run imports this module for its checks

REWARD_SETTINGS = ("reward_mode", "success_bonus")
"""Env settings that affect rewards, but not episodes."""


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


def check_demonstrations(config: RunConfig, algorithm: OffPolicyConfig, policy: ClassAndConfig | None) -> None:
    """Check that demonstrations and their ratio are set together, and that the demonstrations contain rewards or successes."""
    folder, ratio, env = algorithm.offline_dataset, algorithm.offline_ratio, config.env
    if folder is None:
        if ratio > 0:
            fix = "algorithm.offline_dataset=<folder of demonstrations>, or algorithm.offline_ratio=0"
            reject(f"algorithm.offline_ratio={ratio:g} without algorithm.offline_dataset", "demonstrations", fix)
        return
    if not algorithm.num_offline_rows:
        problem = f"algorithm.offline_dataset={folder} with algorithm.offline_ratio={ratio:g} of algorithm.batch_size={algorithm.batch_size}"
        fix = "algorithm.offline_ratio=0.5, or algorithm.offline_dataset=null"
        reject(problem, "at least one transition per batch", fix)
    actor = ACTORS.get(algorithm.actor.name)
    if actor.sets_noise:
        problem = f"algorithm.offline_dataset={folder} with algorithm.actor.name={algorithm.actor.name}"
        required = "an actor whose outputs are the env's actions, not noise of the policy"
        reject(problem, required, "algorithm.actor.name=residual, or algorithm.offline_dataset=null")
    info = check_dataset(config, policy, folder, key="algorithm.offline_dataset")
    if algorithm.offline_episodes == "assume_success":
        if env.reward_mode != "sparse":
            problem = f"algorithm.offline_episodes=assume_success with env.reward_mode={env.reward_mode}"
            reject(problem, "a reward only for success", "env.reward_mode=sparse")
        return
    if not (info.has_rewards or info.reports_success_per_row):
        reject(
            f"{info.folder} has neither rewards nor successes",
            "rewards (next.reward, steps/reward) or successes (next.success)",
            "algorithm.offline_episodes=assume_success env.reward_mode=sparse if each of its episodes ends in success, or "
            "algorithm.offline_dataset=null",
        )
    if env.reward_mode != "sparse":
        recorded = {name: info.env.get(name, getattr(env, name)) for name in REWARD_SETTINGS}
        if not info.has_rewards or any(value != getattr(env, name) for name, value in recorded.items()):
            with_rewards = " ".join(f"env.{name}={override_text(value)}" for name, value in recorded.items())
            reject(
                f"env.reward_mode={env.reward_mode} env.success_bonus={env.success_bonus:g}, but {info.folder} "
                + (f"was collected with {with_rewards}" if info.has_rewards else "has no rewards"),
                "rewards of this env",
                "env.reward_mode=sparse, for which successes are enough"
                + (f", or {with_rewards}" if info.has_rewards else ""),
            )


def check_replay_from(config: RunConfig, algorithm: OffPolicyConfig) -> None:
    """Check that the run whose buffer is reused had the same frozen policy, policy settings and env."""
    resumed = None if config.resume is None else read_loop_state(resolve_checkpoint(config.resume))
    if algorithm.replay_from is None or (resumed is not None and resumed["step"] > 0):  # it has its own buffer
        return
    instead = "algorithm.replay_from=null"
    folder = resolve_checkpoint(algorithm.replay_from)
    if not (has_policy(folder) and has_actor(policy_folder(folder)) and is_checkpoint(folder)):
        problem = f"algorithm.replay_from={algorithm.replay_from} means {folder}, which has no replay buffer"
        reject(problem, "a checkpoint of an off-policy run", f"algorithm.replay_from=<other run>, or {instead}")
    if config.sft.max_steps > (0 if resumed is None else resumed["sft_step"]):
        problem = f"algorithm.replay_from={algorithm.replay_from} with sft.max_steps={config.sft.max_steps}, which changes the policy"
        new_run = "" if resumed is None else " resume=null output_dir=<a new folder>"
        fix = f"sft.max_steps=0 init_from={folder}{new_run}, or {instead}"
        reject(problem, "the frozen policy of that run", fix)
    saved, actor = read_saved_config(folder), actor_settings(policy_folder(folder))["actor"]
    free = set(ENVS.get(config.env.name).free_settings) - set(REWARD_SETTINGS)
    # A key that the run lacks is newer than the run, which behaved as the default does.
    there_env = to_mapping(type(config.env)()) | saved["env"]
    pairs = {
        f"env.{name}": (there_env[name], value) for name, value in to_mapping(config.env).items() if name not in free
    }
    for name in ("precision", "features", "action_chunks_len", "action_token_len"):
        pairs[f"model.{name}"] = (saved["model"].get(name), getattr(config.model, name))
    there, here = from_mapping(ActorConfig, actor, "actor"), algorithm.actor
    classes = ACTORS.get(there.name), ACTORS.get(here.name)
    if len({kind.num_candidates_for(actor) for kind, actor in zip(classes, (there, here), strict=True)}) > 1:
        pairs["algorithm.actor.num_candidates"] = (there.num_candidates, here.num_candidates)
        pairs["algorithm.actor.name"] = (there.name, here.name)
    if any(kind.sets_noise for kind in classes):
        pairs["algorithm.actor.name"] = (there.name, here.name)
    differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        was, now = (" ".join(override_of(key, pair[k]) for key, pair in differing.items()) for k in (0, 1))
        reject(
            f"The replay buffer of {folder} was filled with {was}, but this run has {now}",
            "equal settings",
            f"{was}, or {instead}",
        )
