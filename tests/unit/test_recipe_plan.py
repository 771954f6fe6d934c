"""What a recipe needs and does: ranks, GPUs, steps, tokens, memory."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Qwen2_5_VLConfig, Qwen2Config

from rlinf.cli import main
from rlinf.errors import ConfigError
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.preflight.placement import FreeCapacity, Node
from rlinf.recipes import launch as launching
from rlinf.recipes import plan as planning
from rlinf.recipes.load import load_recipe, packaged_recipes
from rlinf.recipes.plan import (
    check_engines,
    choose_device,
    describe,
    fraction_of_engine,
    make_plan,
    num_steps,
    store_capacity,
)
from rlinf.recipes.rollout_workers import place_rollout_workers

DISAGGREGATED = "cluster.placement=disaggregated"
GPUS = {
    "cosmos-reason1-7b-fsdp2-sft": (2, 0),
    "cosmos-reason1-7b-p-fsdp2-r-tp2-grpo": (2, 2),
    "gemma3-12b-vlm-fsdp4-sft": (4, 0),
    "gpt-oss-20b-fsdp8-sft": (8, 0),
    "gpt-oss-20b-p-fsdp4-r-tp4-pp1-grpo": (4, 4),
    "mistral-7b-fsdp4-sft": (4, 0),
    "mistral-7b-p-fsdp1-r-tp1-grpo": (1, 1),
    "phi4-14b-p-fsdp4-r-tp2-grpo": (4, 4),
}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """Let vLLM count as installed or not, whatever this machine has."""
    monkeypatch.setattr(planning, "find_spec", lambda name: name)


def make_vlm(folder, family):
    """Write the configuration of a model that reads images."""
    text = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "qwen2_5_vl":
        vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 16}
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    configs = {"gemma3": Gemma3Config, "qwen2_5_vl": Qwen2_5_VLConfig}
    configs[family](text_config=text, vision_config=vision).save_pretrained(folder / family)
    return folder / family


def plan_of(name, *overrides):
    config, _ = load_recipe(name, overrides)
    return config, make_plan(config)


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_a_recipe_needs_the_gpus_of_its_name(name, gpus):
    _, plan = plan_of(name)
    assert (plan.policy_gpus, plan.rollout_gpus, plan.num_gpus) == (*gpus, sum(gpus))


def test_steps_are_epochs_times_rows_over_batch_times_replicas():
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft")
    assert num_steps(config, 3040) == 95
    assert num_steps(config, 3071) == 95  # an incomplete batch is left out
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft", "train.epoch=3", "train.train_batch_per_replica=8")
    assert num_steps(config, 3040) == 3 * 3040 // 8
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft", "policy.parallelism.n_init_replicas=2")
    assert num_steps(config, 3040) == 3040 // 64
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft", "train.max_num_steps=5")
    assert num_steps(config, 3040) == 5


def test_in_grpo_a_row_counts_its_answers():
    config, plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo")
    assert (config.batch_size, config.group_size, plan.policy_gpus) == (384, 16, 4)
    assert "96 on each rank" in describe(config, plan, 7473)
    assert num_steps(config, 7473) == 2 * 7473 * 16 // 384


def test_colocated_rollouts_and_those_of_the_trained_model_need_no_gpus_of_their_own():
    name = "cosmos-reason1-7b-p-fsdp2-r-tp2-grpo"
    assert plan_of(name, "mode=colocated")[1].num_gpus == plan_of(name, "rollout.backend=torch")[1].num_gpus == 2


def test_the_rest_of_the_ranks_are_shards():
    config, _ = load_recipe("mistral-7b-fsdp4-sft", ["policy.parallelism.dp_shard_size=-1"])
    assert make_plan(config, 8).shards == 8
    config.policy.parallelism.n_init_replicas = 2
    assert make_plan(config, 8).shards == 4
    with pytest.raises(ConfigError, match="does not divide over 3 ranks; expected a multiple of 3"):
        make_plan(config, 6)
    with pytest.raises(
        ConfigError, match="n_generation=16; expected a multiple of 64. Set train.train_batch_per_replica=64"
    ):
        plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", "train.train_batch_per_replica=100")


def test_other_ranks_than_those_of_the_recipe_are_refused():
    config, _ = load_recipe("mistral-7b-fsdp4-sft")
    with pytest.raises(ConfigError, match="2 ranks were started, but the recipe needs 4"):
        make_plan(config, 2)


def run_words(name, *overrides):
    """Return the words of a run of a recipe."""
    return ["launch", "--config", name, *overrides]


SHIPPED = sorted(
    str(path.relative_to(packaged_recipes()))
    for path in packaged_recipes().rglob("*")
    if path.suffix in (".toml", ".yaml")
)


@pytest.fixture
def started(monkeypatch):
    """Let a run end where its ranks would start, and return the ranks, their device and what rollout workers get."""
    starts = []

    @contextmanager
    def reserved(placement_of, start_s, capacity=None):
        placement = placement_of()
        placement_of([Node("here", placement.cpus, torch.cuda.device_count() - placement.gpus_of_ranks)])
        yield placement

    def start(function, work, num_ranks, device, *_):
        starts.append((num_ranks, device, work[3] and work[3].placement))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launching, "reserved_places", reserved)
    monkeypatch.setattr(launching, "start_ranks", start)
    return starts


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_recipe_as_typed_takes_all_gpus_of_its_name_and_is_refused_with_one_fewer(
    recipe, started, monkeypatch, capsys
):
    policy, rollout = GPUS.get(Path(recipe).stem, (0, 0))  # no GPUs: those for a laptop, which name none
    monkeypatch.setattr(torch.cuda, "device_count", lambda: policy + rollout)
    monkeypatch.setattr(launching, "count_rows", lambda *_: (None, "not needed here"))
    monkeypatch.setattr(launching, "_check_sources", lambda *_: None)  # their data and models are not here
    for words in (run_words(recipe), run_words(recipe, "--dry-run")):
        assert main(words) == 0, capsys.readouterr().err
    [(num_ranks, device, placement)] = started
    assert (num_ranks, device) == ((policy, "cuda") if policy else (1, "cpu"))
    used = 0 if placement is None else placement.num_rollout_workers * placement.gpus_per_rollout_worker
    assert used == rollout, "every GPU has a rank or an engine"
    if not policy:
        return
    monkeypatch.setattr(torch.cuda, "device_count", lambda: policy + rollout - 1)
    for words in (run_words(recipe), run_words(recipe, "--dry-run")):
        capsys.readouterr()
        assert main(words) == 2
        shown, error = capsys.readouterr()
        assert "policy GPUs:" not in shown, "a rejection comes before the plan"
        assert f"needs {policy + rollout} GPUs ({policy} for the policy, {rollout} for the rollout)" in error
        assert f"torch sees {policy + rollout - 1}. Set " in error
        fix = re.search(r"Set ((?:[\w.]+=\w+ ?)+)", error)[1].split()
        assert main([*words, *fix]) == 0, f"{fix}: {capsys.readouterr().err}"
    assert len(started) == 2, "the fix has started a run"


@pytest.mark.parametrize("name", GPUS)
def test_without_gpus_a_dry_run_plans_for_another_machine_and_a_run_is_refused(name, started, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(run_words(name, "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert f"total GPUs:   {sum(GPUS[name])}\n" in shown
    assert f"machine:      a machine with {sum(GPUS[name])} GPUs (this one has none)" in shown
    assert main(run_words(name)) == 2
    assert "but torch sees 0. Set policy.device=cpu" in capsys.readouterr().err
    assert main(run_words(name, "policy.device=cpu")) == 0
    assert started == [(GPUS[name][0], "cpu", None)]


def test_a_launcher_gives_engines_no_gpus_of_their_own(monkeypatch):
    """Its ranks are there already, each with a GPU of its own."""
    config, _ = load_recipe("cosmos-reason1-7b-p-fsdp2-r-tp2-grpo")
    plan = make_plan(config, 2)
    assert (plan.workers, plan.num_gpus) == (0, 2)
    with pytest.raises(ConfigError, match="expected 1. Set rollout.parallelism.tp_size=1"):
        check_engines(config, plan, "cuda")
    check_engines(config, plan, "cpu")  # where the trained model generates
    config.rollout.parallelism.tp_size = 1
    check_engines(config, make_plan(config, 2), "cuda")


def test_an_engine_whose_size_does_not_divide_the_heads_is_refused(tiny_lm):
    words = [f"policy.model_name_or_path={tiny_lm()}", "rollout.parallelism.tp_size=3"]
    config, plan = plan_of("cosmos-reason1-7b-p-fsdp2-r-tp2-grpo", *words)
    with pytest.raises(ConfigError, match="tp_size=3 does not divide .*Set rollout.parallelism.tp_size="):
        check_engines(config, plan, "cuda")


def test_gpus_of_rollout_workers_in_a_cluster_are_not_looked_for_here(monkeypatch):
    plan = plan_of("cosmos-reason1-7b-p-fsdp2-r-tp2-grpo")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(*plan) == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        choose_device(*plan)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("cosmos-reason1-7b-p-fsdp2-r-tp2-grpo", (2, 1, 2)),
        ("phi4-14b-p-fsdp4-r-tp2-grpo", (4, 2, 2)),
        ("mistral-7b-p-fsdp1-r-tp1-grpo", (1, 1, 1)),
    ],
)
def test_players_are_the_engines_of_a_recipe(name, placement):
    config, plan = plan_of(name, DISAGGREGATED)
    placed = place_rollout_workers(config, plan, "cuda")
    assert (placed.num_ranks, placed.num_rollout_workers, placed.gpus_per_rollout_worker) == placement
    owned = [number for rank in range(placed.num_ranks) for number in placed.rollout_workers_of(rank)]
    assert owned == list(range(placed.num_rollout_workers)), "each rollout worker has one owner"
    assert place_rollout_workers(config, plan, "cpu").bundle == {"CPU": 1}


def test_where_vllm_cannot_generate_a_player_in_torch_takes_each_gpu_of_an_engine(tiny_lm, tmp_path, monkeypatch):
    """An engine's two GPUs would be reserved, and one of them used."""
    gemma, qwen = (make_vlm(tmp_path, family) for family in ("gemma3", "qwen2_5_vl"))
    for model, installed, reason in (  # why vLLM is not used, or None
        (tiny_lm(), ("vllm",), None),
        (tiny_lm(), ("torchvision",), "vllm package"),
        (gemma, ("vllm", "torchvision"), "model type is gemma3"),
        (qwen, ("vllm", "torchvision"), None),
        (qwen, ("vllm",), "torchvision package"),
    ):
        monkeypatch.setattr(planning, "find_spec", lambda name, found=installed: name in found or None)
        config, plan = plan_of("cosmos-reason1-7b-p-fsdp2-r-tp2-grpo", f"policy.model_name_or_path={model}")
        workers = 1 if reason is None else 2
        assert (plan.workers, plan.rollout_gpus, plan.gpus_per_rollout_worker) == (workers, 2, 2 // workers)
        assert (reason or "tensor parallel 2") in describe(config, plan, 100)
    overrides = [f"policy.model_name_or_path={gemma}", "policy.parallelism.dp_shard_size=4"]
    config, plan = plan_of("gpt-oss-20b-p-fsdp4-r-tp4-pp1-grpo", *overrides, "rollout.parallelism.tp_size=3")
    assert plan.workers == 1, "three cannot be shared by four ranks"
    words = [DISAGGREGATED, "rollout.backend=torch", "cluster.num_rollout_workers=4"]
    plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", *words)[1]
    assert (plan.rollout_gpus, plan.gpus_per_rollout_worker) == (4, 1)


def test_an_engine_on_the_gpu_of_the_policy_takes_what_that_leaves(tmp_path, monkeypatch):
    """Of a 3B in full 20 bytes a weight, 61.7 GB: 141 GB leave 69 GB, 80 GB leave 8.3 GB, 24 GB nothing."""
    sizes = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    Qwen2Config(**sizes).save_pretrained(tmp_path)
    monkeypatch.setattr(planning, "update_text", lambda *_: "not of interest here")
    words = [f"policy.model_name_or_path={tmp_path}", "train.param_dtype=bfloat16", "mode=colocated"]
    config, plan = plan_of("mistral-7b-p-fsdp1-r-tp1-grpo", *words, "rollout.gpu_memory_utilization=null")
    assert plan.tp_size == 1 and not plan.workers
    assert "the engine takes what the policy leaves" in describe(config, plan, 100), "this machine has no GPU to share"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {}
    for size in (24, 80, 141):
        monkeypatch.setattr(planning, "rank_memory_bytes", lambda *_, size=size: size * 10**9)
        try:
            found[size] = describe(config, plan, 100)
        except ConfigError as error:
            found[size] = str(error)
    assert "the engine takes 49% of the GPU" in found[141]
    assert "the engine takes 10% of the GPU" in found[80]
    assert "An engine needs 6.2 GB" in found[24] and found[24].endswith("Set mode=disaggregated, or policy.lora.r=8")
    config.rollout.gpu_memory_utilization = 0.8
    with pytest.raises(ConfigError, match="Set rollout.gpu_memory_utilization=0.49,"):
        describe(config, plan, 100)
    config.train.fsdp_offload = True
    assert "in main memory for each GPU: weights" in describe(config, plan, 100)
    assert fraction_of_engine(config, plan) == 0.8, "beside 6 GB of gathered weights"
    config.train.fsdp_offload = False
    assert fraction_of_engine(config, None) == 0.8, "a rollout worker's engine has its own GPU"
    config.policy.device = "cpu"
    assert fraction_of_engine(config, plan) == 0.8  # control: on a CPU nothing is shared


def test_players_need_two_versions_of_what_is_trained_and_one_of_the_rest(tiny_lm):
    words = [f"policy.model_name_or_path={tiny_lm()}", "train.param_dtype=float32"]
    whole = store_capacity(plan_of("mistral-7b-p-fsdp1-r-tp1-grpo", *words)[0])
    weights = load_causal_lm(tiny_lm(), CausalLMConfig()).state_dict()
    size = sum(tensor.numel() * 4 for tensor in weights.values())
    assert whole == FreeCapacity(2 * size, "policy.lora.r=8, or mode=colocated")
    adapters = store_capacity(plan_of("mistral-7b-p-fsdp1-r-tp1-grpo", *words, "policy.lora.r=1")[0])
    assert size < adapters.num_bytes < 1.5 * size and adapters.fixes == "mode=colocated"
    assert store_capacity(plan_of("mistral-7b-p-fsdp1-r-tp1-grpo")[0]) is None, "the model is not on this machine"


def test_players_that_machines_have_no_room_for_are_refused():
    config, plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", DISAGGREGATED)
    with pytest.raises(ConfigError, match="policy.device=cpu"):
        place_rollout_workers(config, plan, "cuda", [Node("a", 64, 1), Node("b", 64, 1)])
    place_rollout_workers(config, plan, "cuda", [Node("a", 64, 2), Node("b", 64, 2)])
    place_rollout_workers(config, plan, "cpu", [Node("a", 2, 0)])
    config, plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", DISAGGREGATED, "cluster.num_rollout_workers=4")
    with pytest.raises(ConfigError, match="Set cluster.num_rollout_workers=2$"):
        place_rollout_workers(config, plan, "cpu", [Node("a", 3, 0)])


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["cluster.start=ray", "cluster.placement=colocated"], "placement=null"),
        (
            ["cluster.num_rollout_workers=2", "mode=colocated"],
            "^cluster.num_rollout_workers=2 with mode=colo.*Set mode=disaggregated, or",
        ),
        ([DISAGGREGATED, "mode=colocated"], "Set mode=disaggregated"),
        (
            [DISAGGREGATED, "train.train_policy.type=sft"],
            "^cluster.placement=disaggregated with .*type=sft; expected grpo",
        ),
        ([DISAGGREGATED, "cluster.num_rollout_workers=3"], "Set cluster.num_rollout_workers=4"),
        (["rollout.parallelism.n_init_replicas=3"], "Set cluster.num_rollout_workers=4"),
    ],
)
def test_players_that_do_not_fit_are_refused(overrides, fix):
    with pytest.raises(ConfigError, match=fix):
        plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", *overrides)


def test_the_memory_of_a_model_that_is_here_is_that_of_its_shapes(tiny_lm):
    config, plan = plan_of(
        "mistral-7b-p-fsdp1-r-tp1-grpo", f"policy.model_name_or_path={tiny_lm()}", "train.param_dtype=float32"
    )
    lines = describe(config, plan, 100)
    assert "unknown" not in lines and "policy:" in lines and "the engine takes 70% of the GPU" in lines
    assert "steps:        93 = 15 epochs * N rows * 16 completions / 256; N = 100" in lines
