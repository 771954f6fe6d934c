"""The benchmark of action generation runs, compares equal policies, and its last line is what the documentation promises."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

TOY = {
    "hidden-size": 64, "num-layers": 2, "vocab-size": 512, "vision-dim": 64, "vision-layers": 2, "image-size": 28,
    "prompt-len": 5, "rounds": 1, "batch-sizes": 2,
}  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch):
    """The script as a module, to be run at toy size."""
    path = Path(__file__).parents[2] / "benchmarks" / "action_inference.py"
    spec = importlib.util.spec_from_file_location("action_inference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(path), *(f"--{name}={value}" for name, value in TOY.items())])
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_last_line_is_json_with_a_ratio(benchmark, capsys):
    benchmark.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["name"] == "action_inference" and report["batch_size"] == 2
    assert abs(report["ratio"] - report["ours"] / report["peer"]) < 0.01
    assert set(report["by_batch_size"]) == {"autoregressive", "parallel"}
    for table in report["by_batch_size"].values():
        for name in ("ours", "peer", "peer_last"):
            assert table["2"][name] > 0 and table["2"][f"{name}_mib"] >= 0


@pytest.mark.parametrize("action_decoding", ["autoregressive", "parallel"])
def test_policies_that_differ_are_not_compared(benchmark, action_decoding):
    arguments = benchmark.parse_arguments()
    ways = benchmark.policies(arguments, action_decoding)
    inputs = benchmark.draw_inputs(ways["ours"], 3, arguments.prompt_len)
    benchmark.check_equal(ways, inputs)
    with torch.no_grad():
        weight = ways["ours"].language_model.lm_head.weight
        ways["ours"].language_model.lm_head.weight = torch.nn.Parameter(weight.flip(0))
    with pytest.raises(SystemExit, match="disagree"):
        benchmark.check_equal(ways, inputs)


def test_ours_sees_the_prompt_once_and_then_single_tokens(benchmark):
    arguments = benchmark.parse_arguments()
    ways = benchmark.policies(arguments, "autoregressive")
    model = ways["ours"]
    lengths, images, full_heads = [], [], []
    model.language_model.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.vision_backbone.register_forward_hook(lambda *_: images.append(1))
    model.language_model.lm_head.register_forward_hook(lambda *_: full_heads.append(1))
    model.predict_action_batch(**benchmark.draw_inputs(model, 2, arguments.prompt_len))
    assert lengths == [arguments.prompt_len + model.num_image_tokens] + [1] * (model.num_logprobs - 1)
    assert len(images) == 1 and not full_heads
