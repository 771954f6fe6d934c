"""Print the table "Roofline" of docs/gpu.md: the time of each phase on an H100, from counts of work, and as measured.

python scripts/roofline.py            the table
python scripts/roofline.py --write    into docs/gpu.md
python scripts/roofline.py --block    launches of one block, by operation
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from gpu_check.tokens import SEVEN_BILLION, THREE_BILLION  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from rlinf.files import write_text  # noqa: E402
from rlinf.llm.hf_model import model_shapes  # noqa: E402
from rlinf.llm.memory_plan import PassPlan, plan_passes  # noqa: E402
from rlinf.models import lora  # noqa: E402
from rlinf.models.config import LoraConfig  # noqa: E402
from rlinf.models.layers import set_training_options  # noqa: E402
from rlinf.models.norms import fuse_norms  # noqa: E402
from tests.fake_gpu.gpu import ALLOCATIONS, VIEWS, FakeGpu, run_script  # noqa: E402

PEAK_FLOPS, BANDWIDTH = 989e12, 3.35e12
"""Dense bfloat16 FLOP/s and bytes/s of an H100 SXM, from its data sheet."""
LAUNCH_S = 16e-6
"""Seconds per launch. At commit 0af9c168, CUDA graphs saved 91.6 ms of two policy calls with 5,716 launches."""
MEASURED_ON = "NVIDIA H100 80GB HBM3"
PAGE, START, END = ROOT / "docs" / "gpu.md", "<!-- roofline: start -->\n\n", "\n<!-- roofline: end -->\n"
PICKS = {"embedding", "index", "index_select", "gather"}
VOCABULARY = {"vocab_size": 152064, "tie_word_embeddings": False}
HEAD = ("phase", "TFLOP", "GB", "launches", "matrix s", "bytes s", "launches s", "sum s", "measured s")


class CountWork(TorchDispatchMode):
    """Counts ``flops`` of matrix products and attention, and ``bytes`` that all other kernels read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._schema.name.partition("::")[2]
        packet = torch.ops.aten.addmm if name == "addmm_" else func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif not (func.is_view or func.namespace == "prim" or name in VIEWS or name in ALLOCATIONS):
            results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, FakeTensor)]
            inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, FakeTensor)]
            # A kernel that picks rows reads as many as it writes.
            self.bytes += sum(map(stored_bytes, [*(results if name in PICKS else inputs), *results]))
        return out


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor without repetitions of an expanded dimension."""
    return (
        math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()
    )


class Work(NamedTuple):
    """Counts of a phase: FLOPs of matrix products and attention, bytes that other kernels move, and launches."""

    flops: int
    bytes: int
    launches: int

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds of matrix products at peak, of bytes at full bandwidth, and of launches."""
        return self.flops / PEAK_FLOPS, self.bytes / BANDWIDTH, self.launches * LAUNCH_S


@dataclass(frozen=True)
class Phase:
    """A row of the table.

    Attributes:
        run: ``action`` or ``tokens``, whose ``settings`` are overrides, or sizes and keyword arguments.
        phase: Method of the run.
        result: Row of docs/gpu_results.json with the measurement; None without one.
        tokens: Tokens of the step if the row gives tokens per second; None if it gives milliseconds.
        graph: One CUDA graph, whose launches are not counted.
    """

    run: str
    settings: Any
    phase: str
    result: str | None = None
    tokens: int | None = None
    graph: bool = False


def phases() -> dict[str, Phase]:
    """Return the rows by name."""
    from tests.fake_gpu.cases import WHOLE_OFT

    oft = [*WHOLE_OFT, "model.gradient_checkpointing=false"]
    merged, call = [*oft, "rollout.merge_adapters=true"], "milliseconds per call with 16 rows, eager, with adapters"
    tokens = "tokens per second in a step of 8 x 2048"
    return {
        "OFT 7B, LoRA: policy call of 16 rows": Phase("action", oft, "policy_call", call),
        "the same, CUDA graph": Phase("action", oft, "policy_call", "the same, CUDA graph, with adapters", graph=True),
        "the same, merged adapters": Phase("action", merged, "policy_call", "the same, merged"),
        "the same, merged, CUDA graph": Phase("action", merged, "policy_call", "the same, CUDA graph, merged", graph=True),
        "scoring of 16 rows": Phase("action", oft, "score"),
        "update with 2 micro-batches of 8 rows": Phase("action", oft, "update"),
        "7B, LoRA: SFT step of 8 x 2048": Phase("tokens", (SEVEN_BILLION, {"lora": {}}), "sft_step", f"7B, LoRA: {tokens}", 8 * 2048),
        "3B, in full: SFT step of 8 x 2048": Phase("tokens", (THREE_BILLION, {}), "sft_step", f"3B, in full: {tokens}", 8 * 2048),
    }  # fmt: skip


