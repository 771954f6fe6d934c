"""A checkpoint of a token policy as a folder for others: it loads with the Auto classes and computes what the policy computed."""

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from rlinf.checkpoints.checkpoint import save_checkpoint
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.hf_model import HFModel
from rlinf.manifest import Manifest, verify_files
from rlinf.models.config import LoraConfig
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.models.lora import apply_lora
from rlinf.recipes.hf_folder import INDEX_FILE, HFFolder, token_manifest, write_chunks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import FAMILIES, make_tiny_vlm

IDS = torch.tensor([[1, 5, 9, 4], [1, 8, 3, 7]])


def with_tokenizer(folder: str, target: Path) -> str:
    """Copy a model, and add the files that public ones have beside their weights."""
    shutil.copytree(folder, target)
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "a", "b", "c", "d"])}
    words = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )  # fmt: skip
    tokenizer.save_pretrained(target)
    (target / "added_tokens.json").write_text("{}")
    (target / "modeling_own.py").write_text("# code that comes with the weights\n")
    (target / "README.md").write_text("says something else\n")
    (target / "pytorch_model.bin").write_bytes(b"old weights")
    return str(target)


def trained(source: str, seed: int = 3, lora: LoraConfig | None = None, dtype=torch.float32):
    """Return the model of a folder after some training."""
    model = HFModel.from_pretrained(source, dtype=dtype)
    if lora is not None:
        model.model.peft_config = apply_lora(model, lora).peft_config
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model.model.eval()


def saved(folder: Path, model, source: str, lora: LoraConfig | None = None, data: dict | None = None) -> Path:
    manifest = token_manifest(model, source, precision="float32", seed=0, policy_version=3, lora=lora)
    return save_checkpoint(
        folder / "checkpoints" / "step_3", model=model, optimizer=None, loop_state={"step": 3, "trainer": {"data": data or {}}}, run_config={"seed": 0},
        manifest=manifest, with_policy=False,
    )  # fmt: skip


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("family, fields", [
    ("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}),
    ("mixtral", {"num_local_experts": 4}), ("qwen2", {}),
])  # fmt: skip
def test_an_exported_folder_loads_and_computes_the_same(tiny_lm, tmp_path, family, fields):
    source = with_tokenizer(tiny_lm(family, **fields), tmp_path / "source")
    model = trained(source)
    HFFolder(source, torch.float32, chunk_bytes=4096)(saved(tmp_path, model, source), tmp_path / "final")
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(read.eval()), logits(model)) and type(read) is type(model)
    untrained = AutoModelForCausalLM.from_pretrained(source).eval()
    assert not torch.allclose(logits(read), logits(untrained), atol=1e-3), "a control"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer("a b d")["input_ids"] == [3, 4, 6] and tokenizer.chat_template
    wanted = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "added_tokens.json",
        "modeling_own.py",
    }
    assert wanted | {"chat_template.jinja", "config.yaml", INDEX_FILE} <= files_of(tmp_path / "final")
    assert not {"README.md", "pytorch_model.bin", "model.safetensors"} & files_of(tmp_path / "final")
    verify_files(tmp_path / "final", Manifest.load(tmp_path / "final"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_vision_language_model_is_exported_with_its_processor(tmp_path, family):
    source = str(make_tiny_vlm(family, tmp_path / "source"))
    model = trained(source)
    HFFolder(source, torch.float32)(saved(tmp_path, model, source), tmp_path / "final")
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "final").eval()
    own, found = model.state_dict(), read.state_dict()
    assert own.keys() == found.keys() and all(torch.equal(own[name], found[name]) for name in own)
    processors = [load_vlm_processor(each, model.config) for each in (source, tmp_path / "final")]
    assert processors[0].to_dict() == processors[1].to_dict() and processors[0].tokenizer.get_vocab()
    assert torch.equal(logits(read), logits(model))
    configurations = {path.name for path in Path(source).iterdir() if path.suffix in (".json", ".jinja", ".txt")}
    assert {name for name in configurations if "index" not in name} <= files_of(tmp_path / "final")
    # Adapters are merged into the names of the source's files.
    lora = LoraConfig(rank=2)
    model = trained(source, lora=lora)
    HFFolder(source, torch.float32, lora=lora)(saved(tmp_path, model, source, lora), tmp_path / "merged")
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(read), logits(model), atol=1e-4, rtol=1e-4)
    assert keys_of(tmp_path / "merged") == keys_of(Path(source))


def test_generation_config_names_the_end_tokens_of_the_run_and_keeps_the_rest(tiny_lm, tmp_path):
    source = Path(with_tokenizer(tiny_lm(), tmp_path / "source"))
    model, own = trained(str(source)), source / "generation_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"temperature": 0.6, "do_sample": False}))
    for name, ends, written in (("same", 2, 2), ("more", [2, 5], [2, 5]), ("older", None, 2)):
        checkpoint = saved(tmp_path / name, model, str(source), data={"end_tokens": ends} if ends else {})
        HFFolder(str(source), torch.float32)(checkpoint, tmp_path / name / "final")
        found = json.loads((tmp_path / name / "final" / own.name).read_text())
        assert found == json.loads(own.read_text()) | {"eos_token_id": written}
    own.unlink()
    HFFolder(str(source), torch.float32)(tmp_path / "more" / "checkpoints" / "step_3", tmp_path / "new")
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "new").generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 5], 0)


