"""RolloutWorkers of token policies: processes that Ray places, each with a copy of the policy that answers prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlinf.cluster.policy_replica import PolicyReplica
from rlinf.cluster.reservation import Reservation
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.distributed.deadlines import deadline, heartbeat
from rlinf.distributed.process_group import given_num_threads, rank, receive_object, send_object
from rlinf.engines.weight_handle import WeightBuckets
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.causal_lm import padding_token
from rlinf.llm.generation_interface import GenerationOutputSpec
from rlinf.llm.hf_generation import SamplingConfig, generate_tokens
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.vllm_generation import VllmGeneration
from rlinf.memory import num_cores
from rlinf.models.end_tokens import end_tokens
from rlinf.models.merged_weights import MergedWeights
from rlinf.preflight.placement import Node, Placement
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.plan import Plan, without_rollout_workers
from rlinf.rollout.policy_skeleton import PolicySkeleton


@dataclass(frozen=True)
class RolloutWorkerSettings:
    """What a rollout worker of a token policy needs to know.

    Attributes:
        sampling: How tokens are chosen, with the tokens that end an answer.
        engine: ``VllmConfig`` of the engine that generates; None: the copy of the policy does.
        num_threads: CPU threads of a rank (``given_num_threads``).
    """

    device: str
    sampling: SamplingConfig
    engine: Mapping[str, Any] | None
    num_threads: int | None


@dataclass(frozen=True)
class RolloutWorkerPlaces:
    """Which rollout workers a run has, and their places in a Ray cluster. Every rank gets it."""

    placement: Placement
    reservation: Reservation


def place_rollout_workers(
    config: RecipeConfig, plan: Plan, device: str, nodes: Sequence[Node] | None = None
) -> Placement:
    """Return the placement of a recipe with rollout workers. Raise ConfigError if the machines have no room for the rollout workers.

    Args:
        nodes: The machines of the cluster; None: they are not known yet.
    """
    gpus = plan.gpus_per_rollout_worker if device == "cuda" else 0
    placement = Placement(plan.policy_gpus, plan.workers, 0, gpus)
    if nodes is not None:
        placement.check_nodes(nodes, without_rollout_workers(config), "policy.device=cpu")
    return placement


class TokenRolloutWorker(PolicyReplica):
    """A copy of a token policy that answers prompts.

    An answer depends on the weights, the prompt, its seed, and by rounding on the other rows of its batch; so any rollout worker may generate
    any batch.

    Args:
        number: Of this rollout worker, over all machines.
        num_neighbours: RolloutWorkers on this machine, this one included; they share its cores.
    """

    def __init__(
        self,
        settings: RolloutWorkerSettings,
        shell: PolicySkeleton,
        placement: Placement,
        number: int,
        num_neighbours: int,
    ) -> None:
        torch.set_num_threads(placement.torch_threads(settings.num_threads, num_cores() // num_neighbours))
        super().__init__(shell, "cpu" if settings.engine is not None else settings.device)
        self.sampling = settings.sampling
        self.engine: VllmGeneration | None = None
        self._buckets = WeightBuckets()
        if settings.engine is not None:
            self.engine = VllmGeneration(None, settings.engine)
            self.engine.prepare_for_generation()  # its faults show before the first push

    def commit(self) -> int:
        """End a push, into the engine too; return the version that is held now."""
        version = super().commit()
        if self.engine is not None:
            self.engine.update_weights(MergedWeights(self.model, version, self._buckets))
        return version

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Return an answer to each prompt of a batch, sampled with its ``sampling_seeds``, or greedily."""
        self._held()
        if self.engine is not None:
            output = self.engine.generate(data, greedy)
        else:
            output = generate_tokens(self.model, data, self.sampling, greedy, torch.Generator())
        # Not what came with the prompts, such as images: the rank has it.
        return BatchedDataDict({key: output[key] for key in GenerationOutputSpec.__annotations__ if key in output})

    def close(self) -> None:
        """Stop the engine."""
        if self.engine is not None:
            self.engine.shutdown()


