"""Action generation of OpenVLA against transformers' ``generate`` with the same weights.

``ours`` is ``predict_action_batch``. ``peer`` is the usual form of an RL policy on transformers: ``generate`` with scores, logits
and hidden states of every step and a logits processor that leaves the action bins, on the public OpenVLA form of the
model (image and text embedded at the first step, plain Llama layers, logits of every position); ``peer_last`` is the same, asking
transformers for the logits of the last position only. Vision tower and projector are the same modules for all three.
For parallel decoding (OpenVLA-OFT: a chunk of 8 actions in one pass) both peers are one pass of transformers' Llama.

All three must choose the same greedy tokens, or the script stops. Times are medians of alternating calls that sample;
memory is the peak of one call above what the process held before it (Linux, or CUDA's allocator).

    python benchmarks/action_inference.py [--device cuda --precision bf16] [--batch-sizes 8 1 32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlinf.models.embodiment.openvla.config import OpenVLAConfig
from rlinf.models.embodiment.openvla.policy import OpenVLAForRLActionPrediction
from rlinf.models.sampling import sample_tokens
from rlinf.types import ActionPrediction

ACTION_DIM = 7
CHUNKS = {"autoregressive": 1, "parallel": 8}
MIB = 2**20


def build(arguments: argparse.Namespace, action_decoding: str) -> OpenVLAForRLActionPrediction:
    """OpenVLA with two towers, a fused projector and the public vocabulary, at the sizes asked for."""
    torch.manual_seed(0)
    heads = arguments.hidden_size // 64
    vision = {
        "embed_dim": arguments.vision_dim,
        "depth": arguments.vision_layers,
        "num_heads": arguments.vision_dim // 64,
    }
    config = OpenVLAConfig(
        image_sizes=[arguments.image_size] * 2,
        vision_overrides=[vision, vision],
        action_decoding=action_decoding,
        text_config={
            "vocab_size": arguments.vocab_size, "hidden_size": arguments.hidden_size, "num_attention_heads": heads,
            "num_key_value_heads": heads, "intermediate_size": arguments.hidden_size * 11 // 4 // 16 * 16,
            "num_hidden_layers": arguments.num_layers, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
        norm_stats={"unit_range": {"action": {"q01": [-1.0] * ACTION_DIM, "q99": [1.0] * ACTION_DIM}}},
        weight_init="fan_in",
    )  # fmt: skip
    model = OpenVLAForRLActionPrediction(config, action_dim=ACTION_DIM, action_chunks_len=CHUNKS[action_decoding])
    return model.eval().to(arguments.device)


def draw_inputs(model: OpenVLAForRLActionPrediction, batch_size: int, prompt_len: int) -> dict[str, Tensor]:
    """Prompts of one length (no padding, which suits the peer) and pixels."""
    generator = torch.Generator().manual_seed(batch_size)
    input_ids = torch.randint(3, model.action_tokenizer.first_token, (batch_size, prompt_len), generator=generator)
    input_ids[:, 0] = 1
    size = model.config.image_sizes[0]
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "pixel_values": torch.randn(batch_size, 6, size, size, generator=generator).to(model.dtype),
    }
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


class ActionBinsOnly(LogitsProcessor):
    """Leaves the scores of tokens ``first`` to ``end`` (exclusive)."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.first : self.end] = scores[:, self.first : self.end]
        return masked


