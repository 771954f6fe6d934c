"""Rollout workers for token policies: processes placed by Ray, each generating completions with a replica of the policy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlinf.cluster.reservation import Reservation
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.distributed.deadlines import deadline, heartbeat
from rlinf.distributed.process_group import given_num_threads, rank
from rlinf.engines.weight_handle import WeightBuckets
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.causal_lm import padding_token
from rlinf.llm.end_tokens import end_tokens
from rlinf.llm.generation_interface import GenerationOutputSpec
from rlinf.llm.hf_generation import SamplingConfig, generate_tokens
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.vllm_generation import VllmGeneration
from rlinf.memory import num_cores
from rlinf.models.lora import MergedWeights
from rlinf.preflight.placement import Node, Placement
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.plan import Plan, without_rollout_workers
from rlinf.rollout.policy_skeleton import PolicyReplica, PolicySkeleton


@dataclass(frozen=True)
class RolloutWorkerSettings:
    """Settings for a token rollout worker.

    ``engine`` is a ``VllmConfig``, or None if the policy replica itself generates; ``num_threads`` is the number of CPU threads per rank.
    """

    device: str
    sampling: SamplingConfig
    engine: Mapping[str, Any] | None
    num_threads: int | None


@dataclass(frozen=True)
class RolloutWorkerPlaces:
    """Placement of a run's rollout workers in a Ray cluster, which is passed to every rank."""

    placement: Placement
    reservation: Reservation


def place_rollout_workers(
    config: RecipeConfig, plan: Plan, device: str, nodes: Sequence[Node] | None = None
) -> Placement:
    """Place a recipe's rollout workers. Raise ConfigError if they do not fit on ``nodes``, unless these are unknown (None)."""
    gpus = plan.gpus_per_rollout_worker if device == "cuda" else 0
    placement = Placement(plan.policy_gpus, plan.workers, 0, gpus)
    if nodes is not None:
        placement.check_nodes(nodes, without_rollout_workers(config), "policy.device=cpu")
    return placement


class TokenRolloutWorker(PolicyReplica):
    """Replica of a token policy that generates completions.

    A completion depends only on weights, prompt and seed (and, through rounding, on its batch), so any worker may generate any batch.
    ``num_neighbours`` is the number of rollout workers on this machine, including this one, which divide its cores.
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
            # Start the engine now, so that errors appear before the first push.
            self.engine.prepare_for_generation()

    def commit(self) -> int:
        """Complete a push, forward the weights to the engine, and return their version."""
        version = super().commit()
        if self.engine is not None:
            self.engine.update_weights(MergedWeights(self.model, version, self._buckets))
        return version

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Return one completion per prompt in a batch, sampled with its ``sampling_seeds`` or decoded greedily."""
        self._complete_version()
        if self.engine is not None:
            output = self.engine.generate(data, greedy)
        else:
            output = generate_tokens(self.model, data, self.sampling, greedy, torch.Generator())
        # Return only new tensors, because the rank still has the prompts and their images.
        return BatchedDataDict({key: output[key] for key in GenerationOutputSpec.__annotations__ if key in output})

    def close(self) -> None:
        """Stop the engine."""
        if self.engine is not None:
            self.engine.shutdown()


class RemoteGenerator:
    """``Generator`` that delegates to rollout workers and sends them the trained weights."""

    def __init__(self, policy: HuggingFacePolicy, workers: RolloutWorkers) -> None:
        self.policy, self.workers = policy, workers

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Push the current weights, unless the rollout workers already have them (a collective call)."""
        with deadline("push"):
            self.workers.update_weights(self.policy.num_steps)
        yield

    def generate(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        """See ``Generator.generate``. Ranks with the same rollout worker call it collectively, and the first rank sends all batches."""
        placement = self.workers.placement
        if not placement.is_shared:
            return self._in_order(batches, greedy)
        group_size = placement.num_ranks // placement.num_rollout_workers
        first = rank() // group_size * group_size
        if rank() != first:
            return iter(_generate_at(first, batches))
        return iter(self._generate_for_group(batches, range(first + 1, first + group_size), greedy))

    def close(self) -> None:
        """Stop the rollout workers."""
        self.workers.close()

    def _generate_for_group(
        self, batches: Sequence[BatchedDataDict], peers: range, greedy: bool
    ) -> list[BatchedDataDict]:
        """Generate for this rank and the ranks ``peers``, send each peer its outputs, and return this rank's outputs."""
        requests = {rank(): list(batches)} | {peer: _receive(peer) for peer in peers}
        owners = [owner for owner, owned in requests.items() for _ in owned]
        for peer in peers:
            _send(len(owners), peer)
        local = []
        outputs = self._in_order([batch for owned in requests.values() for batch in owned], greedy)
        for owner, output in zip(owners, outputs, strict=True):
            # Send None to the remaining peers as a sign of progress, which restarts their deadlines.
            for peer in peers:
                _send(output if peer == owner else None, peer)
            if owner == rank():
                local.append(output)
        return local

    def _in_order(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        deadline = "evaluate" if greedy else "rollout"
        outputs = self.workers.distribute(deadline, "generate", [(batch, greedy) for batch in batches])

        def in_order() -> Iterator[BatchedDataDict]:
            # Workers finish in any order, so buffer outputs that arrive early.
            early: dict[int, BatchedDataDict] = {}
            for index in range(len(batches)):
                while index not in early:
                    number, output = next(outputs)
                    early[number] = output
                yield early.pop(index)

        return in_order()


def _generate_at(first: int, batches: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Generate with the rollout worker that belongs to the rank ``first``."""
    _send(list(batches), first)
    outputs = []
    for _ in range(_receive(first)):
        output = _receive(first)
        heartbeat()
        if output is not None:
            outputs.append(output)
    return outputs


def _send(value: Any, to: int) -> None:
    """Send a value to a rank, which must call ``_receive``."""
    dist.send_object_list([value], to)


def _receive(source: int) -> Any:
    """Wait for the next value from rank ``source`` and return it."""
    values = [None]
    dist.recv_object_list(values, source)
    return values[0]


def make_generator(
    config: RecipeConfig,
    policy: HuggingFacePolicy,
    tokenizer: Any,
    engine: Mapping[str, Any] | None,
    places: RolloutWorkerPlaces,
) -> RemoteGenerator:
    """Start this rank's rollout workers, and wait until they are ready.

    ``tokenizer`` supplies end tokens that the model lacks; ``engine`` is a ``VllmConfig``, or None to generate in torch.
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
    # Ranks that use a different rank's rollout worker start none themselves.
    shell = (
        PolicySkeleton.of(policy.unloaded_model())
        if places.placement.rollout_workers_of(rank())
        else PolicySkeleton(b"")
    )
    resume_hint = "run the same command with train.resume=true"
    if not config.train.ckpt.enable_checkpoint:
        resume_hint = "run the same command again (nothing was saved: train.ckpt.enable_checkpoint=false)"
    make = partial(TokenRolloutWorker, settings, shell, places.placement)
    workers = RolloutWorkers(make, config.cluster, places.placement, places.reservation, policy.model, resume_hint)
    with deadline("start"):
        workers.wait_until_ready()
    return RemoteGenerator(policy, workers)
