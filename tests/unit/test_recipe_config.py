"""Recipe files: their keys, overrides, older names, and what is rejected."""

import tomllib

import pytest
import yaml

from rlinf.errors import ConfigError
from rlinf.options import from_mapping, override_text
from rlinf.recipes.checks import NOT_DONE, WITHOUT_EFFECT
from rlinf.recipes.config import CkptConfig, RecipeConfig
from rlinf.recipes.load import ALIASES, find_recipe, keys_of, load_recipe, packaged_recipes, read_recipe
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.samples import Prompt

PATHS = (
    "configs/cosmos-reason1-7b-fsdp2-sft.toml",
    "configs/cosmos-reason1-7b-p-fsdp2-r-tp2-grpo.toml",
    "configs/gemma/gemma3-12b-vlm-fsdp4-sft.toml",
    "configs/gpt-oss/gpt-oss-20b-fsdp8-sft.toml",
    "configs/gpt-oss/gpt-oss-20b-p-fsdp4-r-tp4-pp1-grpo.toml",
    "configs/mistral/mistral-7b-fsdp4-sft.toml",
    "configs/mistral/mistral-7b-p-fsdp1-r-tp1-grpo.toml",
    "configs/phi/phi4-14b-p-fsdp4-r-tp2-grpo.toml",
)

CKPT_BLOCK = """
[train.ckpt]
## Basic checkpoint
enable_checkpoint = true # Enable checkpointing for training. If set to False, no checkpoint will be saved.
save_freq = 100 # Checkpoint save frequency for training steps
max_keep = 2 # Maximum number of checkpoints to keep. If set to -1, all checkpoints will be kept.
save_mode = "async" # Checkpoint save mode for training steps, `async` is recommended

## Huggingface safetensors
export_safetensors = true # Whether to export a safetensors weight for huggingface usage, include related config files.
upload_hf = true # Whather to upload the final safetensors weight to huggingface.
hf_repo_name = "Cosmos-Reason1" # The huggingface repo name to upload the safetensors weight.

## S3
upload_s3 = true # Whether to upload the checkpoint and safetensors to S3. Default to False, set `final` will upload the final checkpoint, `all` will upload all checkpoints.
s3_bucket = 'your-s3-bucket' # The S3 bucket name to upload the checkpoint and safetensors weight.
s3_prefix = 'outputs' # The S3 prefix to upload the checkpoint and safetensors weight.
"""

