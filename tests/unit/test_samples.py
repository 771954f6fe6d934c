"""Batches of recipes: tokens, masks and images of each row at their places."""

import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.recipes.samples import BadRowError, Prompt, Sample, collate, tokens_of


def test_a_batch_holds_tokens_masks_and_images_of_its_rows():
    images = torch.arange(24.0).reshape(2, 3, 2, 2)
    types = torch.tensor([[1, 1, 0]])
    batch = collate([Sample([5, 6], [False, True]),
                     Sample([7, 8, 9], [False, False, True], {"pixel_values": images, "mm_token_type_ids": types})],
                    pad_token_id=3)  # fmt: skip
    assert batch["input_ids"].tolist() == [[5, 6, 3], [7, 8, 9]] and batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch["token_mask"].tolist() == [[False, True, False], [False, False, True]]
    assert (
        batch["mm_token_type_ids"].tolist() == [[0, 0, 0], [1, 1, 0]]
        and batch["mm_token_type_ids"].dtype == types.dtype
    )
    assert [tuple(each.shape) for each in batch["pixel_values"]] == [(0, 3, 2, 2), (2, 3, 2, 2)]
    assert batch["pixel_values"][1].equal(images) and batch.size == 2


def test_a_packed_row_has_the_tokens_of_its_samples():
    assert tokens_of(Prompt([1, 2])) == [[1, 2]]
    assert tokens_of((Sample([1], [True]), Sample([2, 3], [False, True]))) == [[1], [2, 3]]


def test_prompts_have_no_mask():
    assert sorted(collate([Prompt([1, 2], reference="3"), Prompt([4])])) == ["attention_mask", "input_ids"]


def test_a_mask_of_another_length_and_no_rows_are_refused():
    with pytest.raises(ConfigError, match="sample 1 have lengths 1 and 2"):
        collate([Sample([1], [True]), Sample([1, 2], [True])])
    with pytest.raises(ConfigError, match="at least one row"):
        collate([])


def test_a_bad_row_names_its_place_and_the_override():
    error = BadRowError("role is missing; expected role and content.").at(3, "data.jsonl")
    assert str(error) == (
        "Row 3 of data.jsonl cannot be used: role is missing; expected role and content. Fix the row, or set "
        "train.train_policy.dataset.skip_bad_rows=true to skip such rows"
    )
