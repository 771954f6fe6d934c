"""The parts of a run, as its configuration makes them."""

import json
import shutil
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
from datasets import Dataset

from rlinf.errors import ConfigError
from rlinf.llm.generation_interface import GenerationConfig
from rlinf.llm.vllm_generation import sampling_arguments
from rlinf.models import HuggingFacePolicy
from rlinf.options import from_mapping
from rlinf.recipes import build, run
from rlinf.recipes.build import RecipeData, describe_data, describe_model, make_trainer
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import PackedRows, Rows, StreamedRows
from rlinf.recipes.packers import PromptPacker, RawTextPacker
from rlinf.recipes.rewards import REWARDS
from rlinf.recipes.run import _restore
from rlinf.registry import Entry
from rlinf.training.state import LoopState

ROLLOUT = {"backend": "torch", "n_generation": 2, "max_response_length": 5}
POSITIONS = 64
"""Of ``tiny_lm``."""


class Letters:
    """A tokenizer of one token for each letter."""

    eos_token_id = 2

    def __call__(self, text, **options):
        return {"input_ids": [3 + ord(letter) % 40 for letter in text]}

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(0xE000 + token) for token in tokens)


def config_of(folder, kind="sft", **sections) -> RecipeConfig:
    method = {
        "type": kind, "prompt_column_name": "text", "conversation_column_name": "text", "reward_function": "format",
    }  # fmt: skip
    return from_mapping(
        RecipeConfig,
        {
            "train": {
                "train_batch_per_replica": 4,
                "epoch": 4,
                "train_policy": {**method, **sections.pop("method", {})},
            },
            "policy": {"model_name_or_path": folder, "model_max_length": 1000, "device": "cpu"},
            "rollout": ROLLOUT,
            **sections,
        },
    )


@pytest.fixture
def made(tiny_lm):
    """``made(kind, texts, packer, **sections)`` returns a trainer of these texts."""
    with ExitStack() as stack:

        def make(kind, texts, packer, **sections):
            config = config_of(tiny_lm(), kind, **sections)
            policy = HuggingFacePolicy(tiny_lm(), max_new_tokens=5)
            data = RecipeData([{"text": text} for text in texts], packer)
            return make_trainer(config, policy, Letters(), data, stack)

        yield make


def test_text_is_cut_at_the_positions_of_the_model(made):
    rows = made("sft", ["a" * 300, "b" * 9], RawTextPacker()).rows
    assert [len(rows[number].input_ids) for number in range(2)] == [POSITIONS, 9]


def test_a_prompt_that_leaves_no_position_for_an_answer_is_a_bad_row(made):
    texts = ["a" * POSITIONS, "b" * (POSITIONS - 1), "c"]
    rows = made("grpo", texts, PromptPacker(), method={"dataset": {"skip_bad_rows": True}}).rows
    assert rows.num_skipped == 1
    assert [len(rows[number].input_ids) for number in range(3)] == [POSITIONS - 1, POSITIONS - 1, 1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("type", "dpo"),
        ("dataloader_shuffle", False),
        ("dataset.name", "b"),
        ("dataset.subset", "b"),
        ("dataset.split", ["train", "test"]),
        ("dataset.revision", "b"),
    ],
)
def test_what_determines_the_rows_of_a_step_is_compared(key, value):
    trainer = SimpleNamespace(rows=PackedRows(Rows([{}] * 9), lambda row: row))
    config = config_of("m", method={"dataset": {"name": "a"}})
    before = describe_data(config, trainer)
    assert before == describe_data(config_of("m", method={"dataset": {"name": "a"}}), trainer)
    *path, last = key.split(".")
    setattr(config.train.train_policy.dataset if path else config.train.train_policy, last, value)
    assert describe_data(config, trainer) != before
    assert json.loads(json.dumps(before)) == before, "a checkpoint holds it as JSON"


def test_a_run_goes_on_with_the_model_that_it_began_with_only(tiny_lm, tmp_path, monkeypatch):
    def data_of(folder):
        generation = SimpleNamespace(eos_token_id=2)
        return describe_model(
            SimpleNamespace(model_name=str(folder), model=SimpleNamespace(generation_config=generation))
        )

    first, moved, other = tiny_lm(), shutil.copytree(tiny_lm(), tmp_path / "moved"), tiny_lm(seed=1)
    assert data_of(first) == data_of(moved)
    for folder, before, message in (
        (moved, data_of(first), None), (other, data_of(first), "policy.model_name_or_path was .* and is "),
        (first, data_of(first) | {"end_tokens": [2, 3]}, r"end_tokens was \[2, 3\] and is 2"),
    ):  # fmt: skip
        saved = {"phase": "sft", "sft_step": 3, "trainer": {"data": before}}
        monkeypatch.setattr(run, "check", lambda *_: None)
        monkeypatch.setattr(run, "load_checkpoint", lambda *_, saved=saved, **__: saved)
        monkeypatch.setattr(run, "Manifest", SimpleNamespace(load=lambda _: None))
        loop = SimpleNamespace(state=LoopState())
        trainer = SimpleNamespace(
            manifest=lambda: None, model=None, optimizer=None, data=data_of(folder), restore=lambda saved: None
        )
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            _restore(tmp_path, loop, trainer)


