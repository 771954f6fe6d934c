"""``rlinf launch``: its words, dataset scripts, and what it rejects before it starts."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from rlinf.cli import main
from rlinf.distributed.config import DeadlinesConfig
from rlinf.errors import ConfigError
from rlinf.recipes import launch_worker as launching
from rlinf.recipes.datasets import MAKERS
from rlinf.recipes.packers import ChatPacker, PromptPacker

ROOT = Path(__file__).parents[2]

RECIPE = """
[train]
output_dir = "{output}"
train_batch_per_replica = 4
[train.train_policy]
type = "{type}"
dataset.name = "{data}"
reward_function = "gsm8k"
[policy]
model_name_or_path = "{model}"
[rollout]
backend = "torch"
n_generation = 2
[logging]
logger = ["console", "wandb"]
"""

SCRIPT = """
from helper import ROWS
from rlinf.recipes import launch_worker as launching
from rlinf.recipes.datasets import MAKERS
from rlinf.recipes.launch_worker import launch_worker

if __name__ == "__main__":
    launch_worker(dataset=lambda config: ROWS * config.train.epoch, reward_fns=["format"])
"""


@pytest.fixture
def calls(monkeypatch):
    """Replace the training of a rank; the list receives ``(config, data)`` of each."""
    calls = []

    def run(config, data):
        calls.append((config, vars(data)))
        return Path("run")

    monkeypatch.setattr(launching, "run", run)
    return calls


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write a recipe, its dataset and a script next to each other, and work there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    data = tmp_path / "rows.jsonl"
    row = {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(40)))
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "mine.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("ROWS = [{'text': 'a'}]\n")

    def write(type="sft", model="my/model", **fields):
        path = tmp_path / "recipe.toml"
        path.write_text(RECIPE.format(type=type, model=model, **{"data": data, "output": tmp_path / "out", **fields}))
        return str(path)

    return write


@pytest.mark.parametrize(
    "words",
    [
        ["configs/mistral/mistral-7b-fsdp4-sft.toml", "cosmos_rl.tools.dataset.dummy_sft.py"],
        ["configs/mistral/mistral-7b-fsdp4-sft.toml", "cosmos_rl.tools.dataset.dummy_sft"],
        ["configs/mistral/mistral-7b-fsdp4-sft.toml", "./tools/dataset/dummy_sft.py"],
        ["configs/mistral/mistral-7b-p-fsdp1-r-tp1-grpo.toml"],
        ["configs/gemma/gemma3-12b-vlm-fsdp4-sft.toml", "./tools/dataset/hf_vlm_sft.py"],
        ["configs/phi/phi4-14b-p-fsdp4-r-tp2-grpo.toml", "./tools/dataset/gsm8k_grpo.py"],
        ["configs/cosmos-reason1-7b-fsdp2-sft.toml", "./tools/dataset/cosmos_sft.py"],
        ["configs/cosmos-reason1-7b-p-fsdp2-r-tp2-grpo.toml", "tools/dataset/cosmos_grpo.py"],
        ["mistral-7b-fsdp4-sft", "raw_text_sft"],
        ["gpt-oss-20b-fsdp8-sft"],
    ],
)
def test_the_commands_of_the_guides_parse_without_data_model_or_network(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--config", *words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "policy GPUs:" in shown and ("script:" in shown) == (len(words) == 2)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_gpus_of_policy_and_rollout(capsys):
    main(["launch", "--config=cosmos-reason1-7b-p-fsdp2-r-tp2-grpo", "--dry-run"])
    shown = capsys.readouterr().out
    assert re.search(r"policy GPUs: +2 .*\nrollout GPUs: +2 .*\ntotal GPUs: +4\n", shown)
    main(["launch", "--dry-run", "--config", "cosmos-reason1-7b-fsdp2-sft"])
    assert re.search(r"total GPUs: +2\n", capsys.readouterr().out)


def test_a_dry_run_counts_the_rows_that_are_here(recipe, capsys):
    path = recipe()
    assert main(["launch", "--config", path, "--dry-run", "train.epoch=3"]) == 0
    assert "30 = 3 epochs * N rows / 4; N = 40" in capsys.readouterr().out
    words = ["validation.enable=true", "train.train_policy.dataset.test_size=8"]
    assert main(["launch", "--config", path, "--dry-run", *words]) == 0
    assert "8 = 1 epochs * N rows / 4; N = 32" in capsys.readouterr().out
    assert main(["launch", "--config", path, "--dry-run", *words[:1]]) == 0
    assert "9 = 1 epochs * N rows / 4; N = 36" in capsys.readouterr().out, "by default a tenth is kept for validation"


def test_without_a_script_rows_and_packer_are_those_of_the_recipe(recipe, calls):
    assert main(["launch", "--config", recipe(), "train.seed=3"]) == 0
    [(config, data)] = calls
    assert config.train.seed == 3 and len(data["dataset"]) == 40
    assert type(data["data_packer"]) is ChatPacker
    assert data["reward_fns"] is data["val_dataset"] is data["val_data_packer"] is None


def test_threads_and_deadlines_of_the_ranks_are_those_of_the_recipe(recipe, calls, monkeypatch):
    given = []
    monkeypatch.setattr(
        "rlinf.recipes.launch.start_ranks", lambda function, argument, *more: given.append((function, argument, more))
    )
    words = ["cluster.deadlines.save=77", "cluster.num_threads=3"]
    assert main(["launch", "--config", recipe(), *words]) == 0
    [(function, argument, (*_, deadlines))] = given
    assert deadlines == {**asdict(DeadlinesConfig()), "save": 77}
    threads = []
    monkeypatch.setattr("rlinf.recipes.launch.set_num_threads", lambda *numbers: threads.append(numbers))
    function(argument)
    assert threads == [(3, 1)] and len(calls) == 1


def test_without_a_script_grpo_reads_prompts(recipe, calls):
    assert main(["launch", "--config", recipe("grpo")]) == 0
    assert type(calls[0][1]["data_packer"]) is PromptPacker


@pytest.mark.parametrize("script", ["scripts/mine.py", "./scripts/mine.py", "scripts.mine", "scripts.mine.py"])
def test_a_script_gives_rows_and_rewards_and_may_import_its_neighbours(recipe, calls, script):
    assert main(["launch", "--config", recipe("grpo"), script, "train.epoch=2"]) == 0
    [(_, data)] = calls
    assert data["dataset"] == [{"text": "a"}] * 2 and data["reward_fns"] == ["format"]


def test_a_reward_that_does_not_exist_is_refused_before_rows_are_read(recipe, calls, capsys):
    words = ["train.train_policy.reward_function=gsm8", "train.train_policy.dataset.name=nowhere.jsonl"]
    assert main(["launch", "--config", recipe("grpo"), *words]) == 2
    assert "Did you mean 'gsm8k'" in capsys.readouterr().err and calls == []


def test_the_validation_data_of_a_recipe_are_loaded(recipe, calls, tmp_path):
    words = ["validation.enable=true", f"validation.dataset.name={tmp_path}/rows.jsonl"]
    assert main(["launch", "--config", recipe(), *words]) == 0
    assert len(calls[0][1]["val_dataset"]) == 40


@pytest.mark.parametrize(
    ("file", "message"),
    [("adapter_config.json", "only adapters"), ("README.md", "Set policy.model_name_or_path=<a different folder>")],
)
def test_a_folder_without_a_model_is_refused_before_the_plan_is_printed(
    recipe, calls, capsys, tmp_path, monkeypatch, file, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / file).write_text("{}")
    assert main(["launch", "--config", recipe(), "policy.model_name_or_path=made"]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == "" and message in printed.err and "policy.trust_remote_code" not in printed.err and calls == []
    )


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    ("word", "maker"),
    [("train.train_policy.dataset.name=./no.jsonl", ""), ("policy.model_name_or_path=no/such/model", ""),
     ("policy.model_name_or_path=arithmetic/model", "scripts/make_arithmetic_data.py arithmetic")],
)  # fmt: skip
def test_what_is_not_there_is_refused_before_the_plan_is_printed(recipe, calls, capsys, word, maker, is_dry):
    assert main(["launch", "--config", recipe(), word, *["--dry-run"] * is_dry]) == 2
    told = capsys.readouterr()
    key = word.partition("=")[0]
    assert (
        told.out == ""
        and f"{word} does not exist" in told.err
        and f"{key}=<" in told.err
        and maker in told.err
        and calls == []
    )
    assert all((ROOT / script).is_file() for script in MAKERS.values())


def test_missing_validation_data_are_named_by_their_own_key_with_the_script_that_makes_them(recipe, calls, capsys):
    words = ["validation.enable=true", "validation.dataset.name=arithmetic/test.jsonl"]
    assert main(["launch", "--config", recipe(), *words]) == 2
    stderr = capsys.readouterr().err
    assert "validation.dataset.name=arithmetic/test.jsonl does not exist" in stderr and "train_policy" not in stderr
    assert "scripts/make_arithmetic_data.py arithmetic" in stderr and calls == []


def test_a_dry_run_plans_before_the_own_data_of_a_recipe_are_made_and_warns(recipe, calls, capsys):
    for words, status in (["--dry-run"], 0), ([], 2):
        assert main(["launch", "--config", recipe(data="later.jsonl"), *words]) == status
        printed = capsys.readouterr()
        assert "later.jsonl does not exist" in printed.err and ("would be rejected" in printed.err) == (status == 0)
        assert bool(printed.out) == (status == 0) and calls == []


def test_a_script_of_an_installed_module_is_found_and_one_that_is_run_alone_needs_a_recipe():
    assert launching.find_script("json.tool.py").name == "tool.py"
    with pytest.raises(ConfigError, match="Run rlinf launch --config <recipe>"):
        launching.launch_worker()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --config <recipe>"),
        (["--config", "mistral-7b-fsdp4-sft", "--dryrun"], "Did you mean '--dry-run'"),
        (["--config", "mistral-7b-fsdp4-sft", "a.py", "b.py"], "are several dataset scripts"),
        (["--config", "mistral-7b-fsdp4-sft", "no_such_script.py"], "There is no dataset script 'no_such_script.py'"),
    ],
)
def test_words_that_mean_nothing_are_refused(words, message, capsys):
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_missing_gpus_are_named_before_anything_is_read(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["launch", "--config", "cosmos-reason1-7b-p-fsdp2-r-tp2-grpo"]) == 2
    shown = capsys.readouterr()
    assert "needs 4 GPUs (2 for the policy, 2 for the rollout), but torch sees 0" in shown.err and shown.out == ""


def test_a_script_without_a_call_is_refused(recipe, calls, capsys, tmp_path):
    (tmp_path / "silent.py").write_text("x = 1\n")
    assert main(["launch", "--config", recipe(), "silent.py"]) == 2
    assert "ended without calling launch_worker" in capsys.readouterr().err


def test_without_a_key_wandb_stays_offline_and_without_its_package_it_is_left_out(recipe, calls, capsys, monkeypatch):
    assert main(["launch", "--config", recipe()]) == 0
    assert "WANDB_API_KEY is not set, so wandb writes offline" in capsys.readouterr().err
    assert calls[-1][0].logging.logger == ["console", "wandb"]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert main(["launch", "--config", recipe()]) == 0
    assert "wandb" not in capsys.readouterr().err
    monkeypatch.setattr("rlinf.recipes.launch.importlib.util.find_spec", lambda name: None)
    assert main(["launch", "--config", recipe()]) == 0
    assert "wandb is not installed" in capsys.readouterr().err
    assert calls[-1][0].logging.logger == ["console"]


def test_no_key_of_the_environment_is_printed(recipe, calls, capsys, monkeypatch):
    secrets = {
        name: f"secret-of-{name}"
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY")
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--config", recipe()]) == 0
    shown = capsys.readouterr()
    assert "secret-of" not in shown.out + shown.err


def test_just_install_sets_the_project_up():
    text = (ROOT / "justfile").read_text()
    recipes = dict(re.findall(r"^([a-z][\w-]*)[^\n:=]*:\n((?:[ \t]+.*\n)+)", text, re.M))
    assert "scripts/setup.sh" in recipes["install"]
    assert (ROOT / "scripts" / "setup.sh").is_file()
    if shutil.which("just"):
        listed = subprocess.run(["just", "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "install" in listed
