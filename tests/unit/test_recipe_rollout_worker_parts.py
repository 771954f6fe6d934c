"""Data exchanged between the ranks and rollout workers of a recipe, without Ray."""

from types import SimpleNamespace

import datasets
import pytest
import torch

from rlinf.distributed import process_group
from rlinf.distributed.deadlines import clock
from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_generation import SamplingConfig
from rlinf.models import HuggingFacePolicy
from rlinf.options import from_mapping
from rlinf.recipes import evaluate_questions as evaluation
from rlinf.recipes import launch as command
from rlinf.recipes import token_trainer
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import StreamedRows
from rlinf.recipes.rollout_workers import TokenRolloutWorker

ANSWER = ["output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs"]


@pytest.mark.parametrize("in_torch", [True, False])
def test_answers_do_not_carry_the_images_of_the_prompts_back(tiny_lm, in_torch):
    worker = object.__new__(TokenRolloutWorker)
    worker._complete_version = lambda: 0
    model = HuggingFacePolicy(tiny_lm(), device_map=None).model
    worker.model, worker.sampling, worker.engine = model, SamplingConfig(max_new_tokens=2, eos_token_id=[]), None
    batch = BatchedDataDict({"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)})
    expected = worker.generate(batch, greedy=True)
    if not in_torch:
        worker.engine = SimpleNamespace(generate=lambda data, greedy: BatchedDataDict({**data, **expected}))
    found = worker.generate(BatchedDataDict({**batch, "images": torch.ones(1, 3)}), greedy=True)
    assert list(found) == list(expected) == ANSWER
    assert all(torch.equal(found[key], expected[key]) for key in ANSWER)


def test_ranks_compare_the_beginning_of_a_stream_under_the_deadline_of_the_start(monkeypatch):
    names = []
    monkeypatch.setattr(token_trainer, "world_size", lambda: 2)
    monkeypatch.setattr(token_trainer, "maximum", lambda *values: names.append(clock.name) or values)
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}]))
    token_trainer.check_equal_rows(StreamedRows(rows, lambda row: row, seed=None))
    assert names == ["start"]


def test_a_device_that_is_not_there_is_refused_with_the_key_of_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(command, "is_connected", lambda: True)
    config = from_mapping(RecipeConfig, {"policy": {"device": "cuda"}})
    with pytest.raises(ConfigError, match="Set policy.device=cpu, "):
        command.launch(config, None, dry_run=True, arguments=[])
    for name in ("find_model", "_run_of", "_output_folder"):
        monkeypatch.setattr(evaluation, name, lambda *_: tmp_path)
    questions = evaluation.QuestionsConfig(checkpoint="x", questions="y", device="cuda")
    with pytest.raises(ConfigError, match="Set device=cpu, "):
        evaluation.evaluate_questions(questions)