def work_of(name: str) -> Work:
    """Count a phase on a fake GPU with 80 GB."""
    from tests.fake_gpu.more_runs import QWEN, TokenRun
    from tests.fake_gpu.runs import ActionRun, make_state

    row = phases()[name]
    plan = None if row.run == "action" else pass_plan(*row.settings)
    with FakeGpu() as gpu, mock.patch.dict(QWEN):
        if row.run == "action":
            run: Any = ActionRun(gpu, row.settings, rows=16)
            if row.phase != "policy_call":
                run.policy_call()
            optimizer = run.worker.optimizer
        else:
            sizes, arguments = row.settings
            QWEN.update(sizes | VOCABULARY)
            run = TokenRun(
                gpu, {"torch_dtype": "bfloat16", "micro_batch_size": plan.rows} | arguments, rows=8, length=2048
            )
            set_training_options(run.policy.model, recomputed=plan.recomputed, compiled=False)
            optimizer = run.policy.optimizer
            for mask in ("attention_mask", "token_loss_mask"):
                run.data[mask] = torch.ones_like(run.data[mask])
        make_state(optimizer)  # before the step that is counted
        with CountWork() as work:
            counts = getattr(run, row.phase)()
    return Work(work.flops, work.bytes, 0 if row.graph else counts.launches.total())


def pass_plan(sizes: dict[str, int], arguments: dict[str, Any]) -> PassPlan:
    """Return the rows and recomputed layers that ``gradient_checkpointing=auto`` chooses in 80 GB."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen2", **sizes, **VOCABULARY).save_pretrained(folder)
        model = model_shapes(folder, dtype=torch.bfloat16)
    fuse_norms(model)
    if "lora" in arguments:
        lora.apply_lora(model, LoraConfig())
    return plan_passes(model, 2048, None, "auto", 80 * 10**9, shards=None, offloads=False, has_reference=False)


def block_launches(words: Sequence[str] = (), fused: bool = True) -> list[dict[str, int]]:
    """Return the launches of one block of OpenVLA-OFT with LoRA, by operation, in a policy call (forward) and in an update.

    The count is the difference between three and two blocks. With ``fused=False``, adapters are PEFT's own layers.
    """
    from tests.fake_gpu.cases import FOUR_ROWS, LLAMA, RANDOM, TOWERS
    from tests.fake_gpu.runs import ActionRun

    counts, convert = [], lora.fuse_adapters if fused else lambda model: None
    for number in (2, 3):
        llama = LLAMA.replace("num_hidden_layers: 2", f"num_hidden_layers: {number}")
        sizes = ["model=openvla_oft", f"model.init_config={{{llama}, {TOWERS}}}", "model.is_lora=true", *RANDOM]
        options = ["model.gradient_checkpointing=false", *FOUR_ROWS, *words]
        with FakeGpu() as gpu, mock.patch.object(lora, "fuse_adapters", convert):
            run = ActionRun(gpu, [*sizes, *options], rows=4)
            counts.append([Counter(run.policy_call().ops), Counter(run.update().ops)])
    return [dict(longer - shorter) for shorter, longer in zip(*counts, strict=True)]


def measured(row: Phase) -> float | None:
    """Return the seconds of the phase in docs/gpu_results.json; None without a result."""
    results = json.loads((ROOT / "docs" / "gpu_results.json").read_text(encoding="utf-8"))[MEASURED_ON]
    values = {item["what"]: item["value"] for check in results.values() for item in check["rows"]}
    if row.result not in values:
        return None
    value = float(values[row.result])
    return value / 1e3 if row.tokens is None else row.tokens / value


def table_row(name: str, work: Work, seconds: float | None) -> str:
    """Return a line of the table."""
    parts = work.seconds()
    times = [f"{part:.3f}" for part in (*parts, sum(parts))]
    counts = [f"{work.flops / 1e12:,.0f}", f"{work.bytes / 1e9:,.0f}", f"{work.launches:,}"]
    return f"|{'|'.join([name, *counts, *times, '' if seconds is None else f'{seconds:.3f}'])}|\n"


def table() -> str:
    """Return the complete table."""
    rows = phases()
    lines = [f"|{'|'.join(HEAD)}|\n", f"|{'---|' * len(HEAD)}\n"]
    return "".join(lines + [table_row(name, work_of(name), measured(row)) for name, row in rows.items()])


def shown(page: Path = PAGE) -> str:
    """Return the table on the page."""
    return page.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]


def main(words: list[str]) -> None:
    """Print the table, or write it."""
    if words == ["--block"]:
        print(*block_launches(), sep="\n")
        return
    text = table()
    if words == ["--write"]:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        write_text(PAGE, before + START + text + END + rest.partition(END)[2])
    else:
        print(text, end="")


if __name__ == "__main__":
    run_script(main)
