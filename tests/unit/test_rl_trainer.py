"""What an iteration plays, scores and trains on: only rows of running episodes, and only groups that are missing."""

from dataclasses import dataclass

import pytest
import torch
from run_results import run_config

from rlinf.commands.train import build
from rlinf.rollout.collector import ATTEMPT_STRIDE
from rlinf.training.rl_trainer import one_call_of_each_env

GROUP, NUM_BLOCKS, HORIZON, NUM_CHUNKS, EPOCHS = 2, 4, 6, 12, 2
SMALL = [
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", f"env.max_episode_steps={HORIZON}", "algorithm=grpo",
    f"algorithm.update_epochs={EPOCHS}", f"rollout.group_size={GROUP}", "rollout.auto_reset=false",
    f"rollout.num_envs={GROUP * NUM_BLOCKS}", f"rollout.num_chunks={NUM_CHUNKS}", "trainer.minibatch_size=32",
    "model.micro_batch_size=5", "model.val_micro_batch_size=7", "algorithm.max_resamples=3", "evaluation.probe=false",
    "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1",
]  # fmt: skip


class Counted:
    """Counts the rows for which a policy acts, and those that it scores or learns from."""

    def __init__(self, model):
        self.acted = self.scored = self.learnt = 0
        act, score = model.predict_action_batch, model.evaluate_actions

        def counted_act(**inputs):
            self.acted += len(inputs["state"])
            return act(**inputs)

        def counted_score(inputs, *arguments):
            rows = len(inputs["state"])
            self.scored += rows * (not torch.is_grad_enabled())
            self.learnt += rows * torch.is_grad_enabled()
            return score(inputs, *arguments)

        model.predict_action_batch, model.evaluate_actions = counted_act, counted_score


@pytest.mark.parametrize("repeats", [set(), {(0, 1), (0, 3), (1, 3)}, {(attempt, 2) for attempt in range(9)}])
def test_only_missing_groups_are_played_again_and_ended_episodes_cost_nothing(tmp_path, repeats):
    """Every episode lasts for half of the rollout. ``repeats``: (attempt, group) that teach nothing."""
    run = build(run_config(tmp_path, *SMALL))
    trainer, played = run.rl, []
    compare, collect = trainer.algorithm.uninformative_envs, trainer.collector.collect

    def uninformative(batch):
        assert not compare(batch).any(), "shaped rewards differ"
        ids = batch.group_ids[0].tolist()
        return torch.tensor([(group // ATTEMPT_STRIDE, group % ATTEMPT_STRIDE) in repeats for group in ids])

    def noted(*arguments):
        played.append(arguments[-1] if arguments[-1] is not None else list(range(NUM_BLOCKS)))
        return collect(*arguments)

    trainer.algorithm.uninformative_envs, trainer.collector.collect = uninformative, noted
    trainer.sync.push(0)
    counted = Counted(trainer.worker.model)
    metrics = trainer.iteration(0)
    run.close()
    again = {0: [], 3: [[1, 3], [3]], 9: [[2], [2], [2]]}[len(repeats)]
    assert played == [[0, 1, 2, 3], *again]
    rows = GROUP * HORIZON
    assert counted.acted == rows * sum(map(len, played)) == metrics["rollout/env_steps_total"]
    assert counted.scored == rows * NUM_BLOCKS <= 0.6 * NUM_BLOCKS * GROUP * NUM_CHUNKS
    assert counted.learnt == EPOCHS * rows * NUM_BLOCKS
    assert metrics["rollout/num_episodes"] == GROUP * sum(map(len, played))


@dataclass
class Masked:
    loss_mask: torch.Tensor


def test_the_gate_sees_each_valid_call_of_an_env_in_turn():
    valid = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    valid[:, 3] = False
    calls = [valid[:, env].nonzero().flatten().tolist() for env in range(7)]
    assert {len(each) for each in calls} >= {0, 2, 4}
    for number in range(12):
        found = one_call_of_each_env(Masked(valid), number).loss_mask
        expected = [each[(number + env) % len(each) :][:1] if each else [] for env, each in enumerate(calls)]
        assert [found[:, env].nonzero().flatten().tolist() for env in range(7)] == expected
