"""The dataset scripts that users copy: what each gives to a run, and what its rows become."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from rlinf.data.video import VideoWriter
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.options import from_mapping
from rlinf.recipes import launch_worker as launching
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.questions import REASONING_REQUEST
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.samples import BadRowError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from chat_models import chat_tokenizer
from make_tiny_vlm import make_tiny_vlm

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "reasoning" / "tools" / "dataset"

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '</s>' if m['role'] == 'assistant' else '' }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def recipe(**method) -> RecipeConfig:
    dataset = {"name": method.pop("name", "none"), "subset": method.pop("subset", "")}
    return from_mapping(RecipeConfig, {"train": {"train_policy": {"dataset": dataset, **method}}})


@pytest.fixture
def packer_of(monkeypatch):
    """Return a function that runs a script, and returns the packer that it launches, after ``setup``."""

    def run(script: str, processor, **method):
        given: dict = {}
        monkeypatch.setattr(launching, "launch_worker", lambda **arguments: given.update(arguments))
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
        given["data_packer"].setup(recipe(**method), processor)
        return given["data_packer"]

    return run


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = make_tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("vlm"))
    made = load_vlm_processor(folder, AutoConfig.from_pretrained(folder))
    made.chat_template = TEMPLATE
    return made


def learned(tokenizer, sample) -> str:
    return tokenizer.decode([token for token, flag in zip(sample.input_ids, sample.token_mask, strict=True) if flag])


def shown(processor, ids) -> str:
    return processor.tokenizer.decode([token for token in ids if token != processor.image_token_id])


def test_every_script_is_tested_and_does_nothing_when_it_is_imported():
    assert sorted(path.stem for path in SCRIPTS.glob("*.py")) == [
        "cosmos_grpo", "cosmos_sft", "dpo_pairs", "dummy_sft", "gsm8k_grpo", "hf_vlm_sft", "raw_text_sft"
    ]  # fmt: skip
    for path in SCRIPTS.glob("*.py"):
        assert runpy.run_path(str(path))["launch_worker"] is launching.launch_worker


@pytest.mark.parametrize(("script", "column"), [("dummy_sft", "conversation"), ("raw_text_sft", "talk")])
def test_raw_text_is_one_line_for_each_message(packer_of, script, column):
    tokenizer = chat_tokenizer("mistral")
    packer = packer_of(script, tokenizer, conversation_column_name="talk")
    messages = [{"role": role, "content": role.upper()} for role in ("user", "user", "assistant", "system")]
    sample = packer.sample({column: messages})
    assert tokenizer.decode(sample.input_ids) == "user: USER\nuser: USER\nassistant: ASSISTANT\nsystem: SYSTEM"
    assert all(sample.token_mask)
    assert tokenizer.decode(packer.sample({column: "stays, as it is"}).input_ids) == "stays, as it is"


def test_gsm8k_asks_the_question_and_rewards_the_number(packer_of):
    tokenizer = chat_tokenizer("phi")
    packer = packer_of("gsm8k_grpo", tokenizer)
    row = {"question": "What is 40 + 2?", "answer": "40 + 2 = 42\n#### 42"}
    prompt = packer.prompt(row)
    text = tokenizer.decode(prompt.input_ids)
    assert text.startswith("<|im_start|>user<|im_sep|>What is 40 + 2? ") and "####" in text
    assert text.endswith("<|im_end|><|im_start|>assistant<|im_sep|>")
    rewards = make_rewards("gsm8k")
    assert rewards("so it is\n#### 42", prompt)[0] == 1 and rewards("#### 41", prompt)[0] == 0
    with pytest.raises(BadRowError, match="no column 'question'"):
        packer.prompt({"text": ""})


def test_preferences_are_pairs(packer_of):
    tokenizer = chat_tokenizer("phi")
    row = {"prompt": "Say yes", "chosen": "yes", "rejected": "no"}
    chosen, rejected = packer_of("dpo_pairs", tokenizer).pair(row)
    assert (learned(tokenizer, chosen), learned(tokenizer, rejected)) == ("yes<|im_end|>", "no<|im_end|>")


def test_images_of_a_conversation_are_in_their_places(packer_of, processor):
    packer = packer_of("hf_vlm_sft", processor, conversation_column_name="messages")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    parts = [{"type": "image", "text": None, "index": 0}, {"type": "text", "text": "what is it?", "index": None}]
    answer = [{"type": "text", "text": "a red block", "index": None}]
    sample = packer.sample(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], "images": [pixels]}
    )
    assert learned(processor.tokenizer, sample).strip() == "a red block</s>" and len(
        sample.model_inputs["pixel_values"]
    )


@pytest.fixture
def videos(tmp_path, monkeypatch) -> str:
    """Return the name of a mirrored dataset that has one video of 3 seconds."""
    pytest.importorskip("av", reason="needs rlinf[lerobot]")
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path))
    writer = VideoWriter(tmp_path / "datasets" / "owner" / "data" / "robovqa" / "video_clips" / "a.mp4", 10, 32, 32)
    writer.append(np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8))
    writer.close()
    return "owner/data"


def test_the_video_of_a_row_goes_before_what_the_user_says(packer_of, processor, videos):
    packer = packer_of("cosmos_sft", processor, name=videos, subset="robovqa")
    talk = [("system", "be brief"), ("user", "what is it?"), ("assistant", "a block")]
    row = {"conversations": [{"role": role, "content": text} for role, text in talk], "video": "clips/a.mp4"}
    sample = packer.sample(row)
    assert learned(processor.tokenizer, sample).strip() == "a block</s>"
    assert shown(processor, sample.input_ids).count("<|vision_start|>") == 3, "one frame a second"
    assert len(sample.model_inputs["image_grid_thw"]) == 3
    with pytest.raises(BadRowError, match="its video 'clips/b.mp4' is not among the 1 videos in"):
        packer.sample(row | {"video": "clips/b.mp4"})


def test_a_choice_is_asked_with_its_options_and_rewarded_for_letter_and_format(packer_of, processor, videos):
    packer = packer_of("cosmos_grpo", processor, name=videos, subset="robovqa")
    pair = {"question": "What is it?", "index2ans": {"B": "a zone", "A": "a block", "C": None}, "answer": "A"}
    prompt = packer.prompt({"qa_pairs": pair, "video": "a.mp4"})
    text = shown(processor, prompt.input_ids)
    assert (
        text.count("<|vision_start|>") == 3 and "What is it?\n(A) a block\n(B) a zone\nAnswer with the letter" in text
    )
    assert "(C)" not in text and prompt.reference == "A"
    rewards = make_rewards(["single_choice", "format"])
    assert rewards("<think>\nit is\n</think>\n\n<answer>\nA\n</answer>", prompt)[0] == 2
    assert rewards("<think>it is</think> <answer>B</answer>", prompt)[0] == 0
    example = REASONING_REQUEST[REASONING_REQUEST.index("<think>") :]
    assert example in text and make_rewards("format").functions["format"](example) == 1
