"""What a recipe needs and does: ranks, GPUs, steps, tokens, memory."""

import pytest
from transformers import Gemma3Config

from rlinf.errors import ConfigError
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.preflight.placement import Node, StoreRoom
from rlinf.recipes import plan as planning
from rlinf.recipes.load import load_recipe
from rlinf.recipes.plan import COLOCATED, SPLIT, choose_device, describe, make_plan, num_steps, store_room
from rlinf.recipes.players import place_players

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


def make_vlm(folder):
    """Write the configuration of a model that reads images."""
    text = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(folder)
    return folder


def plan_of(name, *overrides):
    config, _ = load_recipe(name, overrides)
    return config, make_plan(config)


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_a_recipe_needs_the_gpus_of_its_name(name, gpus):
    _, plan = plan_of(name)
    assert (plan.policy_gpus, plan.rollout_gpus, plan.num_gpus) == (*gpus, sum(gpus))


def test_steps_are_epochs_times_rows_over_batch_times_replicas():
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft")
    assert num_steps(config, plan, 3040) == 95
    assert num_steps(config, plan, 3071) == 95  # an incomplete batch is left out
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft", "train.epoch=3", "train.train_batch_per_replica=8")
    assert num_steps(config, plan, 3040) == 3 * 3040 // 8
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft", "policy.parallelism.n_init_replicas=2")
    assert num_steps(config, plan, 3040) == 3040 // 64
    config, plan = plan_of("cosmos-reason1-7b-fsdp2-sft", "train.max_num_steps=5")
    assert num_steps(config, plan, 3040) == 5


def test_in_grpo_a_row_counts_its_answers():
    config, plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo")
    assert (plan.batch_size, plan.group_size, plan.rows_per_rank) == (384, 16, 96)
    assert num_steps(config, plan, 7473) == 2 * 7473 * 16 // 384


def test_a_mini_batch_is_at_most_the_rows_of_a_rank():
    assert plan_of("gpt-oss-20b-fsdp8-sft")[1].micro_batch == 1
    assert plan_of("cosmos-reason1-7b-fsdp2-sft")[1].micro_batch == 4


def test_colocated_rollouts_and_those_of_the_trained_model_need_no_gpus_of_their_own():
    name = "cosmos-reason1-7b-p-fsdp2-r-tp2-grpo"
    assert plan_of(name, "mode=colocated")[1].num_gpus == plan_of(name, "rollout.backend=torch")[1].num_gpus == 2


def test_the_rest_of_the_ranks_are_shards():
    config, _ = load_recipe("mistral-7b-fsdp4-sft", ["policy.parallelism.dp_shard_size=-1"])
    assert make_plan(config, 8).shards == 8
    config.policy.parallelism.n_init_replicas = 2
    assert make_plan(config, 8).shards == 4
    with pytest.raises(ConfigError, match="does not divide over 3 ranks; required: a multiple of 3"):
        make_plan(config, 6)


def test_other_ranks_than_those_of_the_recipe_are_refused():
    config, _ = load_recipe("mistral-7b-fsdp4-sft")
    with pytest.raises(ConfigError, match="2 ranks were started, and the recipe has 4"):
        make_plan(config, 2)


def test_fewer_gpus_than_a_recipe_needs_are_refused_with_counts(monkeypatch):
    name = "cosmos-reason1-7b-p-fsdp2-r-tp2-grpo"
    for found, cure in ((0, "policy.device=cpu"), (1, "dp_shard_size=1"), (2, "mode=colocated"), (3, "mode=colocated")):
        monkeypatch.setattr(planning.torch.cuda, "device_count", lambda found=found: found)
        with pytest.raises(
            ConfigError, match=rf"needs 4 GPUs \(2 for the policy, 2 for the rollout\), and torch sees {found}.*{cure}"
        ):
            choose_device(*plan_of(name))
        assert choose_device(*plan_of(name, "policy.device=cpu")) == "cpu"


