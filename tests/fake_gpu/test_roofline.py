"""FLOPs, bytes and launches of the roofline by hand, and the table in docs/gpu.md."""

import importlib
import sys

import pytest
import torch
from torch import nn

from tests.fake_gpu.child import call
from tests.fake_gpu.gpu import ROOT, FakeGpu


def script():
    """The module ``scripts/roofline.py``."""
    sys.path.append(str(ROOT / "scripts"))
    return importlib.import_module("roofline")


def work():
    """FLOPs and bytes of some operations on bfloat16."""
    with FakeGpu():
        a, b, c = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 8), (8, 16), (4, 16)))
        table = torch.zeros(1000, 8, dtype=torch.bfloat16, device="cuda")
        rows = torch.zeros(3, dtype=torch.int64, device="cuda")
        query = torch.zeros(1, 2, 32, 64, dtype=torch.bfloat16, device="cuda")
        operations = (
            lambda: a @ b, lambda: c.addmm_(a, b), lambda: nn.functional.scaled_dot_product_attention(query, query, query),
            lambda: c + c, lambda: c + c[:1].expand(4, 16), lambda: c.mul_(2.0), lambda: c.view(16, 4).T,
            lambda: nn.functional.embedding(rows, table),
        )  # fmt: skip
        results = []
        for operation in operations:
            with script().CountWork() as counted_work:
                operation()
            results.append((counted_work.flops, counted_work.bytes))
    return results


def test_work_by_hand():
    product, attention = 2 * 4 * 8 * 16, 2 * 2 * 2 * 32 * 32 * 64
    # A sum, a sum with one row, a product in place, a view, three rows of a table.
    moved = [3 * 128, 128 + 32 + 128, 2 * 128, 0, 2 * 3 * 8 * 2]
    expected = [[product, 0], [product, 0], [attention, 0], *[[0, number] for number in moved]]
    assert call(f"{__name__}:work") == expected


def counted(name):
    roofline = script()
    return roofline.table_row(name, roofline.work_of(name), roofline.measured(roofline.phases()[name]))


def test_the_page_has_the_rows_of_today():
    """The numbers of one row; ``python scripts/roofline.py --write`` writes all."""
    roofline = script()
    lines = roofline.shown().splitlines(keepends=True)
    assert [line.split("|")[1] for line in lines[2:]] == list(roofline.phases())
    assert call(f"{__name__}:counted", name="the same, merged adapters") in lines
    assert sum(roofline.Work(989 * 10**9, 335 * 10**9, 1000).seconds()) == pytest.approx(1e-3 + 0.1 + 0.016)


def test_the_flops_of_a_step_are_those_of_the_formula():
    """4 per frozen weight and token: forward, and the gradient of the input. Logits are computed twice."""
    flops = {
        line.split("|")[1]: float(line.split("|")[2].replace(",", "")) for line in script().shown().splitlines()[2:]
    }
    head, layer = 3584 * 152064, 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    attention = 28 * 4 * 2048 * 3584 * (1 + 2.5)  # torch does not halve causal attention
    expected = 8 * 2048 * (4 * (28 * layer + head) + 2 * head + attention) / 1e12
    assert flops["7B, LoRA: SFT step of 8 x 2048"] == pytest.approx(expected, rel=0.03)


def block(**arguments):
    return script().block_launches(**arguments)


@pytest.mark.parametrize(("fused", "forward", "backward", "products"), [(True, 33, 48, 11), (False, 48, 71, 21)])
def test_launches_of_a_block_with_adapters(fused, forward, backward, products):
    """Control: PEFT's own layers launch more."""
    call_ops, update_ops = call(f"{__name__}:block", fused=fused)
    assert sum(call_ops.values()) == forward and call_ops["mm"] == products, call_ops
    assert sum(update_ops.values()) == forward + backward, update_ops


def test_launches_of_a_block_with_merged_adapters_are_those_of_a_block_without():
    merged = call(f"{__name__}:block", words=["rollout.merge_adapters=true"])[0]
    assert merged == call(f"{__name__}:block", words=["model.is_lora=false"])[0] and sum(merged.values()) == 20
