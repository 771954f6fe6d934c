"""Whole runs of recipes: folders, log lines, and runs that were interrupted."""

import gzip
import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import datasets
import pytest
import torch
from recipe_sums import ROWS, Sums, add_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlinf.checkpoints import checkpoint_manager
from rlinf.cli import main
from rlinf.errors import CheckpointError, ConfigError
from rlinf.options import from_mapping
from rlinf.recipes.build import RecipeData
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.hf_folder import HFFolder
from rlinf.recipes.run import newest_checkpoint, run
from rlinf.recipes.samples import BadRowError
from rlinf.recipes.sft import SFTTrainer
from rlinf.tracking.tracker import read_metrics


def digits(completion, reference, **row):
    """Fraction of digits: a reward that random answers differ in."""
    return sum(letter.isdigit() for letter in completion) / 5


def config_of(model: str, output: Path, kind: str, steps: int, **train) -> RecipeConfig:
    return from_mapping(
        RecipeConfig,
        {
            "train": {
                "output_dir": str(output), "param_dtype": "float32", "optm_lr": 1e-2, "train_batch_per_replica": 8, "epoch": 3,
                "max_num_steps": steps, "optm_warmup_steps": 2, "optm_grad_norm_clip": 1e9,
                "train_policy": {"type": kind, "mini_batch": 4, "kl_beta": 0.01 * (kind == "grpo"), "dataset": {"test_size": 4}},
                "ckpt": {"save_freq": 2, "export_safetensors": False},
                **train,
            },
            "policy": {"model_name_or_path": model, "model_max_length": 32, "model_gradient_checkpointing": False, "device": "cpu"},
            "rollout": {"backend": "torch", "n_generation": 4, "batch_size": 2, "max_response_length": 5},
            "validation": {"enable": True, "freq": 2},
        },
    )  # fmt: skip


def start(config: RecipeConfig) -> Path:
    return run(config, RecipeData(ROWS, Sums(), [digits]))


@pytest.fixture(scope="module")
def model(tiny_lm):
    return add_tokenizer(tiny_lm())


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "safetensors" / "final" / "00000.safetensors")


def test_the_log_and_the_folder_of_a_run(model, tmp_path, capfd):
    folder = start(config_of(model, tmp_path, "sft", 4))
    log = capfd.readouterr().err
    head = r"\[rank0\]:\[rlinf\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - rlinf - INFO - "
    final = re.escape(str(folder / "safetensors" / "final"))
    for line in (
        r"\[Policy\] Step: 4/4, \[Policy\] Loss: \d+\.\d+",
        r"\[Policy\] Training finished at step 4/4, saving final checkpoint in huggingface safetensors\.\.\.",
        rf"Prepare to exporting safetensors to {final} at rank 0",
        r"Saved chunk 0 to 00000\.safetensors",
        rf"\n\[rank0\]:\n\[rank0\]:Exported safetensors to {final}",
    ):
        assert re.search(head + line, log), line
    assert re.fullmatch(r"\d{14}", folder.name) and folder.parent == tmp_path
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_2", "step_4"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "safetensors" / "final")
    assert AutoTokenizer.from_pretrained(folder / "safetensors" / "final").decode([8]) == "5"
    assert any(not p.equal(q) for p, q in zip(loaded.parameters(), AutoModelForCausalLM.from_pretrained(model).parameters(),
                                              strict=True))  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["validation"]["eval/loss"] > 0
    assert RecipeConfig and "model_name_or_path" in (folder / "config.yaml").read_text()


def test_validation_of_grpo_keeps_its_answers(model, tmp_path):
    folder = start(config_of(model, tmp_path, "grpo", 2))
    samples = [json.loads(line) for line in (folder / "samples" / "step_2.jsonl").read_text().splitlines()]
    assert [each["reference"] for each in samples] == [row["answer"] for row in ROWS[:4]]
    assert all(each["reward"] == each["rewards"]["digits"] == digits(each["completion"], None) for each in samples)


def test_other_data_are_refused_when_a_run_goes_on(model, tmp_path):
    start(config_of(model, tmp_path, "sft", 2))
    with pytest.raises(ConfigError, match="seed was 0 and is 7.*train.resume=false"):
        start(config_of(model, tmp_path, "sft", 4, resume=True, seed=7))


