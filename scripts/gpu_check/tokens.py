"""A training step of language models: LoRA of a 7B, and a 3B in full."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

from gpu_check.openvla import save_drawn
from gpu_check.rows import GB, NEEDS_FULL_SIZE, Rows, Setting

SEVEN_BILLION = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4
}  # fmt: skip
THREE_BILLION = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2
}  # fmt: skip
VOCABULARY, TINY_VOCABULARY = 152064, 512


def model_config(setting: Setting, sizes: dict[str, int]) -> Any:
    """Return the configuration of a Qwen2 of these sizes, or of a tiny one."""
    from transformers import Qwen2Config

    sizes, vocabulary = (TINY, TINY_VOCABULARY) if setting.tiny else (sizes, VOCABULARY)
    return Qwen2Config(**sizes, vocab_size=vocabulary, dtype="bfloat16", tie_word_embeddings=False)


def drawn_model(setting: Setting, sizes: dict[str, int]) -> Path:
    """Return the cache's folder with a language model; draw it on the device if there is none."""
    from transformers import Qwen2ForCausalLM

    folder = setting.cache / f"qwen_{sizes['hidden_size']}{'_tiny' * setting.tiny}"
    if folder.is_dir():
        return folder
    with torch.device(setting.device):
        model = Qwen2ForCausalLM(model_config(setting, sizes)).to(torch.bfloat16)
    save_drawn(model, folder)
    del model
    freed(setting)
    return folder


def freed(setting: Setting) -> None:
    """Give the memory of former models back."""
    gc.collect()
    if setting.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def g4_adapters(rows: Rows, setting: Setting) -> None:
    """Steps of ``HuggingFacePolicy`` on 8 x 2048 tokens: LoRA of a 7B."""
    token_step(rows, setting, "7B, LoRA", SEVEN_BILLION, {"lora": {}})


def g4_in_full(rows: Rows, setting: Setting) -> None:
    """Steps of ``HuggingFacePolicy`` on 8 x 2048 tokens: a 3B in full."""
    token_step(rows, setting, "3B, in full", THREE_BILLION, {})


def token_step(rows: Rows, setting: Setting, name: str, sizes: dict[str, int], arguments: dict) -> None:
    """Take two steps of negative log-likelihood on random tokens; the second one is timed."""
    from rlinf.algorithms import NLLLossFn
    from rlinf.distributed import BatchedDataDict
    from rlinf.models import HuggingFacePolicy

    source = drawn_model(setting, sizes)
    length, vocabulary = (32, TINY_VOCABULARY) if setting.tiny else (2048, VOCABULARY)
    policy = HuggingFacePolicy(str(source), torch_dtype="bfloat16", device_map=setting.device, **arguments)
    ids = torch.randint(0, vocabulary, (8, length), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": torch.ones(8, length)}
    losses = []
    for _ in range(2):
        start = time.monotonic()
        losses.append(policy.train(BatchedDataDict(data), NLLLossFn())["loss"])
    rows.holds(f"{name}: the losses are finite", bool(torch.isfinite(torch.tensor(losses)).all()), True)
    rows.state(f"{name}: tokens per second in a step of 8 x {length}", f"{8 * length / (time.monotonic() - start):.0f}")
    what = (f"{name}: peak GPU memory over its estimate", f"{name}: peak of reserved over allocated memory")
    if setting.is_gpu:
        rows.state(f"{name}: how memory is used", policy.pass_plan)
    if setting.is_full:
        allocated = torch.cuda.max_memory_allocated()
        rows.state(f"{name}: peak GPU memory", f"{allocated / GB:.2f} GB")
        rows.at_most(what[0], allocated / policy.pass_plan.memory, 1.05)
        rows.at_most(what[1], torch.cuda.max_memory_reserved() / allocated, 1.25)
    else:
        for each in what:
            rows.not_measured(each, NEEDS_FULL_SIZE)
    del policy
    freed(setting)