MINIMAL = """
[policy]
model_name_or_path = "my/model"
[train.train_policy]
type = "{type}"
"""


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe and loads it."""

    def load(*overrides, text="", type="sft"):
        path = tmp_path / "recipe.toml"
        path.write_text(MINIMAL.format(type=type) + text)
        return load_recipe(str(path), overrides)

    return load


@pytest.mark.parametrize("path", PATHS)
def test_a_recipe_is_found_by_path_and_by_name_and_may_be_written_as_yaml(path, tmp_path):
    name = path.rpartition("/")[2].removesuffix(".toml")
    assert find_recipe(path) == find_recipe(name) == packaged_recipes() / path
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(read_recipe(packaged_recipes() / path)))
    words = ["train.optm_lr=3e-4", "policy.lora.r=4"]
    assert load_recipe(str(mine), words) == load_recipe(path, words)
    assert load_recipe(str(mine)) == load_recipe(path) != load_recipe(path, words)


def test_a_recipe_below_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "mistral").mkdir(parents=True)
    (tmp_path / PATHS[5]).write_text(MINIMAL.format(type="sft"))
    assert load_recipe(PATHS[5])[0].policy.model_name_or_path == "my/model"


def test_the_checkpoint_block_of_the_guide_is_understood_as_it_is(recipe):
    given = tomllib.loads(CKPT_BLOCK)["train"]["ckpt"]
    assert len(given) == 10
    config, notices = recipe(text=CKPT_BLOCK)
    assert notices == []
    assert config.train.ckpt == CkptConfig(
        enable_checkpoint=True, save_freq=100, save_freq_in_epoch=0, max_keep=2, save_mode="async", export_safetensors=True,
        upload_hf=True, hf_repo_name="Cosmos-Reason1", upload_s3="final", s3_bucket="your-s3-bucket", s3_prefix="outputs",
    )  # fmt: skip


def test_keys_of_released_recipes_are_read_or_dropped_with_a_line():
    config, notices = load_recipe("cosmos-reason1-7b-fsdp2-sft")
    assert (config.validation.enable, config.validation.freq, config.validation.batch_size) == (True, 30, 2)
    assert [line.split()[0] for line in notices] == [
        *ALIASES,
        "policy.parallelism.cp_rotate_method=allgather",
        "redis=12800",
        "train.train_policy.dataloader_prefetch_factor=4",
    ]
    for override, freq in (("validation.freq=7", 7), ("train.validation_step=8", 8)):
        assert load_recipe("cosmos-reason1-7b-fsdp2-sft", [override])[0].validation.freq == freq


def test_text_of_a_recipe_and_of_its_overrides_is_taken_letter_by_letter(tmp_path, recipe):
    for text in ("Put the answer in ${}$", "${policy.device}", "a, b = José: 'x'"):
        path = tmp_path / "mine.toml"
        path.write_text(
            f'[policy]\nmodel_name_or_path = "m"\n[train.train_policy]\nsystem_prompt = "{text}"\n', encoding="utf-8"
        )
        assert load_recipe(str(path))[0].train.train_policy.system_prompt == text
        assert recipe(f"train.train_policy.system_prompt={text}")[0].train.train_policy.system_prompt == text
    assert recipe("policy.lora.r=4")[0].policy.lora.r == 4, "a section that is null by default"
    with pytest.raises(ConfigError, match="train.epoch is 6.*Set train.epoch=<value>"):
        recipe("train.epoch=6", "train.epoch.more=1")
    config, _ = recipe("train.optm_betas=[0.8,0.9]", "custom.mine={a:1}", "train.train_policy.dataset.name='a b'")
    assert (config.train.optm_betas, config.custom) == ([0.8, 0.9], {"mine": {"a": 1}})
    assert config.train.train_policy.dataset.name == "a b"


def test_a_yaml_recipe_writes_a_dollar_as_the_message_says(tmp_path):
    path = tmp_path / "mine.yaml"
    for text in ("${}", "${nowhere}"):
        lines = "policy: {{model_name_or_path: m}}\ntrain: {{train_policy: {{system_prompt: '{}'}}}}\n"
        path.write_text(lines.format(text))
        with pytest.raises(ConfigError) as error:
            load_recipe(str(path))
        escaped = str(error.value).rpartition("write '")[2].rstrip("'").replace("${...}", text)
        path.write_text(lines.format(escaped))
        assert load_recipe(str(path))[0].train.train_policy.system_prompt == text


def test_what_weights_and_biases_would_refuse_is_named_before_the_run(recipe, monkeypatch):
    with pytest.raises(ConfigError, match="^logging.project_name is 'team/proj'.*Set logging.project_name=team-proj"):
        recipe("logging.logger=[wandb]", "logging.project_name=team/proj")
    assert recipe("logging.logger=[wandb]", "logging.project_name=team-proj") and recipe(
        "logging.project_name=team/proj"
    )
    monkeypatch.setenv("WANDB_MODE", "disable")
    with pytest.raises(ConfigError, match="^WANDB_MODE is 'disable'.*WANDB_MODE=disabled"):
        recipe("logging.logger=[wandb]")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert recipe("logging.logger=[wandb]")


def test_a_yaml_recipe_may_build_on_another(tmp_path):
    (tmp_path / "base.yaml").write_text("policy: {model_name_or_path: m}\ntrain: {epoch: 3, seed: 1}\n")
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\ntrain: {seed: 2}\n")
    config, _ = load_recipe(str(tmp_path / "mine.yaml"))
    assert (config.train.epoch, config.train.seed, config.policy.model_name_or_path) == (3, 2, "m")


@pytest.mark.parametrize(
    ("key", "type"), [("kl_beta = 0.1", "grpo"), ("temperature = 0.5", "grpo"), ("mini_batch = 1", "sft"), ("", "sft")]
)
def test_without_a_type_the_keys_of_rollouts_mean_grpo(tmp_path, key, type):
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[policy]\nmodel_name_or_path = "m"\n[train]\ntrain_batch_per_replica = 16\n[train.train_policy]\n{key}\n'
    )
    assert load_recipe(str(path))[0].train.train_policy.type == type


def test_all_linear_and_none_are_words_of_released_recipes(recipe):
    config, _ = recipe("policy.lora.target_modules=all-linear", "logging.experiment_name='None'")
    assert config.policy.lora.target_modules is None and config.logging.experiment_name is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs=3", "There is no key 'train.epochs'. Did you mean 'epoch'?"),
        ("train.mini_batch=3", "Did you mean train.train_policy.mini_batch?"),
        ("train.train_policy.dataset_test_size=x", "Use train.train_policy.dataset.test_size"),
        ("train.resume='None'", "Set train.resume=false"),
        ("train.epoch=x", "train.epoch is 'x' (str); expected int"),
        ("train.ckpt.save_freq=0", "expected at least 1"),
        ("train.ckpt.max_keep=0", "Set train.ckpt.enable_checkpoint=false"),
        ("train.ckpt.upload_s3=true", "Set train.ckpt.s3_bucket=<name>"),
        ("train.ckpt.upload_hf=true", "Set train.ckpt.hf_repo_name=<name>"),
        ("train.optm_betas=[0.9]", "expected two numbers"),
        ("train.optm_warmup_steps=1.5", "Set train.optm_warmup_steps=2"),
        ("train.train_policy.dataset.streaming=true", "Set train.max_num_steps=<steps>"),
        ("train.train_batch_per_replica=7", None),
        ("policy.parallelism.dp_shard_size=0", "Set policy.parallelism.dp_shard_size=1"),
        ("policy.model_name_or_path=''", "Set policy.model_name_or_path=<folder or hub id>"),
        ("policy.lora.target_modules=q_proj", "Set 'policy.lora.target_modules=[q_proj]'"),
        (r"policy.lora.target_modules=.*\.(q_proj|v_proj)", "Set 'policy.lora.target_modules=[q_proj,v_proj]'"),
        ("logging.logger=[tensorbord]", "logging.logger contains 'tensorbord'"),
        ("rollout.backend=trtllm", "this engine is not available; expected vllm or torch. Set rollout.backend=vllm"),
        ("~train.epoch", "expected key=value"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_cure(recipe, override, message):
    if message is None:  # the control: one rank takes any batch
        assert recipe(override)[0].train.train_batch_per_replica == 7
        return
    with pytest.raises(ConfigError) as error:
        recipe(override)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("type", "words", "fix"),
    [
        ("grpo", ["rollout.n_generation=1"], "rollout.n_generation=8"),
        ("grpo", ["train.train_policy.temperature=0"], "train.train_policy.temperature=1.0"),
        ("grpo", ["rollout.sampling_config.temperature=0.5"], "rollout.sampling_config.temperature=1.0"),
        ("grpo", ["policy.lora.lora_dropout=0.1"], "policy.lora.lora_dropout=0"),
        ("dpo", ["rollout.n_generation=1", "validation.reward_function=gsm8k"], "validation.reward_function=null"),
        ("sft", ["validation.enable=true", "validation.max_response_length=64"], "rollout.max_response_length=64"),
    ],
)
def test_settings_that_do_not_fit_the_method_are_rejected_and_the_fix_mends_it(recipe, type, words, fix):
    words = ["train.train_batch_per_replica=16", *words]
    with pytest.raises(ConfigError) as error:
        recipe(*words, type=type)
    assert f"Set {fix}" in str(error.value) and words[-1].rpartition("=")[2] in str(error.value)
    recipe(*words, fix, type=type)


@pytest.mark.parametrize("asks", ["overlong_reward.enable_overlong_penalty=true", "reward_function=[overlong]"])
def test_the_penalty_of_long_answers_leaves_room_for_short_ones(recipe, asks):
    section, limit = "train.train_policy", "rollout.max_response_length=512"
    buffer = f"{section}.overlong_reward.buffer_length"
    words = ["train.train_batch_per_replica=16", f"{section}.{asks}", limit]
    config, _ = recipe(*words, f"{buffer}=512", type="grpo")
    assert config.train.train_policy.overlong_reward.buffer_length == 512
    recipe(
        f"{buffer}=4096", limit, "train.train_batch_per_replica=16", type="grpo"
    )  # without the penalty nothing is bounded
    for more, longest in ((), 512), (("policy.model_max_length=300",), 300):
        with pytest.raises(ConfigError, match=f"=513; .* {longest},.*Set {buffer}=null"):
            recipe(*words, *more, f"{buffer}=513", type="grpo")
    config, _ = recipe(*words, f"{buffer}=null", type="grpo")
    method = config.train.train_policy
    rewards = make_rewards(method.reward_function, method.overlong_reward)
    lengths = (1, 384, 448, 512)
    found = [rewards("x", Prompt([1], {}, "y", {}), num_tokens=n, max_tokens=512)[1]["overlong"] for n in lengths]
    assert found == [0, 0, -0.5, -1]


@pytest.mark.parametrize("key", sorted(NOT_DONE))
def test_a_key_that_is_not_done_is_refused_only_with_another_value(recipe, key):
    possible = NOT_DONE[key][0]
    other = {
        "rollout.backend": "vllm_async", "rollout.mode": "async", "rollout.quantization": "fp8",
        "policy.trainable_map": "{a:true}", "policy.lora.modules_to_save": "[a]",
        "policy.lora.init_lora_weights": "false", "policy.model_revision": "main",
    }.get(key, "true" if possible[0] is False else "2")  # fmt: skip
    with pytest.raises(ConfigError, match=rf"{key} is .*Set {key}="):
        recipe(f"{key}={other}")
    for value in possible:
        recipe(f"{key}={override_text(value)}")


def test_what_the_tables_name_exists():
    keys = dict(keys_of(RecipeConfig))
    assert set(ALIASES.values()) <= set(keys)
    assert not {*ALIASES, *WITHOUT_EFFECT} & set(keys)


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
def test_a_key_without_effect_gets_one_line_unless_it_asks_for_what_happens(recipe, key):
    neutral, reason = WITHOUT_EFFECT[key]
    asked = "mxfp4" if key == "rollout.quantization" else "7"
    config, notices = recipe(f"{key}={asked}")
    assert notices == [f"{key}={asked} has no effect: {reason}"] and config == recipe()[0]
    for value in neutral:
        assert recipe(f"{key}={override_text(value)}")[1] == []


def test_sampling_that_is_not_trained_is_noted_before_the_run(recipe):
    _, notices = recipe("train.train_batch_per_replica=16", "rollout.sampling_config.top_k=50", type="grpo")
    assert [
        line
        for line in notices
        if line.startswith("rollout.sampling_config.top_k=50 has no effect: completions are sampled")
    ]
    assert not recipe("train.train_batch_per_replica=16", type="grpo")[1]


def test_every_default_is_accepted_and_leaves_are_documented():
    config = from_mapping(RecipeConfig, {"policy": {"lora": {}}})
    assert config.train.ckpt.max_keep == 5 and config.policy.lora.r == 8
    assert all(field.metadata["help"] for _, field in keys_of(RecipeConfig))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "x = = 1", "is not TOML"),
        ("a.yaml", "a: [1", "cannot be composed"),
        ("a.yaml", "defaults: [nowhere]", "cannot be composed"),
        ("a.json", "{}", "expected a file with the suffix .toml or .yaml"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(str(tmp_path / name))
    assert message in str(error.value) and name in str(error.value)
    with pytest.raises(ConfigError, match="Did you mean 'mistral-7b-fsdp4-sft'"):
        load_recipe("mistral-7b-fsdp-sft")