@pytest.mark.parametrize("lora", [None, {"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}])
def test_a_checkpoint_is_exported_as_the_final_policy_was(model, tmp_path, lora, capsys):
    """``rlinf export`` on the last checkpoint of a run; the model that training started with may have moved."""
    config = config_of(model, tmp_path / "runs", "sft", 2)
    config.train.ckpt.chunk_bytes = 16_000
    if lora is not None:
        config.policy.lora = from_mapping(type(config.policy), {"lora": lora}).lora
    folder = start(config)
    moved = shutil.copytree(model, tmp_path / "moved")
    words = [f"checkpoint={folder}", f"output={tmp_path / 'exported'}", f"policy.model_name_or_path={moved}"]
    assert main(["export", *words, *(["merge_lora=true"] if lora else [])]) == 0
    capsys.readouterr()
    one, two = all_weights(folder / "safetensors" / "final"), all_weights(tmp_path / "exported")
    assert len(list((folder / "safetensors" / "final").glob("*.safetensors"))) >= 3
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    before = load_file(f"{model}/model.safetensors")
    assert not all(one[name].equal(before[name]) for name in one), "a control: training has changed it"
    AutoTokenizer.from_pretrained(tmp_path / "exported")
    if lora is not None:
        words[1] = f"output={tmp_path / 'adapter'}"
        assert main(["export", *words]) == 0
        assert (tmp_path / "adapter" / "adapter_config.json").is_file()
        words[2] = f"policy.model_name_or_path={other_weights(model, tmp_path / 'other')}"
        assert main(["export", *words[:1], f"output={tmp_path / 'rejected'}", words[2]]) == 2
        assert (
            "were trained on base weights with digest" in capsys.readouterr().err
            and not (tmp_path / "rejected").exists()
        )


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def other_weights(model: str, target: Path) -> Path:
    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, target / "model.safetensors", metadata={"format": "pt"}
    )
    return target


def fail_in_step_2(monkeypatch) -> None:
    update = SFTTrainer.step

    def fail(self, step):
        if step == 2:
            raise FloatingPointError("step 2")
        return update(self, step)

    monkeypatch.setattr(SFTTrainer, "step", fail)


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_an_error_of_the_training_waits_for_the_checkpoint_that_is_being_written(
    model, tmp_path, monkeypatch, capfd, disk_is_full
):
    write = checkpoint_manager.write_snapshot

    def slow(*arguments, **more):
        time.sleep(2)
        if disk_is_full:
            raise CheckpointError("no space")
        write(*arguments, **more)

    monkeypatch.setattr(checkpoint_manager, "write_snapshot", slow)
    fail_in_step_2(monkeypatch)
    with pytest.raises(FloatingPointError, match="step 2"):
        start(config_of(model, tmp_path, "sft", 4, timestamp="20260102030405"))
    assert (tmp_path / "20260102030405" / "checkpoints" / "step_2" / "state.json").is_file() != disk_is_full
    assert ("also lost: no space" in capfd.readouterr().err) == disk_is_full


def test_a_run_that_ended_before_its_export_is_exported_when_it_goes_on(model, tmp_path, monkeypatch):
    def full(self, checkpoint, output):
        raise CheckpointError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(HFFolder, "__call__", full)
        with pytest.raises(CheckpointError, match="no space"):
            start(config_of(model, tmp_path, "sft", 2, timestamp="20260102030405"))
    folder = tmp_path / "20260102030405"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_2"]
    assert not (folder / "safetensors").exists()
    assert start(config_of(model, tmp_path, "sft", 2, resume=True)) == folder
    expected = final_weights(start(config_of(model, tmp_path / "whole", "sft", 2)))
    found = final_weights(folder)
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation"]["eval/loss"] > 0, "as it was when the last step was taken"


def test_later_checkpoints_are_set_aside_when_a_run_goes_on_from_an_older_one(model, tmp_path):
    folder = start(config_of(model, tmp_path, "sft", 4))
    start(config_of(model, tmp_path, "sft", 3, resume=str(folder / "checkpoints" / "step_2")))
    assert (folder / "checkpoints" / "superseded_1" / "step_4").is_dir()
    assert newest_checkpoint(tmp_path) == folder / "checkpoints" / "step_3"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([*ROWS[:2], {"question": "1+1="}], "Row 2 .*cannot be used: it has no column 'answer'"),
        ([{"question": "1+1=" * 20, "answer": "2"}], "Row 0 .*tokens"),
    ],
)
def test_a_run_that_its_data_refuse_leaves_nothing_behind(model, tmp_path, rows, message):
    class Strict(Sums):
        """Rejects rows as the packers of rlinf do."""

        def sample(self, row):
            if "answer" not in row:
                raise BadRowError("it has no column 'answer'.")
            made = super().sample(row)
            if len(made.input_ids) > 32:
                raise BadRowError(f"it has {len(made.input_ids)} tokens; expected at most 32.")
            return made

    config = config_of(model, tmp_path / "outputs" / "mine", "sft", 2)
    config.validation.enable = False
    with pytest.raises(ConfigError, match=message):
        run(config, RecipeData(rows, Strict()))
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    (tmp_path / "outputs" / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=message):
        run(config, RecipeData(rows, Strict()))
    assert [path.name for path in (tmp_path / "outputs").rglob("*")] == ["mine", "notes.txt"], "what was there stays"


