"""The loop of recipes: its deadlines, its best checkpoint, and its end."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.distributed import deadlines
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import waiting
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.losses import NLLLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.options import from_mapping
from rlinf.recipes.completions import Completer
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.loop import Loop, LoopState, Update
from rlinf.recipes.run import summary
from rlinf.recipes.samples import Prompt

LIMITS = asdict(DeadlinesConfig())
LONG_S = 0.9 * LIMITS["update"]


def work() -> None:
    """Let a long time pass; the watchdog of a rank looks at the end of it."""
    deadlines.clock.tick(LONG_S)
    assert deadlines.clock.expired(LIMITS) is None


class Steps:
    """A trainer whose steps take long."""

    phase, rows = "sft", SimpleNamespace(state_dict=dict)

    def __init__(self, num_steps):
        self.num_steps, self.done = num_steps, []

    def update(self, step):
        work()
        self.done.append(step)
        return Update(1.0, {}, 10.0, 2.0)

    def validate(self, step):
        return None


def loop_of(folder, trainer, checkpoints, config=None, state=None):
    return Loop(
        from_mapping(RecipeConfig, config or {}), SimpleNamespace(set_learning_rate=lambda rate: None, model=None, optimizer=None),
        trainer, state or LoopState(), folder, checkpoints=checkpoints, manifest=lambda steps: None, config_mapping={},
        stop_signal=SimpleNamespace(number=None), progress=SimpleNamespace(update=lambda *_, **__: None),
    )  # fmt: skip


class Saves:
    """A manager that notes what it is told to save."""

    def __init__(self):
        self.saved = []

    def best_of(self, scores, also=None):
        return None

    def save(self, name, **more):
        self.saved.append(name)


def test_a_deadline_is_that_of_a_step_and_not_of_the_run(tmp_path):
    trainer = Steps(5)
    config = {"train": {"ckpt": {"enable_checkpoint": False}}}
    loop_of(tmp_path, trainer, Saves(), config).fit()
    assert trainer.done == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError), waiting("update"):
        work()
        work()


def test_every_micro_batch_and_every_generation_starts_the_deadline_again(tiny_lm, monkeypatch):
    policy = HuggingFacePolicy(tiny_lm(), micro_batch_size=1, max_new_tokens=2)
    ids = torch.arange(12).view(3, 4) + 3
    batch = BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": torch.ones_like(ids)})  # fmt: skip
    score, generate, calls = policy._logprobs, policy.generate, []

    def slowly(function):
        def slow(*arguments, **more):
            work()
            calls.append(function)
            return function(*arguments, **more)

        return slow

    monkeypatch.setattr(policy, "_logprobs", slowly(score))
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "")
    generator = SimpleNamespace(generate=slowly(generate))
    completer = Completer(
        generator, tokenizer, lambda *_, **__: (0.0, {}), batch_size=1, max_new_tokens=2, end_tokens=[2]
    )
    with waiting("update"):
        policy.get_logprobs(batch)
        policy.train(batch, NLLLossFn())
    with waiting("update"):
        completer.complete([Prompt(row.tolist(), {}, None, {}) for row in ids])
    assert len(calls) == 9


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    scores = {"step_1": math.nan, "step_2": 0.5, "step_3": 0.7, "step_4": math.nan, "step_5": math.inf}
    manager = CheckpointManager(tmp_path)
    for name in scores:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
    assert manager.best_of(scores) == "step_3"
    loop = loop_of(tmp_path, Steps(5), manager, state=LoopState(scores=scores))
    assert summary(loop)["best_validation"] == {"checkpoint": "step_3", "score": 0.7}
