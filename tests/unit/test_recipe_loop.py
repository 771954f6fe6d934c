"""The loop with a trainer of recipes: its deadlines, its best checkpoint, and its end."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.config.training import TrainerConfig
from rlinf.distributed import deadlines
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import deadline
from rlinf.llm import hf_policy
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.losses import NLLLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.options import from_mapping
from rlinf.recipes import token_trainer
from rlinf.recipes.completions import Completer
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.rollouts import LocalGenerator
from rlinf.recipes.run import _save_every, summary
from rlinf.recipes.samples import Prompt
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation, best_of, flops_per_token, rank_slice
from rlinf.training import loop as loops
from rlinf.training.loop import Loop
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested

LIMITS = asdict(DeadlinesConfig())
LONG_S = 0.9 * LIMITS["update"]


def work() -> None:
    """Let a long time pass; the watchdog of a rank looks at the end of it."""
    deadlines.clock.tick(LONG_S)
    assert deadlines.clock.expired(LIMITS) is None


class Steps(TokenTrainer):
    """A trainer whose steps take long."""

    phase = "sft"

    def __init__(self, num_steps):
        policy = SimpleNamespace(set_learning_rate=lambda rate: None, model=None, optimizer=None)
        super().__init__(policy, SimpleNamespace(state_dict=dict, __len__=lambda: 0), num_steps)
        self.done = []

    def manifest(self):
        return None

    def step(self, step):
        work()
        self.done.append(step)
        return TokenUpdate(1.0, {}, 10.0, 2.0)

    def validate(self, step):
        return None


def loop_of(folder, trainer, checkpoints, config=None, state=None):
    trainer.config = from_mapping(RecipeConfig, config or {})
    settings = TrainerConfig(save_every=_save_every(trainer.config, trainer), save_every_minutes=0.0)
    trainer.loop = Loop(
        state or LoopState(phase=trainer.phase), folder, settings, {}, checkpoints=checkpoints,
        stop_signal=SimpleNamespace(number=None), progress=SimpleNamespace(update=lambda *_, **__: None),
    )  # fmt: skip
    return trainer.loop


class Saves:
    """A manager that notes what it is told to save."""

    keeps_any = True

    def __init__(self):
        self.saved = []

    def wait(self):
        pass

    def names(self):
        return []

    def save(self, name, *, loop_state, is_last, **more):
        if self.keeps_any or is_last:
            self.saved.append((name, is_last, loop_state["trainer"]["num_tokens"]))


def test_a_deadline_is_that_of_a_step_and_not_of_the_run(tmp_path):
    trainer = Steps(5)
    config = {"train": {"ckpt": {"enable_checkpoint": False}}}
    loop_of(tmp_path, trainer, Saves(), config).fit(trainer)
    assert trainer.done == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError), deadline("update"):
        work()
        work()


def test_every_micro_batch_and_every_generation_starts_the_deadline_again(tiny_lm, monkeypatch):
    policy = HuggingFacePolicy(tiny_lm(), micro_batch_size=1, max_new_tokens=2)
    ids = torch.arange(12).view(3, 4) + 3
    batch = BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": torch.ones_like(ids)})  # fmt: skip
    score, generate, calls = hf_policy.batch_scores, policy.generate, []

    def slowly(function):
        def slow(*arguments, **more):
            work()
            calls.append(function)
            return function(*arguments, **more)

        return slow

    monkeypatch.setattr(hf_policy, "batch_scores", slowly(score))
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "")
    generator = LocalGenerator(SimpleNamespace(generate=slowly(generate)))
    completer = Completer(
        generator, tokenizer, lambda *_, **__: (0.0, {}), batch_size=1, max_new_tokens=2, end_tokens=[2]
    )
    with deadline("update"):
        policy.get_logprobs(batch)
        policy.train(batch, NLLLossFn())
    with deadline("update"):
        completer.complete([Prompt(row.tolist(), {}, None, {}) for row in ids])
    assert calls == [score] * 6 + [generate] * 3


def test_the_token_that_ends_an_answer_is_no_part_of_its_text():
    def generate(batch, greedy):
        answers = torch.tensor([[5, 7, 2], [5, 7, 6]])
        whole = torch.cat([batch["input_ids"], answers], dim=1)
        lengths = torch.full((2,), 3)
        return BatchedDataDict(
            {
                "output_ids": whole,
                "logprobs": whole * 0.0,
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": lengths + 1,
            }
        )

    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: str(tokens))
    completer = Completer(
        LocalGenerator(SimpleNamespace(generate=generate)), tokenizer, lambda *_, **__: (0.0, {}), batch_size=2, max_new_tokens=3,
        end_tokens=[2, 9],
    )  # fmt: skip
    ended, cut = completer.complete([Prompt([1], {}, None, {})] * 2)
    assert (ended.text, ended.tokens, ended.is_truncated) == ("[5, 7]", [5, 7, 2], False)
    assert (cut.text, cut.is_truncated) == ("[5, 7, 6]", True)


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    scores = {"step_1": math.nan, "step_2": 0.5, "step_3": 0.7, "step_4": math.nan, "step_5": math.inf}
    manager = CheckpointManager(tmp_path)
    for name in scores:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
    assert best_of(scores, manager.names()) == "step_3"
    trainer = Steps(5)
    loop, trainer.scores = loop_of(tmp_path, trainer, manager), scores
    best = {"checkpoint": "step_3", "score": 0.7, "num_candidates": 5}
    assert summary(loop, trainer, "sft")["best_validation"] == best


@pytest.mark.parametrize(
    ("ckpt", "every"),
    [({}, 5), ({"save_freq_in_epoch": 2}, 6), ({"enable_checkpoint": False, "save_freq_in_epoch": 2}, 0)],
)
def test_checkpoints_follow_steps_or_epochs(ckpt, every):
    train = {"train_batch_per_replica": 8, "ckpt": {"save_freq": 5, **ckpt}}
    config = from_mapping(RecipeConfig, {"train": train})
    assert _save_every(config, SimpleNamespace(rows=range(24))) == every


class Validated(Steps):
    """A trainer that also validates, and may be told to stop while it takes a step."""

    stops_in = None

    def step(self, step):
        self.done.append(step)
        if step == self.stops_in:
            self.loop.stop_signal.number = 15
        return TokenUpdate(step / 10, {"sft/loss": step / 10}, 30.0, 4.0)

    def validate(self, step):
        return Validation(-float(step), {"eval/loss": float(step)}, f"loss {step}", [{"step": step}])


def watched(tmp_path, monkeypatch, trainer, **ckpt):
    """A loop whose clock continues by 2 seconds at each look, the manager, the lines that it logs, and its learning rates."""
    seconds, lines, rates = iter(range(0, 1000, 2)), [], []
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    for module in (loops, token_trainer):
        monkeypatch.setattr(module, "time", clock)
    config = {
        "train": {"optm_lr": 0.5, "optm_warmup_steps": 2, "ckpt": {"save_freq": 2, **ckpt}},
        "validation": {"enable": True, "val_before_train": True, "freq": 3},
    }
    manager = Saves()
    manager.keeps_any = ckpt.get("enable_checkpoint", True)
    one = loop_of(tmp_path, trainer, manager, config)
    trainer.policy.set_learning_rate = rates.append
    one.tracker = SimpleNamespace(log=lambda step, metrics, phase: lines.append((step, metrics)))
    return one, manager, lines, rates


def test_every_step_is_logged_saved_and_validated_when_it_is_due(tmp_path, monkeypatch):
    trainer = Validated(5)
    one, manager, lines, rates = watched(tmp_path, monkeypatch, trainer)
    monkeypatch.setattr(token_trainer, "peak_flops", lambda: 60.0)
    monkeypatch.setattr(token_trainer, "flops_per_token", lambda model, length: length)
    shown = []
    one.progress = SimpleNamespace(update=lambda *words, **numbers: shown.append((*words, numbers)))
    one.fit(trainer)
    assert shown[3] == ("sft", 4, 5, {"loss": 0.3, "tokens/s": 15}) and len(shown) == 5
    assert rates == [0.25, 0.5, 0.5, 0.5, 0.5]
    assert [step for step, _ in lines] == [0, 0, 1, 2, 2, 3, 4, 4]
    validations = [(metrics["eval/loss"], metrics["time/eval_s"]) for _, metrics in lines if "eval/loss" in metrics]
    assert validations == [(0, 2), (3, 2), (5, 2)], "before training, after three steps, and after the last one"
    for number, metrics in enumerate(metrics for _, metrics in lines if "sft/loss" in metrics):
        assert metrics == {
            "sft/loss": number / 10, "sft/learning_rate": rates[number], "time/update_s": 2, "time/total_s": 6 * (number + 1),
            "throughput/tokens_per_s": 15, "throughput/mfu": 15 * (30 / 4) / 60,
        }  # fmt: skip
    assert manager.saved == [("step_2", False, 60), ("step_4", False, 120), ("step_5", True, 150)]
    assert trainer.scores == {"step_0": 0, "step_3": -3, "step_5": -5} and trainer.last_validation == {"eval/loss": 5}
    assert (one.state.done, trainer.num_tokens, one.state.train_wall_s) == (5, 150, 30)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "step_0.jsonl",
        "step_3.jsonl",
        "step_5.jsonl",
    ]


@pytest.mark.parametrize(
    ("stops_in", "ckpt", "saved"),
    [
        (1, {}, ["step_2"]),  # this step was saved already
        (2, {}, ["step_2", "step_3"]),
        (2, {"enable_checkpoint": False}, []),
    ],
)
def test_a_run_that_is_stopped_saves_its_step_once(tmp_path, monkeypatch, stops_in, ckpt, saved):
    trainer = Validated(5)
    trainer.stops_in = stops_in
    one, manager, *_ = watched(tmp_path, monkeypatch, trainer, **ckpt)
    with pytest.raises(StopRequested, match=f"after step {stops_in + 1}"):
        one.fit(trainer)
    assert [name for name, *_ in manager.saved] == saved and one.state.done == stops_in + 1


def test_a_rank_that_heard_no_signal_stops_with_the_one_that_did(tmp_path, monkeypatch):
    trainer = Validated(5)
    one, *_ = watched(tmp_path, monkeypatch, trainer)
    monkeypatch.setattr(loops, "any_rank", lambda mine: not mine and one.state.done == 3)
    with pytest.raises(StopRequested, match="after step 3"):
        one.fit(trainer)


def test_a_run_that_is_stopped_in_its_last_step_ends_as_any_other(tmp_path, monkeypatch):
    trainer = Validated(2)
    trainer.stops_in = 1
    one, manager, *_ = watched(tmp_path, monkeypatch, trainer)
    one.fit(trainer)
    assert [(name, is_last) for name, is_last, _ in manager.saved] == [("step_2", True)]


def test_rows_of_the_ranks_are_neighbours_and_differ_by_one_at_most(monkeypatch):
    monkeypatch.setattr(token_trainer, "world_size", lambda: 3)
    shares = []
    for number in range(3):
        monkeypatch.setattr(token_trainer, "rank", lambda number=number: number)
        shares.append([list(range(8))[rank_slice(size)] for size in (8, 7, 6, 2)])
    assert shares == [
        [[0, 1, 2], [0, 1, 2], [0, 1], [0]],
        [[3, 4, 5], [3, 4], [2, 3], [1]],
        [[6, 7], [5, 6], [4, 5], []],
    ]


def test_operations_of_a_token_by_hand(tiny_lm):
    """Two layers of hidden size 32 with four heads of 8, two of them for keys and values, 48 inner ones; 48 tokens."""
    layer = (
        2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    )  # queries and outputs, keys and values, the three of the MLP, norms
    body, embedding = 2 * layer + 32, 48 * 32
    attention = 3 * 4 * 2 * 32 * 10 / 2
    model = HuggingFacePolicy(tiny_lm()).model
    assert flops_per_token(model, 10) == 6 * (body + embedding) + attention, (
        "the embeddings are looked up, the head is not"
    )
    tied = HuggingFacePolicy(tiny_lm(tie_word_embeddings=True)).model
    assert flops_per_token(tied, 10) == 6 * (body + embedding) + attention
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    assert flops_per_token(model, 10) == 4 * (body + embedding) + 2 * embedding + attention


@pytest.mark.parametrize(("step", "asked", "validated"), [(0, True, [0, 3]), (0, False, [3]), (1, True, [3])])
def test_only_a_run_that_begins_is_validated_before_training(tmp_path, monkeypatch, step, asked, validated):
    trainer = Validated(3)
    one, _, lines, _ = watched(tmp_path, monkeypatch, trainer)
    one.state.sft_step, trainer.config.validation.val_before_train = step, asked
    one.fit(trainer)
    assert [metrics["eval/loss"] for _, metrics in lines if "eval/loss" in metrics] == validated


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40", None),
     ("NVIDIA RTX A1000", None), ("NVIDIA GH200 480GB", 989e12)],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_not_taken_from_one_with_a_longer_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert token_trainer.peak_flops() == peak
