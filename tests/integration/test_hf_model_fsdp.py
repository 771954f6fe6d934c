"""``HFModel`` over two ranks (FSDP2, gloo) does what one process does."""

from pathlib import Path

import pytest
import torch
import transformers

from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded, full_tensor
from rlinf.distributed.process_group import rank
from rlinf.models import HFModel
from rlinf.rollout.weight_push import WeightPush

LEARNING_RATE, ROWS = 0.5, 4
FAMILIES = ("llama", "gemma3")
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "vision_use_head": False,
}  # fmt: skip


def config_of(family):
    if family == "llama":
        return transformers.LlamaConfig(**TEXT, tie_word_embeddings=True)
    return transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=VISION, mm_tokens_per_image=4, image_token_index=60, boi_token_index=58, eoi_token_index=59,
    )  # fmt: skip


def batch_of(family):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (ROWS, 10), generator=generator)
    if family == "llama":
        return {"input_ids": ids}
    ids[:, 1:5] = 60
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == 60).long()}


def step(model, batch):
    """One SGD step of these rows' fraction of the mean loss over ``ROWS`` rows; the logits before it."""
    logits = model(**batch).logits
    targets = batch["input_ids"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    (losses / (ROWS * targets.shape[1])).backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    return logits.detach()


def train_on_two_ranks(root):
    for family in FAMILIES:
        folder = Path(root) / family
        mine = {name: tensor[rank() :: 2] for name, tensor in batch_of(family).items()}
        model = Sharded(HFModel.from_pretrained(folder), "cpu").model
        logits = step(model, mine)
        rollout = HFModel.from_config(model.config, dtype=torch.bfloat16)
        WeightPush(model, rollout).push(1)
        weights = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
        torch.save({"logits": logits, "weights": weights, "rollout": rollout.state_dict()}, folder / f"rank{rank()}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders with random weights, and what two ranks made of them."""
    root = tmp_path_factory.mktemp("fsdp")
    torch.manual_seed(0)
    for family in FAMILIES:
        model = HFModel.from_config(config_of(family))
        with torch.no_grad():
            for parameter in model.parameters():  # a projector of zeros has no smooth surroundings
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(root / family)
    launch(train_on_two_ranks, str(root), 2, "cpu")
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one_process(trained, family):
    one, alone = HFModel.from_pretrained(trained / family), HFModel.from_pretrained(trained / family)
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    logits = step(one, batch_of(family))
    step(alone, {name: tensor[::2] for name, tensor in batch_of(family).items()})
    assert largest_gap(one.state_dict(), before) > 1e-3
    for number in (0, 1):
        result = torch.load(trained / family / f"rank{number}.pt")
        torch.testing.assert_close(result["logits"], logits[number::2], atol=1e-5, rtol=0)
        assert largest_gap(result["weights"], one.state_dict()) <= 1e-5
        assert largest_gap(result["weights"], alone.state_dict()) > 1e-3  # control: with half of the rows
        for name, tensor in result["weights"].items():
            assert torch.equal(result["rollout"][name], tensor.bfloat16()), name


def largest_gap(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_units_are_the_layers_that_the_model_names():
    assert HFModel.from_config(config_of("llama"), meta=True).fsdp_wrap_modules == ("LlamaDecoderLayer",)
    units = HFModel.from_config(config_of("gemma3"), meta=True).fsdp_wrap_modules
    assert {"Gemma3DecoderLayer", "SiglipEncoderLayer"} <= set(units)