def test_without_a_gpu_one_rank_runs_on_the_cpu(monkeypatch):
    monkeypatch.setattr(planning.torch.cuda, "device_count", lambda: 0)
    one = plan_of("mistral-7b-fsdp4-sft", "policy.parallelism.dp_shard_size=1")
    assert choose_device(*one) == "cpu"
    with pytest.raises(ConfigError, match="needs 1 GPUs"):
        choose_device(*plan_of("mistral-7b-fsdp4-sft", "policy.parallelism.dp_shard_size=1", "policy.device=cuda"))


def test_an_engine_of_several_gpus_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(planning.torch.cuda, "device_count", lambda: 4)
    name = "cosmos-reason1-7b-p-fsdp2-r-tp2-grpo"
    with pytest.raises(
        ConfigError,
        match=f"rollout.parallelism.tp_size is 2.*Set {SPLIT} .* 2 GPUs each, or rollout.parallelism.tp_size=1",
    ):
        choose_device(*plan_of(name))
    assert choose_device(*plan_of(name, *SPLIT.split())) == "cuda", "players have GPUs of their own"
    assert choose_device(*plan_of(name, "rollout.parallelism.tp_size=1")) == "cuda"


@pytest.mark.parametrize(
    ("name", "placement", "words"),
    [
        ("cosmos-reason1-7b-p-fsdp2-r-tp2-grpo", (2, 1, 2), "players:      1, placed by Ray; 2 ranks share each"),
        ("phi4-14b-p-fsdp4-r-tp2-grpo", (4, 2, 2), "players:      2, placed by Ray; 2 ranks share each"),
        ("mistral-7b-p-fsdp1-r-tp1-grpo", (1, 1, 1), "players:      1, placed by Ray; 1 of each rank"),
    ],
)
def test_players_are_the_engines_of_a_recipe(name, placement, words):
    config, plan = plan_of(name, *SPLIT.split())
    placed = place_players(plan, "cuda")
    assert (placed.num_ranks, placed.num_players, placed.gpus_per_player) == placement
    assert words in describe(config, plan, 100)
    owned = [number for rank in range(placed.num_ranks) for number in placed.players_of(rank)]
    assert owned == list(range(placed.num_players)), "each player has one owner"
    assert place_players(plan, "cpu").bundle == {"CPU": 1}


def test_a_player_in_torch_has_one_gpu():
    config, plan = plan_of(
        "phi4-14b-p-fsdp4-r-tp2-grpo", *SPLIT.split(), "rollout.backend=torch", "cluster.num_players=4"
    )
    assert (plan.rollout_gpus, plan.gpus_per_player) == (4, 1)
    assert "rollout GPUs: 4 (4 x 1, in torch)" in describe(config, plan, 100)


def test_a_player_whose_model_reads_images_or_that_has_no_vllm_generates_in_torch(tiny_lm, tmp_path, monkeypatch):
    """It would reserve two GPUs and use one."""
    words = [*SPLIT.split(), "policy.parallelism.dp_shard_size=1", "rollout.parallelism.tp_size=2"]
    reads_images = make_vlm(tmp_path)
    for model, is_installed, gpus, each in (
        (tiny_lm(), True, 2, "tensor parallel 2"),
        (tiny_lm(), False, 1, "1, in torch"),
        (reads_images, True, 1, "1, in torch"),
    ):
        monkeypatch.setattr(planning, "find_spec", lambda name, found=is_installed: found or None)
        config, plan = plan_of("mistral-7b-p-fsdp1-r-tp1-grpo", *words, f"policy.model_name_or_path={model}")
        text = describe(config, plan, 100)
        assert (plan.rollout_gpus, plan.gpus_per_player) == (gpus, gpus)
        assert f"rollout GPUs: {gpus} (1 x {each})" in text
        assert ("the engine takes" in text) == (gpus == 2)