def test_adapters_are_merged_or_stay_apart(tiny_lm, tmp_path):
    lora, source = LoraConfig(rank=2, alpha=8), tiny_lm()
    model = trained(source, lora=lora)
    checkpoint = saved(tmp_path, model, source, lora)
    HFFolder(source, torch.float32, lora=lora)(checkpoint, tmp_path / "merged")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(read), logits(model), atol=1e-5, rtol=1e-5)
    assert Manifest.load(tmp_path / "merged").lora == {"state": "merged"}
    HFFolder(source, torch.float32, lora=lora, merge_lora=False)(checkpoint, tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files_of(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(source).eval()
    before = logits(base)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()), logits(model))
    assert not torch.allclose(before, logits(model), atol=1e-2), "a control: the adapters do something"
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == source
    with pytest.raises(CheckpointError, match="contains adapters, but the export is configured without adapters"):
        HFFolder(source, torch.float32)(checkpoint, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def keys_of(folder: Path) -> list[str]:
    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    return sorted(names)


def test_numbers_are_written_in_the_format_that_is_asked_for(tiny_lm, tmp_path):
    source = tiny_lm()
    model = trained(source)
    HFFolder(source, torch.bfloat16)(saved(tmp_path, model, source), tmp_path / "final")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    assert {tensor.dtype for tensor in read.state_dict().values()} == {torch.bfloat16}
    assert all(torch.equal(read.state_dict()[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "final" / "config.json").read_text())["dtype"] == "bfloat16"


def test_chunks_hold_at_most_their_limit_and_the_index_names_every_tensor(tmp_path, caplog):
    storage = torch.arange(4096.0)
    tensors = {
        "too_large": torch.ones(100, 100), "strided": torch.arange(600.0).view(20, 30).T, "first": storage[:200],
        "second": storage[100:300], "same": storage[:200], "half": torch.ones(300, dtype=torch.bfloat16),
        "scalar": torch.tensor(3), "empty": torch.zeros(0),
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "rlinf"):
        write_chunks(tmp_path, tensors.items(), 2500)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    chunks = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in chunks] == [f"{number:05d}.safetensors" for number in range(4)]
    assert [record.message for record in caplog.records] == [
        f"Saved chunk {n} to {n:05d}.safetensors" for n in range(4)
    ]
    for path in chunks:
        with safe_open(path, framework="pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}
        assert held and all(torch.equal(held[name], tensors[name]) for name in held)
        assert set(held) == {name for name, place in index["weight_map"].items() if place == path.name}
        assert sum(t.numel() * t.element_size() for t in held.values()) <= 2500 or set(held) == {"too_large"}


def test_a_whole_folder_is_replaced_by_a_whole_one_only_and_not_deleted_before(tiny_lm, tmp_path, monkeypatch):
    source, output, deleted, rmtree = tiny_lm(), tmp_path / "final", [], shutil.rmtree
    checkpoint = saved(tmp_path, trained(source), source)
    export = HFFolder(source, torch.float32)
    export(checkpoint, output)
    (output / "former").write_text("")
    before = keys_of(output)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rlinf.recipes.hf_folder.save_file", full)
        with pytest.raises(OSError, match="MiB free"):
            export(checkpoint, output)
    assert keys_of(output) == before and "former" in files_of(output) and not list(tmp_path.glob(".final*"))

    def record(path, *arguments, **more):
        deleted.append(Path(path).name)
        rmtree(path, *arguments, **more)

    monkeypatch.setattr(shutil, "rmtree", record)
    export(checkpoint, output)
    assert ".final.old" in deleted and "final" not in deleted
    assert "former" not in files_of(output) and not list(tmp_path.glob(".final*"))
    verify_files(output, Manifest.load(output))


def test_what_cannot_be_merged_is_said_before_training(tiny_lm, tmp_path):
    source = Path(shutil.copytree(tiny_lm(), tmp_path / "source"))
    (source / "model.safetensors").rename(source / "weights.safetensors")
    with pytest.raises(ConfigError, match="has neither model.safetensors nor .*merge_lora=false"):
        HFFolder(str(source), torch.float32, lora=LoraConfig())
    HFFolder(str(source), torch.float32, lora=LoraConfig(), merge_lora=False)
    with pytest.raises(ConfigError, match="adapted weights .lm_head.weight.* are tied to a different layer"):
        HFFolder(tiny_lm("llama", tie_word_embeddings=True), torch.float32, lora=LoraConfig(target_modules=["lm_head"]))
