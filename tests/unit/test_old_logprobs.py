"""``algorithm.old_logprobs=rollout``: the numbers of the rollout instead of a scoring pass, while a sample agrees."""

from __future__ import annotations

import pytest
import torch
from run_results import run_config

from rlinf.commands.train import build
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError, ParityError
from rlinf.preflight.validation import validate
from rlinf.rollout.parity import ParityGate
from tests.unit.test_rl_trainer import Counted

NUM_ENVS, NUM_CHUNKS = 8, 12
SMALL = [
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=6",
    f"rollout.num_envs={NUM_ENVS}", f"rollout.num_chunks={NUM_CHUNKS}", "trainer.minibatch_size=32",
    "model.micro_batch_size=5", "model.val_micro_batch_size=7", "evaluation.probe=false", "tracking.tensorboard=false",
    "tracking.progress=false", "cluster.num_threads=1", "trainer.learning_rate=1e-4", "trainer.value_learning_rate=1e-4",
]  # fmt: skip
ALGORITHMS = {
    "ppo": ["algorithm=ppo", "algorithm.critic_warmup_steps=0", "algorithm.update_epochs=2"],
    "grpo": ["algorithm=grpo", "rollout.group_size=2", "rollout.auto_reset=false", "algorithm.update_epochs=2"],
}


def make(folder, algorithm, old_logprobs):
    run = build(run_config(folder, *SMALL, *ALGORITHMS[algorithm], f"algorithm.old_logprobs={old_logprobs}"))
    run.rl.sync.push(0)
    return run, Counted(run.rl.worker.model)


def shift(trainer, **shifts):
    """Add numbers to fields of rollouts, in all calls of one env in four."""
    collect = trainer.collector.collect

    def shifted(*arguments):
        batch = collect(*arguments)
        for name, by in shifts.items():
            getattr(batch, name)[:, ::4] += by
        return batch

    trainer.collector.collect = shifted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_equal_those_of_the_trainers_own_numbers(tmp_path, algorithm):
    weights, scored, learnt = {}, {}, {}
    for old_logprobs in ("trainer", "rollout"):
        run, counted = make(tmp_path / old_logprobs, algorithm, old_logprobs)
        before = {name: each.clone() for name, each in run.rl.worker.model.state_dict().items()}
        metrics = [run.rl.iteration(step) for step in range(2)]
        weights[old_logprobs] = run.rl.worker.model.state_dict()
        scored[old_logprobs], learnt[old_logprobs] = counted.scored, counted.learnt
        fractions = [each.get("rollout/scored_fraction") for each in metrics]
        run.close()
        num_calls = NUM_ENVS * (NUM_CHUNKS if algorithm == "ppo" else 6)
        if old_logprobs == "trainer":
            assert fractions == [None, None] and counted.scored == 2 * num_calls
        else:
            assert fractions == [NUM_ENVS / num_calls] * 2 and counted.scored == 2 * NUM_ENVS
    assert learnt["trainer"] == learnt["rollout"] > 0
    for name, own in weights["trainer"].items():
        torch.testing.assert_close(weights["rollout"][name], own, atol=1e-6, rtol=0, msg=name)
    moved = max(float((weights["trainer"][name] - each).abs().max()) for name, each in before.items())
    assert moved > 1e-4, "control: there were updates"


@pytest.mark.parametrize("name, message", [("rollout_logprobs", "log-probabilities"), ("rollout_values", "values")])
def test_the_gate_stops_a_run_whose_rollouts_are_wrong(tmp_path, name, message):
    """One env in four is wrong in all of its calls, so the sample has some of them, whichever calls these are."""
    run, _ = make(tmp_path, "ppo", "rollout")
    shift(run.rl, **{name: 0.02})
    with pytest.raises(ParityError, match=f"Rollout and trainer {message} differ by 0.02"):
        run.rl.iteration(0)
    run.close()


def test_where_the_gate_only_warns_the_whole_rollout_is_scored(tmp_path):
    run, counted = make(tmp_path, "ppo", "rollout")
    trainer, seen, compute = run.rl, [], run.rl.algorithm.compute_advantages

    def noted(batch):
        seen.append((batch.old_logprobs - batch.rollout_logprobs, batch.values - batch.rollout_values))
        return compute(batch)

    trainer.algorithm.compute_advantages = noted
    trainer.gate = ParityGate(1e-3, always_stops=False)
    for step in range(2):  # up to the first update, and the first iteration after it, the gate would stop the run
        assert trainer.iteration(step)["rollout/parity_exceeded"] == 0
        assert not any(each.any() for each in seen[step])
    shift(trainer, rollout_logprobs=0.02, rollout_values=0.5)
    metrics = trainer.iteration(2)
    run.close()
    assert metrics["rollout/parity_exceeded"] == 1 and metrics["rollout/scored_fraction"] == 1
    for difference, by in zip(seen[2], (0.02, 0.5), strict=True):
        torch.testing.assert_close(difference[:, ::4], torch.full_like(difference[:, ::4], -by), atol=1e-5, rtol=0)
        torch.testing.assert_close(difference[:, 1::4], torch.zeros_like(difference[:, 1::4]), atol=1e-5, rtol=0)
    assert counted.scored == 3 * NUM_ENVS + NUM_ENVS * NUM_CHUNKS


@pytest.mark.parametrize(
    "words, message",
    [
        (["algorithm.tis_cap=2.0"], "Set algorithm.tis_cap=null, or algorithm.old_logprobs=trainer"),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef=0.1; expected.*Set algorithm.kl_coef=0, or"),
        (
            ["cluster.max_staleness=1", "rollout.worker_processes=1", "algorithm.tis_cap=2.0"],
            "cluster.max_staleness=1; expected.*Set cluster.max_staleness=0, or",
        ),
        (["model=pi0_tiny", "env.state=proprio", "model.init_config.joint_logprob=false"], "or algorithm=grpo"),
    ],
)
def test_what_needs_the_trainers_numbers_is_refused(words, message):
    base = ["model=mlp", "env=tabletop", "env.cameras=[]", "cluster.device=cpu"]
    base = base[1::2] if words[0].startswith("model") else base
    for old_logprobs in ("trainer", "rollout"):
        config = build_config(compose_config([*base, *words, f"algorithm.old_logprobs={old_logprobs}"]))
        if old_logprobs == "trainer":
            validate(config)
            continue
        with pytest.raises(ConfigError, match=f"algorithm.old_logprobs=rollout with .*{message}"):
            validate(config)