def test_players_need_two_versions_of_what_is_trained_and_one_of_the_rest(tiny_lm):
    words = [f"policy.model_name_or_path={tiny_lm()}", "train.param_dtype=float32"]
    whole = store_room(plan_of("mistral-7b-p-fsdp1-r-tp1-grpo", *words)[0])
    weights = load_causal_lm(tiny_lm(), CausalLMConfig()).state_dict()
    size = sum(tensor.numel() * 4 for tensor in weights.values())
    assert whole == StoreRoom(2 * size, f"policy.lora.r=8, or {COLOCATED}")
    adapters = store_room(plan_of("mistral-7b-p-fsdp1-r-tp1-grpo", *words, "policy.lora.r=1")[0])
    assert size < adapters.num_bytes < 1.5 * size and adapters.cures == COLOCATED
    assert store_room(plan_of("mistral-7b-p-fsdp1-r-tp1-grpo")[0]) is None, "the model is not on this machine"


def test_where_ranks_share_players_fewer_of_them_are_suggested():
    plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", *SPLIT.split(), "cluster.num_players=4")[1]
    with pytest.raises(ConfigError, match="Set cluster.num_players=2$"):
        place_players(plan, "cpu", [Node("a", 3, 0)])
    plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", *SPLIT.split(), "cluster.num_players=2")[1]
    place_players(plan, "cpu", [Node("a", 3, 0)])


def test_players_that_machines_have_no_room_for_are_refused():
    plan = plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", *SPLIT.split())[1]
    with pytest.raises(ConfigError, match="a CPU and 2 GPUs of one machine for each player. Set .*policy.device=cpu"):
        place_players(plan, "cuda", [Node("a", 64, 1), Node("b", 64, 1)])
    place_players(plan, "cuda", [Node("a", 64, 2), Node("b", 64, 2)])
    place_players(plan, "cpu", [Node("a", 2, 0)])


@pytest.mark.parametrize(
    ("overrides", "cure"),
    [
        (["cluster.start=ray"], "Set cluster.placement=split"),
        (["cluster.num_players=2"], "Set cluster.start=ray cluster.placement=split"),
        (["cluster.placement=split"], "Set cluster.start=ray"),
        ([*SPLIT.split(), "mode=colocated"], "Set mode=disaggregated"),
        ([*SPLIT.split(), "cluster.num_players=3"], "Set cluster.num_players=4"),
        (
            [*SPLIT.split(), "rollout.parallelism.n_init_replicas=3"],
            "n_init_replicas=3 players.*Set cluster.num_players=4",
        ),
    ],
)
def test_players_that_do_not_fit_are_refused(overrides, cure):
    with pytest.raises(ConfigError, match=cure):
        plan_of("phi4-14b-p-fsdp4-r-tp2-grpo", *overrides)


def test_sft_has_no_players():
    with pytest.raises(ConfigError, match="type=sft; required: grpo"):
        plan_of("mistral-7b-fsdp4-sft", *SPLIT.split())


def test_the_memory_of_a_model_that_is_here_is_that_of_its_shapes(tiny_lm):
    config, plan = plan_of(
        "mistral-7b-p-fsdp1-r-tp1-grpo", f"policy.model_name_or_path={tiny_lm()}", "train.param_dtype=float32"
    )
    lines = describe(config, plan, 100)
    assert "unknown" not in lines and "policy:" in lines and "the engine takes 70% of the GPU" in lines
    assert "steps:        93 = 15 epochs * N rows * 16 answers / 256; N = 100" in lines


def test_what_cannot_be_known_is_said_to_be_unknown():
    lines = describe(*plan_of("mistral-7b-fsdp4-sft"), None, "'LNTANOooo/sharegpt52k' is not on this machine")
    assert (
        "memory:       unknown: the config.json of mistralai/Mistral-7B-Instruct-v0.3 is not on this machine" in lines
    )
    assert "N is unknown: 'LNTANOooo/sharegpt52k' is not on this machine" in lines
    assert "batch:        8 rows; 2 on each rank, 2 at a time" in lines and "at most 8,192 in a step" in lines
