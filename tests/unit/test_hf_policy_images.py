"""The Hugging Face policy on vision-language models: images belong to their rows, however a batch is cut."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rlinf.algorithms import DPOLossFn, NLLLossFn
from rlinf.distributed import BatchedDataDict
from rlinf.errors import ConfigError
from rlinf.llm import hf_generation
from rlinf.llm.batch_checks import response_mask
from rlinf.llm.hf_generation import media_tokens
from rlinf.models import HuggingFacePolicy
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import FAMILIES, IMAGE_SIZE, make_tiny_vlm

USED = ("llava", "gemma3", "qwen2_5_vl", "idefics3")
TEXTS = ("reach the red block", "go to the zone", "push the blue block into the green zone", "reach the zone")
NUM_IMAGES = (1, 2, 0, 1)


class Case:
    """A tiny model, what its processor makes of each row alone, and the batch of these rows."""

    def __init__(self, family: str, folder: str, num_images=NUM_IMAGES) -> None:
        self.folder = folder
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        processor = load_vlm_processor(folder, AutoConfig.from_pretrained(folder))
        random = np.random.default_rng(5)
        self.rows = []
        for text, count in zip(TEXTS, num_images, strict=True):
            images = [random.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8) for _ in range(count)]
            prompt = FAMILIES[family].get("image_text", "<image>") * count + text
            self.rows.append(dict(processor(text=[prompt], images=images or None, return_tensors="pt")))
        width = max(row["input_ids"].shape[1] for row in self.rows)
        self.batch = BatchedDataDict({})
        for key in self.rows[0]:
            values = [row.get(key) for row in self.rows]
            if values[0].shape == self.rows[0]["input_ids"].shape:
                padded = [torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values]
                self.batch[key] = torch.cat(padded)
            else:
                self.batch[key] = [
                    torch.zeros(0, *values[0].shape[1:]).to(values[0]) if value is None else value for value in values
                ]

    def logprobs(self, model=None) -> list[torch.Tensor]:
        """Of each row alone, by transformers, with gradients."""
        found = []
        for row in self.rows:
            logits = (model or self.model)(**row, use_cache=False).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(-1, row["input_ids"][0, 1:, None])[:, 0])
        return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made: dict[str, Case] = {}

    def get(family: str) -> Case:
        if family not in made:
            made[family] = Case(family, str(make_tiny_vlm(family, tmp_path_factory.mktemp(family))))
        return made[family]

    return get


CUTS = {"rows": {"micro_batch_size": 1}, "tokens": {"max_tokens_per_microbatch": 120}, "whole": {}}


@pytest.mark.parametrize("family", USED)
@pytest.mark.parametrize("cut", CUTS)
def test_scores_are_those_of_each_row_with_its_own_images(cases, family, cut):
    case = cases(family)
    policy = HuggingFacePolicy(case.folder, **CUTS[cut])
    logprobs = policy.get_logprobs(case.batch)["logprobs"]
    with torch.no_grad():
        for row, expected in enumerate(case.logprobs()):
            assert float((logprobs[row, 1 : len(expected) + 1] - expected).abs().max()) < 1e-4
            assert logprobs[row, 0] == 0 and not logprobs[row, len(expected) + 1 :].any()
    images = case.batch["pixel_values"]
    swapped = case.batch | {"pixel_values": [*images[3:], *images[1:3], images[0]]}
    moved = (policy.get_logprobs(BatchedDataDict(swapped))["logprobs"] - logprobs).abs().amax(-1)
    assert (moved[[0, 3]] > 1e-3).all() and (moved[[1, 2]] < 1e-4).all(), "control: the images of other rows"


@pytest.mark.parametrize("family", USED)
def test_generation_sees_the_images_of_its_rows(cases, family):
    case = cases(family)
    policy = HuggingFacePolicy(case.folder, max_new_tokens=4, eos_token_id=[], temperature=0.5)
    output = policy.generate(case.batch, greedy=True)
    settings = {"eos_token_id": None, "pad_token_id": 0, "suppress_tokens": media_tokens(case.model.config)}
    for row, inputs in enumerate(case.rows):
        with torch.no_grad():
            expected = case.model.generate(**inputs, max_new_tokens=4, do_sample=False, **settings)[0]
        assert output["output_ids"][row, : int(output["unpadded_sequence_lengths"][row])].equal(expected)
    generated = response_mask(output)
    assert float((policy.get_logprobs(output)["logprobs"] - output["logprobs"])[generated].abs().max()) < 1e-4
    sampled = policy.generate(case.batch, greedy=False)
    assert policy.train(sampled, NLLLossFn())["num_tokens"] == 16


MEDIA = {
    "llava": ["<image>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "qwen2_5_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
}


@pytest.mark.parametrize("family", MEDIA)
def test_an_answer_has_no_tokens_of_media_however_likely_they_are(cases, family, monkeypatch):
    case = cases(family)
    tokens = AutoTokenizer.from_pretrained(case.folder).convert_tokens_to_ids(MEDIA[family])
    assert set(media_tokens(case.model.config)) == set(tokens)
    policy = HuggingFacePolicy(case.folder, max_new_tokens=6, eos_token_id=[], temperature=1.0)
    with torch.no_grad():  # all other logits are 0, and these are positive in about half of the places
        policy.model.lm_head.weight.zero_()
        policy.model.lm_head.weight[tokens] = 1.0
    for greedy in (True, False):
        output = policy.generate(case.batch, greedy=greedy)
        answers = output["output_ids"][response_mask(output)]
        assert len(answers) == 24 and not torch.isin(answers, torch.tensor(tokens)).any()
    scored = policy.get_logprobs(output)["logprobs"]
    gap = (scored - output["logprobs"])[response_mask(output)].abs().max()
    assert float(gap) < 1e-4, "over all tokens, as in training"
    assert policy.train(output, NLLLossFn())["num_tokens"] == 24
    monkeypatch.setattr(hf_generation, "media_tokens", lambda config: [])
    output = policy.generate(case.batch, greedy=True)
    assert torch.isin(output["output_ids"][response_mask(output)], torch.tensor(tokens)).any(), "control"
    if family == "llava":
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            policy.train(output, NLLLossFn())


@pytest.mark.parametrize("family", USED)
def test_a_step_has_the_gradient_of_the_rows_one_by_one(cases, family, monkeypatch):
    case = cases(family)
    policy = HuggingFacePolicy(case.folder, micro_batch_size=2, max_grad_norm=1e9)
    found = {}
    monkeypatch.setattr(policy._optimizer, "step", lambda: found.update(
        {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}))  # fmt: skip
    metrics = policy.train(case.batch, NLLLossFn())
    model = HuggingFacePolicy(case.folder).model.train()
    loss = -torch.cat(case.logprobs(model)).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("vis" in name and gradient.abs().max() > 1e-6 for name, gradient in expected.items())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < 1e-5 * max(1.0, float(gradient.abs().max())), name


def test_a_tensor_holds_one_image_of_each_row(tmp_path):
    case = Case("llava", str(make_tiny_vlm("llava", tmp_path)), num_images=(1, 1, 1, 1))
    policy = HuggingFacePolicy(case.folder, learning_rate=1e-3, micro_batch_size=2)
    listed = policy.get_logprobs(case.batch)["logprobs"]
    case.batch["pixel_values"] = torch.cat(case.batch["pixel_values"])
    assert policy.get_logprobs(case.batch)["logprobs"].equal(listed)
    losses = [policy.train(case.batch, DPOLossFn())["loss"] for _ in range(3)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < losses[0]
    loss_fn = NLLLossFn()
    again = HuggingFacePolicy(case.folder)
    assert float(loss_fn(again.model, case.batch)) == pytest.approx(again.train(case.batch, loss_fn)["loss"], rel=1e-5)


def test_images_that_would_be_lost_are_refused(cases, tiny_lm, prompts):
    batch = BatchedDataDict(prompts | {"pixel_values": torch.zeros(4, 3, 8, 8)})
    with pytest.raises(ConfigError, match="'pixel_values', which LlamaForCausalLM does not accept"):
        HuggingFacePolicy(tiny_lm()).get_logprobs(batch)
    for key in ("position_ids", "inputs_embeds"):
        with pytest.raises(ConfigError, match=f"The batch has .'{key}'., which is not passed to LlamaForCausalLM"):
            HuggingFacePolicy(tiny_lm()).get_logprobs(BatchedDataDict(prompts | {key: torch.zeros(4, 6)}))
    flat = cases("llava").batch | {"pixel_values": torch.cat(cases("llava").batch["pixel_values"])[:3]}
    for call in ("generate", "get_logprobs"):
        with pytest.raises(ConfigError, match="'pixel_values': 3.*Pass images as a list"):
            getattr(HuggingFacePolicy(cases("llava").folder), call)(BatchedDataDict(flat))
    packed = HuggingFacePolicy(cases("llava").folder, sequence_packing=True, max_tokens_per_microbatch=400)
    with pytest.raises(ConfigError, match="does not support pixel_values. Pass sequence_packing=False"):
        packed.get_logprobs(cases("llava").batch)


def test_operations_on_token_columns_leave_images_whole():
    batch = BatchedDataDict({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
                             "scores": torch.ones(2, 3, 5), "pixel_values": torch.ones(2, 3, 4, 4)})  # fmt: skip
    shapes = {key: list(value.shape) for key, value in batch.without_padding_columns().items()}
    assert shapes == {"input_ids": [2, 2], "attention_mask": [2, 2], "scores": [2, 2, 5], "pixel_values": [2, 3, 4, 4]}
    batch.truncate_tensors(dim=1, truncated_len=1)
    assert batch["pixel_values"].shape == (2, 3, 4, 4) and batch["scores"].shape == (2, 1, 5)
    listed = BatchedDataDict({"pixel_values": [torch.ones(1, 3), torch.ones(2, 3)]})
    assert {tensor.device.type for tensor in listed.to("meta")["pixel_values"]} == {"meta"}
