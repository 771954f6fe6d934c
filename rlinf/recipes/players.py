"""Players of token policies: processes that Ray places, each with a copy of the policy that answers prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlinf.cluster.players import Players
from rlinf.cluster.policy_copy import PolicyCopy
from rlinf.cluster.reservation import Reservation
from rlinf.distributed.deadlines import go_on, waiting
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
from rlinf.recipes.plan import Plan, without_players
from rlinf.rollout.policy_shell import PolicyShell


@dataclass(frozen=True)
class PlayerSettings:
    """What a player of a token policy needs to know.

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
class PlayerPlaces:
    """Which players a run has, and their places in a Ray cluster. Every rank gets it."""

    placement: Placement
    reservation: Reservation


def place_players(config: RecipeConfig, plan: Plan, device: str, nodes: Sequence[Node] | None = None) -> Placement:
    """Return the placement of a recipe with players. Raise ConfigError if the machines have no room for the players.

    Args:
        nodes: The machines of the cluster; None: they are not known yet.
    """
    gpus = plan.gpus_per_player if device == "cuda" else 0
    placement = Placement(plan.policy_gpus, plan.players, 0, gpus)
    if nodes is not None:
        placement.check_nodes(nodes, without_players(config), "policy.device=cpu")
    return placement


class TokenPlayer(PolicyCopy):
    """A copy of a token policy that answers prompts.

    An answer depends on the weights, the prompt, its seed, and by rounding on the other rows of its batch; so any player may generate
    any batch.

    Args:
        number: Of this player, over all machines.
        num_neighbours: Players on this machine, this one included; they share its cores.
    """

    def __init__(
        self, settings: PlayerSettings, shell: PolicyShell, placement: Placement, number: int, num_neighbours: int
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
    """Players generate, with the trained weights (a ``Generator``)."""

    def __init__(self, policy: HuggingFacePolicy, players: Players) -> None:
        self.policy, self.players = policy, players

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Push the present weights, unless the players hold them (a collective call)."""
        with waiting("push"):
            self.players.update_weights(self.policy.num_steps)
        yield

    def generate(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        """See ``Generator.generate``; a collective call of ranks that share a player, whose first one asks it for all."""
        placement = self.players.placement
        if not placement.is_shared:
            return self._in_order(batches, greedy)
        sharers = placement.num_ranks // placement.num_players
        first = rank() // sharers * sharers
        if rank() != first:
            return iter(_answers_from(first, batches))
        return iter(self._answer_all(batches, range(first + 1, first + sharers), greedy))

    def close(self) -> None:
        """End the players."""
        self.players.close()

    def _answer_all(self, batches: Sequence[BatchedDataDict], others: range, greedy: bool) -> list[BatchedDataDict]:
        """Have the player answer the batches of this rank and of ``others``; return this rank's answers.

        Each answer goes to its rank at once. The others get None for it, so that they, too, know that the player answers.
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
        answers = self.players.shared_out(deadline, "generate", [(batch, greedy) for batch in batches])

        def in_order() -> Iterator[BatchedDataDict]:
            early: dict[int, BatchedDataDict] = {}
            for place in range(len(batches)):
                while place not in early:
                    number, answer = next(answers)
                    early[number] = answer
                yield early.pop(place)

        return in_order()


def _answers_from(owner: int, batches: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Return the answers of the player of another rank."""
    send_object(list(batches), owner)
    own = []
    for _ in range(receive_object(owner)):
        answer = receive_object(owner)
        go_on()
        if answer is not None:
            own.append(answer)
    return own


def make_generator(
    config: RecipeConfig,
    policy: HuggingFacePolicy,
    tokenizer: Any,
    engine: Mapping[str, Any] | None,
    places: PlayerPlaces,
) -> RemoteGenerator:
    """Start the players of this rank, and wait until they are built.

    Args:
        tokenizer: Names the end token where the model does not.
        engine: ``VllmConfig`` of the engines; None: players generate in torch.
        places: Where players may be.
    """
    ends = end_tokens(policy.model, tokenizer, None)
    sampling = SamplingConfig(
        max_new_tokens=config.rollout.max_response_length,
        temperature=policy.temperature,
        max_model_len=policy.config.max_model_len,
        eos_token_id=ends,
        pad_token_id=padding_token(policy.model, tokenizer, None, ends),
    )
    settings = PlayerSettings(
        "cuda" if places.placement.on_gpu else "cpu", sampling, engine, given_num_threads(config.cluster.num_threads)
    )
    # A rank that shares the player of another starts none.
    shell = PolicyShell.of(policy.unloaded_model()) if places.placement.players_of(rank()) else PolicyShell(b"")
    make = partial(TokenPlayer, settings, shell, places.placement)
    players = Players(make, config.cluster, places.placement, places.reservation, policy.model, way_on(config))
    with waiting("start"):
        players.wait_until_ready()
    return RemoteGenerator(policy, players)


def way_on(config: RecipeConfig) -> str:
    """Return how a user continues after players were lost."""
    if not config.train.ckpt.enable_checkpoint:
        return "run the same command again (nothing was saved: train.ckpt.enable_checkpoint=false)"
    return "run the same command with train.resume=true"
