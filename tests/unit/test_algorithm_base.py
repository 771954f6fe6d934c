"""What a run asks the class of an algorithm: counts, bytes, and which runs are rejected."""

from types import SimpleNamespace

import pytest

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import Algorithm, AnyAlgorithm, Updates
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError
from rlinf.preflight.validation import check_learning, check_old_logprobs
from rlinf.registry import Entry
from rlinf.training.rl_trainer import make_trainer


def test_an_algorithm_without_methods_trains_the_policy_and_counts_no_updates():
    assert not AnyAlgorithm.freezes_policy and not Algorithm.freezes_policy
    assert AnyAlgorithm.updates(None) == Updates(0, {})


def test_an_algorithm_needs_a_trainer(monkeypatch):
    monkeypatch.setitem(ALGORITHMS.entries(), "mine", Entry("mine", AnyAlgorithm, "user code"))
    parts = SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(name="mine")))
    with pytest.raises(ConfigError, match="algorithm.name=mine is AnyAlgorithm.*make_trainer.*set algorithm=ppo"):
        make_trainer(parts, None, None)


@pytest.mark.parametrize("num_envs, num_ranks, expected", [(6, 1, 180), (6, 2, 90), (5, 2, 70)])
def test_a_rank_holds_its_share_of_one_rollout(num_envs, num_ranks, expected):
    """Three calls of 10 bytes: 6 envs make 18 calls, 5 envs 15, of which a rank of two holds 7."""
    rollout, cluster = SimpleNamespace(num_envs=num_envs, num_chunks=3), SimpleNamespace(num_processes=num_ranks)
    assert AnyAlgorithm.buffer_bytes(SimpleNamespace(rollout=rollout, cluster=cluster), None, 10) == expected


def test_updates_by_hand():
    """96 calls of 8 envs make 3 minibatches of 32; a rank of two has 16 rows of each, in 4 passes of at most 5."""
    config = SimpleNamespace(
        rollout=SimpleNamespace(num_envs=8, num_chunks=12),
        trainer=SimpleNamespace(minibatch_size=32),
        cluster=SimpleNamespace(num_processes=2),
        algorithm=SimpleNamespace(update_epochs=5),
        model=SimpleNamespace(micro_batch_size=5),
    )
    table = {
        "minibatches": "3 of 32 x 5 epochs",
        "each of 2 ranks": "4 envs, 16 rows a minibatch in 4 micro-batches",
    }
    assert Algorithm.updates(config) == Updates(15, table)


@pytest.mark.parametrize(
    "words", [["model.value_head=false"], ["algorithm.old_logprobs=rollout", "algorithm.kl_coef=1"]]
)
def test_a_policy_gradient_is_checked(words):
    base = ["model=mlp", "env=tabletop", "env.cameras=[]", "cluster.device=cpu", "algorithm=ppo"]
    check_learning(build_config(compose_config(base)), None)
    with pytest.raises(ConfigError, match=words[-1].split("=")[0]):
        check_learning(build_config(compose_config([*base, *words])), None)


class Critic(Algorithm):
    needs_values = True


class Policy:
    """A policy whose rollouts have values if its configuration says so."""

    @classmethod
    def values_in_rollouts(cls, own):
        return own["values"]


GOOD, BAD = (Policy, {"values": True}), (Policy, {"values": False})


@pytest.mark.parametrize(
    "algorithm, policy, changes, rejected",
    [
        (Critic, GOOD, {}, None),
        (Critic, None, {}, None),
        (Critic, BAD, {}, "algorithm.name=mine and Policy as configured.*or algorithm=grpo"),
        (Critic, GOOD, {"backend": "vllm"}, "algorithm.name=mine and rollout.backend=vllm.*or algorithm=grpo"),
        (Critic, BAD, {"old_logprobs": "trainer"}, None),
        (Algorithm, BAD, {"backend": "vllm"}, None),
        (
            Algorithm,
            None,
            {"ahead": 1},
            "cluster.max_staleness=1;.*Set cluster.max_staleness=0, or algorithm.old_logprobs=trainer",
        ),
        (Algorithm, None, {"tis_cap": 2.0}, "algorithm.tis_cap=2.0;.*Set algorithm.tis_cap=null, or"),
        (Algorithm, None, {"kl_coef": 0.1}, "algorithm.kl_coef=0.1;.*Set algorithm.kl_coef=0, or"),
        (Algorithm, None, {"ahead": 1, "old_logprobs": "trainer"}, None),
    ],
)
def test_log_probabilities_of_the_rollout_are_refused_where_they_cannot_stand_for_the_trainers(
    algorithm, policy, changes, rejected
):
    given = {"old_logprobs": "rollout", "ahead": 0, "tis_cap": None, "kl_coef": 0.0, "backend": "torch"} | changes
    config = SimpleNamespace(
        algorithm=SimpleNamespace(name="mine", **{key: given[key] for key in ("old_logprobs", "tis_cap", "kl_coef")}),
        cluster=SimpleNamespace(max_staleness=given["ahead"]),
        rollout=SimpleNamespace(backend=given["backend"]),
    )
    if rejected is None:
        check_old_logprobs(config, algorithm, policy)
        return
    with pytest.raises(ConfigError, match=f"algorithm.old_logprobs=rollout with {rejected}"):
        check_old_logprobs(config, algorithm, policy)