@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo"])
def test_steps_of_the_profiler_are_recorded_and_entropy_is_logged_on_request(model, tmp_path, kind):
    config = config_of(model, tmp_path / "traced", kind, 4)
    config.profiler.enable_profiler, config.profiler.sub_profiler_config.wait_steps = True, 0
    config.profiler.sub_profiler_config.active_steps = 2
    config.logging.report_entropy = True
    folder, plain = start(config), start(config_of(model, tmp_path / "plain", kind, 4))
    with gzip.open(folder / "profile" / "trace_rank0.json.gz", "rt", encoding="utf-8") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    phase = "sft" if kind == "sft" else "rl"
    assert sorted(name for name in names if " step " in name) == [f"{phase} step 1", f"{phase} step 2"]
    assert "Optimizer.step#MasterAdamW.step" in names
    assert 'href="profile/trace_rank0.json.gz"' in (folder / "report.html").read_text(encoding="utf-8")
    assert not (plain / "profile").exists()
    key = "sft/entropy" if kind == "sft" else "train/entropy"
    lines, without = ([line for line in read_metrics(each) if "time/update_s" in line] for each in (folder, plain))
    assert all(0 < line[key] <= math.log(48) for line in lines) and not any(key in line for line in without)
    one, two = final_weights(folder), final_weights(plain)
    assert all(one[name].equal(two[name]) for name in one), "neither changes a number"


def test_a_profiler_that_waits_for_longer_than_the_run_is_refused(model, tmp_path):
    config = config_of(model, tmp_path / "out", "sft", 2)
    config.profiler.enable_profiler = True
    with pytest.raises(ConfigError, match="records the steps 2 to 2, counted from 0, but the run has 2 steps"):
        start(config)
    assert not (tmp_path / "out").exists()


def test_a_run_with_a_name_goes_on_and_is_not_begun_twice(model, tmp_path):
    start(config_of(model, tmp_path, "sft", 2, timestamp="mine"))
    with pytest.raises(
        ConfigError, match="mine already has checkpoints. Set train.resume=true.*a different train.timestamp"
    ):
        start(config_of(model, tmp_path, "sft", 3, timestamp="mine"))
    assert start(config_of(model, tmp_path, "sft", 3, timestamp="mine", resume=True)) == tmp_path / "mine"
    assert start(config_of(model, tmp_path, "sft", 4, resume=True)) == tmp_path / "mine"
    steps = [line["step"] for line in read_metrics(tmp_path / "mine") if "sft/loss" in line]
    assert steps == [0, 1, 2, 3], "it continued each time"
    other = start(config_of(model, tmp_path, "sft", 1, timestamp="other", resume=True))
    assert other == tmp_path / "other" and (other / "checkpoints" / "step_1").is_dir()
    assert newest_checkpoint(tmp_path, "mine").name == "step_4"


def test_epochs_between_checkpoints_are_those_of_the_data(model, tmp_path):
    """36 rows in batches of 8 are 4 steps, whether the run ends in its second epoch or in its first one."""
    for steps, saved in ((5, ["step_4", "step_5"]), (1, ["step_1"])):
        config = config_of(model, tmp_path / str(steps), "sft", steps)
        config.train.ckpt.save_freq_in_epoch = 1
        folder = start(config)
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == saved


def test_a_stream_has_no_epochs_between_checkpoints(model, tmp_path):
    config = config_of(model, tmp_path, "sft", 2)
    config.train.ckpt.save_freq_in_epoch, config.validation.enable = 1, False
    with pytest.raises(ConfigError, match="A stream has no epochs.*save_freq=<steps>"):
        run(config, RecipeData(datasets.IterableDataset.from_generator(lambda: iter(ROWS)), Sums()))


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_is_stopped_says_whether_it_was_saved(model, tmp_path, monkeypatch, capfd, saves):
    update = SFTTrainer.step

    def stop(self, step):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(self, step)

    monkeypatch.setattr(SFTTrainer, "step", stop)
    config = config_of(model, tmp_path, "sft", 4)
    config.train.ckpt.enable_checkpoint = saves
    with pytest.raises(SystemExit) as end:
        start(config)
    log = capfd.readouterr().err
    assert end.value.code == 128 + signal.SIGTERM and len(list(tmp_path.glob("2*/checkpoints/step_1"))) == saves
    assert ("training so far is saved first" in log) == ("its checkpoint is saved" in log) == saves
    assert ("training so far is not saved" in log) == ("nothing was saved" in log) == (not saves)
    assert len(list(tmp_path.glob("2*/report.html"))) == 1, "the report shows the steps until then"