class RemoteGenerator:
    """RolloutWorkers generate, with the trained weights (a ``Generator``)."""

    def __init__(self, policy: HuggingFacePolicy, workers: RolloutWorkers) -> None:
        self.policy, self.workers = policy, workers

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Push the present weights, unless the rollout workers hold them (a collective call)."""
        with deadline("push"):
            self.workers.update_weights(self.policy.num_steps)
        yield

    def generate(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        """See ``Generator.generate``; a collective call of ranks that share a rollout worker, whose first one asks it for all."""
        placement = self.workers.placement
        if not placement.is_shared:
            return self._in_order(batches, greedy)
        sharers = placement.num_ranks // placement.num_rollout_workers
        first = rank() // sharers * sharers
        if rank() != first:
            return iter(_answers_from(first, batches))
        return iter(self._answer_all(batches, range(first + 1, first + sharers), greedy))

    def close(self) -> None:
        """End the rollout workers."""
        self.workers.close()

    def _answer_all(self, batches: Sequence[BatchedDataDict], others: range, greedy: bool) -> list[BatchedDataDict]:
        """Have the rollout worker answer the batches of this rank and of ``others``; return this rank's answers.

        Each answer goes to its rank at once. The others get None for it, so that they, too, know that the rollout worker answers.
        """
        asked = {rank(): list(batches)} | {other: receive_object(other) for other in others}
        whose = [each for each, some in asked.items() for _ in some]
        for other in others:
            send_object(len(whose), other)
        own = []
        answers = self._in_order([batch for some in asked.values() for batch in some], greedy)
        for each, answer in zip(whose, answers, strict=True):
            for other in others:
                send_object(answer if other == each else None, other)
            if each == rank():
                own.append(answer)
        return own

    def _in_order(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        deadline = "evaluate" if greedy else "rollout"
        answers = self.workers.shared_out(deadline, "generate", [(batch, greedy) for batch in batches])

        def in_order() -> Iterator[BatchedDataDict]:
            early: dict[int, BatchedDataDict] = {}
            for place in range(len(batches)):
                while place not in early:
                    number, answer = next(answers)
                    early[number] = answer
                yield early.pop(place)

        return in_order()


def _answers_from(owner: int, batches: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Return the answers of the rollout worker of another rank."""
    send_object(list(batches), owner)
    own = []
    for _ in range(receive_object(owner)):
        answer = receive_object(owner)
        heartbeat()
        if answer is not None:
            own.append(answer)
    return own


def make_generator(
    config: RecipeConfig,
    policy: HuggingFacePolicy,
    tokenizer: Any,
    engine: Mapping[str, Any] | None,
    places: RolloutWorkerPlaces,
) -> RemoteGenerator:
    """Start the rollout workers of this rank, and wait until they are built.

    Args:
        tokenizer: Names the end token where the model does not.
        engine: ``VllmConfig`` of the engines; None: rollout workers generate in torch.
        places: Where rollout workers may be.
    """
    ends = end_tokens(policy.model, tokenizer, None)
    sampling = SamplingConfig(
        max_new_tokens=config.rollout.max_response_length,
        temperature=policy.temperature,
        max_model_len=policy.config.max_model_len,
        eos_token_id=ends,
        pad_token_id=padding_token(policy.model, tokenizer, None, ends),
    )
    settings = RolloutWorkerSettings(
        "cuda" if places.placement.on_gpu else "cpu", sampling, engine, given_num_threads(config.cluster.num_threads)
    )
    # A rank that shares the rollout worker of another starts none.
    shell = (
        PolicySkeleton.of(policy.unloaded_model())
        if places.placement.rollout_workers_of(rank())
        else PolicySkeleton(b"")
    )
    make = partial(TokenRolloutWorker, settings, shell, places.placement)
    workers = RolloutWorkers(make, config.cluster, places.placement, places.reservation, policy.model, way_on(config))
    with deadline("start"):
        workers.wait_until_ready()
    return RemoteGenerator(policy, workers)


def way_on(config: RecipeConfig) -> str:
    """Return how a user continues after rollout workers were lost."""
    if not config.train.ckpt.enable_checkpoint:
        return "run the same command again (nothing was saved: train.ckpt.enable_checkpoint=false)"
    return "run the same command with train.resume=true"