def test_an_engine_stops_where_the_trained_model_does(tiny_lm, monkeypatch):
    monkeypatch.setattr(build, "why_no_engine", lambda _: None)
    config = config_of(tiny_lm(), "grpo", rollout=ROLLOUT | {"backend": "vllm", "enforce_eager": True})
    policy = HuggingFacePolicy(tiny_lm(), tokenizer=SimpleNamespace(eos_token_id=7, decode=str))
    engine = build._engine(config, policy, places=object())
    settings = {name: value for name, value in engine.items() if name in GenerationConfig.__annotations__}
    assert sampling_arguments(settings, greedy=True)["stop_token_ids"] == [2, 7]
    assert engine["vllm_cfg"]["enforce_eager"] is True


def test_the_group_size_and_a_stream_are_compared():
    rows = PackedRows(Rows([{}] * 9), lambda row: row)
    config = config_of("m", "grpo")
    before = describe_data(config, SimpleNamespace(rows=rows))
    config.rollout.n_generation = 4
    assert describe_data(config, SimpleNamespace(rows=rows)) != before
    sft = config_of("m")
    assert describe_data(sft, SimpleNamespace(rows=rows))["group_size"] == 1
    stream = StreamedRows(Dataset.from_list([{"a": 1}]).to_iterable_dataset(), lambda row: row)
    assert describe_data(sft, SimpleNamespace(rows=stream))["streaming"]


@pytest.mark.parametrize(("is_kept", "count"), [(True, 1), (False, 2)])
def test_prepared_rows_are_kept_in_memory_on_request(made, is_kept, count):
    packer, packed = RawTextPacker(), []
    sample = packer.sample
    packer.sample = lambda row: packed.append(row) or sample(row)
    rows = made("sft", ["abc"], packer, method={"enable_dataset_cache": is_kept}).rows
    assert rows[0].input_ids == sample({"text": "abc"}).input_ids
    assert len(packed) == count, "the first is of the check"


@pytest.mark.parametrize(("size", "calls"), [(None, [4]), (3, [3, 1])])
def test_the_validation_evaluates_so_many_rows_together(made, monkeypatch, size, calls):
    sections = {"validation": {"enable": True, "batch_size": size}, "method": {"dataset": {"test_size": 4}}}
    texts, seen = [chr(97 + number) * 5 for number in range(12)], []
    sft = made("sft", texts, RawTextPacker(), **sections)
    score = sft.policy.get_logprobs
    monkeypatch.setattr(sft.policy, "get_logprobs", lambda batch: seen.append(len(batch["input_ids"])) or score(batch))
    sft.validate(0)
    grpo = made("grpo", texts, PromptPacker(), rollout=ROLLOUT | {"batch_size": 4}, **sections)
    generate = grpo.policy.generate
    monkeypatch.setattr(
        grpo.policy, "generate", lambda batch, greedy: seen.append(len(batch["input_ids"])) or generate(batch, greedy)
    )
    grpo.validate(0)
    assert seen == calls * 2
    assert grpo.completer.batch_size == 8, "the rollouts of training are not changed"


@pytest.mark.parametrize(
    ("given", "score"), [(None, lambda text: 7.0), ("mark", lambda text: float(ord(text[-1]) % 3)), ({"mark": 2.0}, lambda text: 2.0 * (ord(text[-1]) % 3))],
    ids=["null", "name", "weights"],
)  # fmt: skip
def test_answers_of_a_validation_have_its_own_rewards(made, monkeypatch, given, score):
    """The rewards of training stay as they are."""
    for name, reward in {
        "seven": lambda *_, **row: 7.0,
        "mark": lambda answer, *_, **row: float(ord(answer[-1]) % 3),
    }.items():
        monkeypatch.setitem(REWARDS._entries, name, Entry(name, reward, "test"))
    trainer = made(
        "grpo", [chr(97 + number) * 5 for number in range(12)], PromptPacker(), rollout=ROLLOUT | {"batch_size": 4},
        validation={"enable": True, "reward_function": given}, method={"dataset": {"test_size": 4}, "reward_function": "seven"},
    )  # fmt: skip
    found = trainer.validate(0)
    texts = [sample["completion"] for sample in found.samples]
    assert found.score == pytest.approx(sum(map(score, texts)) / len(texts)) and len(texts) == 4
    assert list(trainer.completer.rewards.functions) == ["seven"]