class TransformersPolicy(PreTrainedModel, GenerationMixin):
    """The policy on transformers' own classes, sharing every weight of ``model``.

    Args:
        model: Ours.
        logits_to_keep: 0: the public class, with logits of all positions; 1: of the last one.
    """

    config_class = OpenVLAConfig
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, model: OpenVLAForRLActionPrediction, logits_to_keep: int) -> None:
        super().__init__(model.config)
        self.ours, self.logits_to_keep = model, logits_to_keep
        with torch.device("meta"):
            self.language_model = LlamaForCausalLM(model.config.text_config)
        self.language_model.load_state_dict(model.language_model.state_dict(), assign=True)
        self.language_model.model.rotary_emb = model.language_model.model.rotary_emb
        tokenizer = model.action_tokenizer
        self.bins = slice(tokenizer.first_token, tokenizer.vocab_size)
        self.processors = LogitsProcessorList([ActionBinsOnly(self.bins.start, self.bins.stop)])
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Image and text at the first step, the newest token later."""
        if pixel_values is not None:
            embeddings, _ = self.ours._embed_prompt(input_ids, None, pixel_values=pixel_values)
        else:
            embeddings = self.language_model.model.embed_tokens(input_ids)
        if attention_mask is not None:  # generate leaves it out when nothing is padding
            image = attention_mask.new_ones(len(attention_mask), self.ours.num_image_tokens)
            attention_mask = torch.cat([attention_mask[:, :1], image, attention_mask[:, 1:]], dim=1)
        return self.language_model(
            inputs_embeds=embeddings, attention_mask=attention_mask, logits_to_keep=logits_to_keep, **kwargs
        )

    @torch.no_grad()
    def predict_action_batch(self, do_sample: bool = True, **inputs: Tensor) -> ActionPrediction:
        """Act, as ``ActionModel.predict_action_batch`` does; ``logits [B, A, V]``."""
        model = self.ours
        if model.config.action_decoding == "parallel":
            return self._predict_in_one_pass(do_sample, **inputs)
        sampling = {"top_k": 0, "top_p": 1.0} if do_sample else {}
        generated = self.generate(
            **inputs, **sampling, do_sample=do_sample, logits_processor=self.processors, output_scores=True,
            output_logits=True, output_hidden_states=True, return_dict_in_generate=True, pad_token_id=0,
            min_new_tokens=model.num_logprobs, max_new_tokens=model.num_logprobs, logits_to_keep=self.logits_to_keep,
        )  # fmt: skip
        logits = torch.stack(generated.logits, dim=1)
        values = model.value_head(generated.hidden_states[0][-1][:, -1])
        return ActionPrediction(model.decode_actions(generated.sequences), generated.sequences, logits, values)

    def _predict_in_one_pass(
        self, do_sample: bool, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor
    ) -> ActionPrediction:
        model = self.ours
        prompt, _ = model._embed_prompt(input_ids, None, pixel_values=pixel_values)
        placeholders = prompt.new_zeros(len(prompt), model.num_logprobs, prompt.shape[-1])
        keep = model.num_logprobs if self.logits_to_keep else 0
        outputs = self.language_model(
            inputs_embeds=torch.cat([prompt, placeholders], dim=1), is_causal=False, output_hidden_states=True,
            use_cache=False, logits_to_keep=keep,
        )  # fmt: skip
        logits = outputs.logits[:, -model.num_logprobs :]
        bins = sample_tokens(logits[..., self.bins], do_sample)
        sequences = torch.cat([input_ids, bins + self.bins.start], dim=1)
        values = model.value_head(outputs.hidden_states[-1][:, -1])
        return ActionPrediction(model.decode_actions(sequences), sequences, logits, values)


def policies(arguments: argparse.Namespace, action_decoding: str) -> dict[str, Any]:
    """The three ways to act with one set of weights."""
    model = build(arguments, action_decoding)
    return {"ours": model, "peer": TransformersPolicy(model, 0), "peer_last": TransformersPolicy(model, 1)}


def check_equal(ways: dict[str, Any], inputs: dict[str, Tensor]) -> None:
    """Stop unless all choose the same greedy tokens, with close logits and values."""
    bins = ways["peer"].bins
    predictions = {name: way.predict_action_batch(**inputs, do_sample=False) for name, way in ways.items()}
    for name in ("peer", "peer_last"):
        ours, peer = predictions["ours"], predictions[name]
        gaps = [
            (ours.logits - peer.logits[..., bins]).abs().max().item(),
            (ours.values - peer.values).abs().max().item(),
        ]
        if not torch.equal(ours.sequences, peer.sequences) or max(gaps) > 1e-3:
            raise SystemExit(f"ours and {name} disagree: logits differ by {gaps[0]:.2e}, values by {gaps[1]:.2e}")


def time_in_turn(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds per call, one call of each after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def resident_mib(field: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def peak_mib(call: Callable[[], Any], device: str) -> float:
    """Peak memory of one call above what was held before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, so that it counts when it is taken again
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = resident_mib("VmRSS")
    call()
    return resident_mib("VmHWM") - before


def measure(arguments: argparse.Namespace, action_decoding: str) -> dict[str, dict[str, Any]]:
    """Actions per second and peak memory for every batch size."""
    ways = policies(arguments, action_decoding)
    model = ways["ours"]
    check_equal(ways, draw_inputs(model, arguments.batch_sizes[0], arguments.prompt_len))
    if arguments.precision == "bf16":
        model.bfloat16()
        ways = {"ours": model, "peer": TransformersPolicy(model, 0), "peer_last": TransformersPolicy(model, 1)}
    print(f"{action_decoding}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    table = {}
    for batch_size in arguments.batch_sizes:
        inputs = draw_inputs(model, batch_size, arguments.prompt_len)
        calls = {name: lambda way=way, inputs=inputs: way.predict_action_batch(**inputs) for name, way in ways.items()}
        seconds = time_in_turn(calls, arguments.rounds, arguments.device)
        row = {name: batch_size * CHUNKS[action_decoding] / value for name, value in seconds.items()}
        row["ratio"], row["ratio_last"] = row["ours"] / row["peer"], row["ours"] / row["peer_last"]
        row |= {f"{name}_mib": peak_mib(call, arguments.device) for name, call in calls.items()}
        table[str(batch_size)] = {name: round(value, 3) for name, value in row.items()}
        print(f"  batch {batch_size:3}: " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return table


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 1, 32], help="the first one is the headline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=30)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32064)
    parser.add_argument("--vision-dim", type=int, default=192)
    parser.add_argument("--vision-layers", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tables = {action_decoding: measure(arguments, action_decoding) for action_decoding in CHUNKS}
    headline = tables["autoregressive"][str(arguments.batch_sizes[0])]
    result = {
        "name": "action_inference", "ours": headline["ours"], "peer": headline["peer"], "ratio": headline["ratio"],
        "ratio_last": headline["ratio_last"], "unit": "actions/s", "batch_size": arguments.batch_sizes[0],
        "sizes": vars(arguments), "by_batch_size": tables,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
