"""Packers on vision-language models: images belong to their places, and no image token is learned."""

import io
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from rlinf.algorithms import NLLLossFn
from rlinf.data.video import VideoWriter
from rlinf.models import HuggingFacePolicy
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.messages import images_of
from rlinf.recipes.packers import ChatPacker, PromptPacker
from rlinf.recipes.samples import BadRowError, collate
from rlinf.recipes.videos import find_video, read_frames

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import FAMILIES, IMAGE_SIZE, make_tiny_vlm

USED = ("llava", "gemma3", "qwen2_5_vl", "idefics3", "internvl")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '</s>' if m['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def processors(tmp_path_factory):
    made = {}

    def get(family: str):
        if family not in made:
            folder = make_tiny_vlm(family, tmp_path_factory.mktemp(family))
            config = AutoConfig.from_pretrained(folder)
            made[family] = load_vlm_processor(folder, config)
            made[family].token_in_model = config.image_token_id
            made[family].chat_template = TEMPLATE.replace("IMAGE", FAMILIES[family].get("image_text", "<image>"))
        return made[family]

    return get


def ready(packer, processor, folder="none", max_length=2000):
    names = {"conversation_column_name": "messages", "prompt_column_name": "prompt", "response_column_name": ""}
    dataset = SimpleNamespace(name=str(folder), subset="")
    method = SimpleNamespace(**names, system_prompt="", dataset=dataset)
    policy = SimpleNamespace(model_max_length=max_length)
    packer.setup(SimpleNamespace(policy=policy, train=SimpleNamespace(train_policy=method)), processor)
    return packer


def image(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def said(role: str, *parts) -> dict:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


IMAGE = {"type": "image"}
TALK = [said("user", IMAGE, "what is this?"), said("assistant", "a red block"), said("user", "and ", IMAGE, " this?"),
        said("assistant", "the zone")]  # fmt: skip


def runs(sample) -> list[list[int]]:
    """Return the runs of learned tokens."""
    found, last = [], False
    for token, learned in zip(sample.input_ids, sample.token_mask, strict=True):
        if learned:
            found[-1:] = [[*found[-1], token]] if last else [*found[-1:], [token]]
        last = learned
    return found


@pytest.mark.parametrize("family", USED)
def test_answers_are_learned_and_images_are_not(processors, family):
    processor = processors(family)
    packer, images = ready(ChatPacker(), processor), [image(1), image(2)]
    sample = packer.sample({"messages": TALK, "images": images})
    text = processor.apply_chat_template(TALK)
    expected = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    assert sample.input_ids == expected["input_ids"][0].tolist(), "what the processor makes of the conversation"
    for key, value in sample.model_inputs.items():
        assert torch.equal(value, expected[key]), key
    assert "pixel_values" in sample.model_inputs
    decoded = [processor.tokenizer.decode(run).strip() for run in runs(sample)]
    assert decoded == ["a red block</s>", "the zone</s>"]
    masked = [token for token, learned in zip(sample.input_ids, sample.token_mask, strict=True) if not learned]
    image_token = processor.token_in_model
    assert sample.input_ids.count(image_token) == masked.count(image_token) >= 4, "each image takes several tokens"


@pytest.mark.parametrize(
    ("row", "images"),
    [
        ({"images": None, "image": None}, []),
        ({"images": None, "image": "a.png"}, ["a.png"]),
        ({"images": [None], "image": "a.png"}, ["a.png"]),
        ({"images": ("a.png", "b.png"), "image": None}, ["a.png", "b.png"]),
        ({"images": "a.png"}, ["a.png"]),
    ],
)
def test_a_column_of_nulls_is_no_column(row, images):
    assert images_of(row) == images


@pytest.mark.parametrize("family", USED)
def test_rows_without_images_and_prompts(processors, family):
    processor = processors(family)
    sample = ready(ChatPacker(), processor).sample({"messages": [said("user", "hello"), said("assistant", "the zone")]})
    assert [processor.tokenizer.decode(run).strip() for run in runs(sample)] == ["the zone</s>"]
    assert "pixel_values" not in sample.model_inputs
    row = {"prompt": "what is this?", "image": image(1)}
    prompt = ready(PromptPacker(), processor).prompt(row)
    text = processor.apply_chat_template([said("user", IMAGE, "what is this?")], add_generation_prompt=True)
    assert prompt.input_ids == processor(text=[text], images=[row["image"]], add_special_tokens=False)["input_ids"][0]
    assert prompt.row is row and "pixel_values" in prompt.model_inputs


def test_images_come_from_paths_bytes_parts_and_by_index(processors, tmp_path):
    one, two = image(1), image(2)
    one.save(tmp_path / "one.png")
    stored = io.BytesIO()
    two.save(stored, "PNG")
    packer = ready(ChatPacker(), processors("llava"), tmp_path)
    expected = packer.sample({"messages": TALK, "images": [one, two]}).model_inputs["pixel_values"]
    second = {"bytes": stored.getvalue(), "path": None}
    for images in (
        ["one.png", second],
        ["one.png", stored.getvalue()],
        [{"bytes": None, "path": str(tmp_path / "one.png")}, np.asarray(two)],
    ):
        assert torch.equal(packer.sample({"messages": TALK, "images": images}).model_inputs["pixel_values"], expected)
    inside = [said("user", IMAGE | {"image": "one.png", "index": None, "text": None}, "what is this?"), TALK[1],
              said("user", "and ", IMAGE | {"image": second}, " this?"), TALK[3]]  # fmt: skip
    assert torch.equal(packer.sample({"messages": inside}).model_inputs["pixel_values"], expected)
    swapped = [said("user", IMAGE | {"index": 1}, "what is this?"), TALK[1], said("user", "and ", IMAGE | {"index": 0}, " this?"),
               TALK[3]]  # fmt: skip
    found = packer.sample({"messages": swapped, "images": [one, two]}).model_inputs["pixel_values"]
    assert torch.equal(found, expected.flip(0)) and not torch.equal(found, expected)


def test_a_mark_in_a_text_is_the_next_image(processors):
    packer, images = ready(ChatPacker(), processors("gemma3")), [image(1), image(2)]
    talk = [{"from": "human", "value": "<image>what is this?"}, {"from": "gpt", "value": "a red block"},
            {"from": "human", "value": "and <image> this?"}, {"from": "gpt", "value": "the zone"}]  # fmt: skip
    found, expected = (packer.sample({"messages": each, "images": images}) for each in (talk, TALK))
    assert found.input_ids == expected.input_ids and found.token_mask == expected.token_mask
    assert torch.equal(found.model_inputs["pixel_values"], expected.model_inputs["pixel_values"])
    with pytest.raises(BadRowError, match="messages refer to image 1 .from 0., but its column 'images' has 1"):
        packer.sample({"messages": talk, "images": images[:1]})
    asked = ({"prompt": text, "images": images[:1]} for text in ("<image>what is this?", "what is this?"))
    marked, before = (ready(PromptPacker(), processors("gemma3")).prompt(row) for row in asked)
    assert marked.input_ids == before.input_ids
    text = [said("user", "an <image> tag"), said("assistant", "the zone")]
    plain = [{"role": each["role"], "content": each["content"][0]["text"]} for each in text]
    found, expected = (packer.sample({"messages": each}) for each in (plain, text))
    assert found.input_ids == expected.input_ids and "pixel_values" not in found.model_inputs, (
        "without images it is text"
    )


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "messages refer to image 0 .from 0., but its column 'images' has 0"),
        (["one.png"] * 3, "column 'images' has 3 images, but its messages refer to 2"),
        (["missing.png", "one.png"], "the image '.*missing.png' does not exist"),
        ([{"bytes": b"x", "path": None}, "one.png"], "the image in the dataset cannot be read"),
    ],
)
def test_images_that_cannot_be_read_are_named(processors, tmp_path, images, message):
    image(1).save(tmp_path / "one.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "one.png").read_bytes()[:200])
    with pytest.raises(BadRowError, match=message):
        ready(ChatPacker(), processors("llava"), tmp_path).sample({"messages": TALK, "images": images})


def test_an_image_token_in_a_text_is_refused(processors):
    messages = [*TALK[:2], said("user", "what is <image>?"), said("assistant", "a block")]
    with pytest.raises(BadRowError, match="LlavaProcessor"):
        ready(ChatPacker(), processors("llava")).sample({"messages": messages, "images": [image(1)]})


def test_an_image_is_never_cut(processors):
    row = {"messages": TALK, "images": [image(1), image(2)]}
    length = len(ready(ChatPacker(), processors("llava")).sample(row).input_ids)
    with pytest.raises(
        BadRowError, match=f"it has {length} tokens, more than policy.model_max_length={length - 1}, and truncation"
    ):
        ready(ChatPacker(), processors("llava"), max_length=length - 1).sample(row)
    assert len(ready(ChatPacker(), processors("llava"), max_length=length).sample(row).input_ids) == length


@pytest.fixture
def clip(tmp_path) -> Path:
    """Return a video of 3 seconds: each second has a grey of its own."""
    pytest.importorskip("av", reason="needs rlinf[lerobot]")
    writer = VideoWriter(tmp_path / "data" / "clips" / "a.mp4", 10, 32, 64)
    writer.append(
        np.repeat(np.array([40, 120, 200], np.uint8), 10)[:, None, None, None] * np.ones((1, 32, 64, 3), np.uint8)
    )
    writer.close()
    return writer.path


def test_frames_are_read_at_regular_times(clip):
    def greys(**options) -> list[int]:
        return [round(float(np.asarray(frame).mean()) / 10) for frame in read_frames(clip, **options)]

    assert greys(fps=1) == [4, 12, 20] and greys(fps=2) == [4, 4, 12, 12, 20, 20]
    assert greys(fps=10, max_frames=3) == [4, 12, 20] and len(greys(fps=10)) == 30
    assert read_frames(clip)[0].size == (64, 32) and read_frames(clip, max_pixels=512)[0].size == (32, 16)


def test_the_frames_of_a_video_take_its_place(processors, clip):
    video = {"type": "video", "video": "clips/a.mp4", "fps": 1, "max_pixels": 81920}
    packer = ready(ChatPacker(), processors("qwen2_5_vl"), clip.parents[1])
    sample = packer.sample({"messages": [said("user", video, "what is this?"), TALK[1]]})
    frames = read_frames(clip)
    same = packer.sample({"messages": [said("user", IMAGE, IMAGE, IMAGE, "what is this?"), TALK[1]], "images": frames})
    assert sample.input_ids == same.input_ids and sample.token_mask == same.token_mask
    assert torch.equal(sample.model_inputs["pixel_values"], same.model_inputs["pixel_values"])
    with pytest.raises(BadRowError, match="its video 'clips/b.mp4' is not among the 1 videos in"):
        packer.sample({"messages": [said("user", video | {"video": "clips/b.mp4"}, "?"), TALK[1]]})
    (clip.parent / "broken.mp4").write_bytes(clip.read_bytes()[:300])
    with pytest.raises(BadRowError, match="broken.mp4' cannot be read"):
        read_frames(clip.parent / "broken.mp4")


def test_archives_of_clips_are_unpacked_once_into_the_cache(clip, tmp_path, monkeypatch):
    cache = tmp_path / "cosmos"
    monkeypatch.setenv("COSMOS_CACHE", str(cache))
    subset = cache / "datasets" / "owner" / "data" / "robovqa"
    (subset / "clips").mkdir(parents=True)
    with tarfile.open(subset / "clips" / "clips_part_000.tar.gz", "w:gz") as archive:
        archive.add(clip, "clips/a.mp4")
    found = find_video("clips/a.mp4", "owner/data", "robovqa")
    assert found == subset / "video_clips" / "a.mp4" and found.read_bytes() == clip.read_bytes()
    assert (subset / "video_clips" / ".prepared").exists()
    changed = found.stat().st_mtime_ns
    find_video("a.mp4", "owner/data", "robovqa")
    assert found.stat().st_mtime_ns == changed
    assert sorted(path.name for path in subset.iterdir()) == [".video_clips.lock", "clips", "video_clips"]


def test_a_tiny_model_learns_four_rows_and_counts_their_answers_only(tmp_path):
    folder = make_tiny_vlm("llava", tmp_path)
    processor = load_vlm_processor(folder, AutoConfig.from_pretrained(folder))
    processor.chat_template = TEMPLATE.replace("IMAGE", "<image>")
    packer = ready(ChatPacker(), processor)
    answers = ("the zone", "a red block", "a blue block", "the zone")
    samples = [
        packer.sample(
            {"messages": [said("user", IMAGE, "what is this?"), said("assistant", text)], "images": [image(seed)]}
        )
        for seed, text in enumerate(answers)
    ]
    policy = HuggingFacePolicy(str(folder), learning_rate=3e-3, micro_batch_size=2)
    batch = collate(samples)
    steps = [policy.train(batch, NLLLossFn()) for _ in range(6)]
    assert steps[0]["num_tokens"] == sum(len(run) for sample in samples for run in runs(sample))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
