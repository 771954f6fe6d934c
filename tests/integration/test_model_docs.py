"""docs/adding_a_model.md is executed, and the template that it walks through keeps the contract."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor

from rlinf.errors import ConfigError
from rlinf.models import build_policy, get_model, get_model_config_and_processor
from rlinf.models.config import ModelConfig
from rlinf.models.embodiment import your_model_action_model as template
from rlinf.options import public_fields
from rlinf.types import Observation

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- excerpt -->\n)?```(python|yaml|toml)\n(.*?)```", PAGE, re.DOTALL)
PLUGINS = PROJECT / "examples" / "embodiment" / "plugins"


def block(language: str, words: str) -> str:
    """Return the only block of the page in ``language`` that contains ``words``."""
    (code,) = (code for _, kind, code in BLOCKS if kind == language and words in code)
    return code


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Execute the page's Python in an empty folder; returns its variables and that folder."""
    folder = tmp_path_factory.mktemp("page")
    variables = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.manual_seed(0)
        for excerpt, language, code in BLOCKS:
            if language == "python" and not excerpt:
                exec(compile(code, "adding_a_model.md", "exec"), variables)
    return variables, folder


@pytest.fixture
def policy(page):
    variables, folder = page
    return build_policy(config_of(variables, folder))


def config_of(variables, folder):
    path = str(folder / "your_checkpoint")
    return {"model": variables["cfg"]["model"] | {"model_path": path}, "tokenizer": {"tokenizer_model": path}}


def observe():
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    sentences = ["reach the red block", "go to the zone", "push the blue block to the left"]
    return Observation({"front": images}, None, sentences)


def test_the_page_runs(page):
    assert page[0]["values"].shape == (2,)


def test_excerpts_are_the_templates_own_lines():
    source = Path(template.__file__).read_text(encoding="utf-8")
    excerpts = [code for excerpt, language, code in BLOCKS if excerpt and language == "python"]
    assert len(excerpts) == 2
    assert all(code in source for code in excerpts)


def test_the_pages_entry_points_are_those_of_the_sample_package():
    (entry_points,) = (code for _, language, code in BLOCKS if language == "toml")
    package = (PROJECT / "tests/fixtures/rlinf_sample_plugin/pyproject.toml").read_text(encoding="utf-8")
    assert entry_points in package


def test_a_yaml_of_ones_own_names_its_plugin_beside_it(tmp_path, monkeypatch):
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config
    from rlinf.models import MODELS

    others = {name: entry for name, entry in MODELS.entries().items() if name != "your_model_type"}
    monkeypatch.setattr(MODELS, "_entries", others)
    registration = block("python", "register_model(\n")
    (tmp_path / "your_file.py").write_text(registration, encoding="utf-8")
    experiment = block("yaml", "your_file.py")
    (tmp_path / "your_experiment.yaml").write_text(experiment, encoding="utf-8")
    config = build_config(compose_config(["experiment=your_experiment"], config_dir=str(tmp_path)))
    assert config.plugins == [str(tmp_path / "your_file.py")] and config.model.init_config == {"n_action_bins": 32}
    assert MODELS.entries()["your_model_type"].origin == config.plugins[0]


@pytest.mark.parametrize(
    "name, check, cloning",
    [("patch", "rollout against training", []),
     ("bin", "samples are the inverse transform of the random numbers", ["sft.max_steps=2", "sft.num_demonstrations=2"])],
)  # fmt: skip
def test_the_pages_other_models_are_diagnosed_and_train(name, check, cloning, tmp_path, monkeypatch, capsys):
    from rlinf.cli import main

    monkeypatch.chdir(tmp_path)
    for file, language, words in (
        (f"{name}_policy.py", "python", f"class {name.title()}Policy"),
        (f"{name}_experiment.yaml", "yaml", f"{name}_policy.py"),
    ):
        code = (PLUGINS / file).read_text(encoding="utf-8") if name == "bin" else block(language, words)
        (tmp_path / file).write_text(code, encoding="utf-8")
    own = ["--config-dir", ".", f"experiment={name}_experiment"]
    main(["diagnose", *own])
    printed = capsys.readouterr().out
    assert "FAIL" not in printed.replace("pass or FAIL", "") and check in printed
    if name == "patch":
        assert main(["train", *own, "env.image_size=32"]) != 0
        rejection = "The model reads images of 64 x 64 pixels, but env.image_size=32. Set env.image_size=64"
        assert rejection in capsys.readouterr().err
    tiny = ["rollout.num_envs=4", "rollout.num_chunks=16", "trainer.minibatch_size=64", "trainer.max_steps=1"]
    evaluation = ["evaluation.num_episodes=2", "evaluation.num_videos_per_task=0", "output_dir=run"]
    assert main(["train", *own, *tiny, *cloning, *evaluation]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (update,) = [line for line in metrics if "train/policy_loss" in line]
    assert update["rollout/logprob_gap_max"] < 1e-4 and update["train/grad_norm"] > 0


def test_the_pages_yaml_is_the_packaged_file_and_has_only_known_keys():
    section = yaml.safe_load(block("yaml", "vocab_size"))["model"]
    packaged = yaml.safe_load((PROJECT / "examples/embodiment/config/your_config.yaml").read_text(encoding="utf-8"))
    assert packaged["model"] == section
    assert len(section) == 14 and set(section) <= set(public_fields(ModelConfig))


def test_loading_arguments_of_the_page_reach_from_pretrained(page, monkeypatch):
    variables, folder = page
    seen = {}

    def spy(path, **kwargs):
        seen.update(kwargs)
        raise InterruptedError

    monkeypatch.setattr(template.YourModelForRLActionPrediction, "from_pretrained", spy)
    with pytest.raises(InterruptedError):
        get_model(config_of(variables, folder)["model"])
    assert {key: seen[key] for key in variables["arguments"]} == variables["arguments"]


def test_sizes_that_the_checkpoint_does_not_have_are_refused(page):
    section = config_of(*page)["model"]
    with pytest.raises(ConfigError, match="model.hidden_size=32"):
        get_model(section | {"hidden_size": 64})
    with pytest.raises(ConfigError, match="model.vocab_size=544"):
        get_model(section | {"vocab_size": 32000})
    with pytest.raises(ConfigError, match="action_chunks_len=1"):
        get_model(section | {"action_chunks_len": 2})


def test_auto_classes_know_the_model(page):
    config, processor = get_model_config_and_processor(config_of(*page))
    folder = str(page[1] / "your_checkpoint")
    assert isinstance(AutoConfig.from_pretrained(folder), template.YourModelConfig)
    assert isinstance(config, template.YourModelConfig) and isinstance(processor, template.YourProcessor)
    assert AutoProcessor is not None and AutoImageProcessor is not None
    assert processor.tokenizer.padding_side == "left"
    out = processor(
        ["<image><image><image><image>reach", "<image><image><image><image>go to the zone"],
        observe().images["front"][:2],
    )
    assert set(out) == {"input_ids", "attention_mask", "pixel_values"}
    assert out["attention_mask"][0, 0] == 0 and out["attention_mask"][:, -1].all(), "padding is on the left"


def test_template_keeps_the_tuple_and_samples_action_tokens_only(policy):
    with torch.no_grad():
        policy.lm_head.weight[:400] *= 100.0
    inputs = policy.preprocess(observe())
    prediction = policy.predict_action_batch(**inputs)
    actions, sequences, logits, values = prediction
    assert actions.shape == (3, 1, 7) and logits.shape == (3, 7, 544) and values.shape == (3,)
    assert sequences.shape == (3, inputs["input_ids"].shape[1] + 7)
    assert sequences[:, -7:].min() >= 512
    assert (logits.argmax(-1) < 512).any(), "control: unmasked, other tokens would win"
    assert not prediction.logits.requires_grad


def test_template_sft_loss_is_the_logprob_of_the_tokens(policy):
    inputs = policy.preprocess(observe())
    prediction = policy.predict_action_batch(**inputs)
    loss = policy.sft_loss(inputs, prediction.actions)
    tokens = policy.action_tokenizer.encode(policy.action_normalizer.normalize(prediction.actions)).flatten(1)
    torch.testing.assert_close(policy.decode_actions(tokens), prediction.actions)
    again = -policy.evaluate_actions(inputs, tokens).logprobs.mean(-1)
    torch.testing.assert_close(loss, again, atol=1e-5, rtol=0)


def test_template_without_value_head_gives_zeros(page):
    section = config_of(*page)
    section["model"]["value_head"] = False
    policy = build_policy(section)
    inputs = policy.preprocess(observe())
    prediction = policy.predict_action_batch(**inputs)
    assert policy.value_head is None and not prediction.values.any()
    assert not policy.evaluate_actions(inputs, prediction.sequences).values.any()


def test_the_template_runs_as_it_stands_by_the_sentence_of_the_page(tmp_path, monkeypatch, capsys):
    from rlinf.cli import main

    assert "python examples/embodiment/train.py model=your_model\n" in PAGE
    monkeypatch.chdir(tmp_path)
    small = [
        "trainer.max_steps=1", "rollout.num_envs=2", "rollout.num_chunks=4", "trainer.minibatch_size=8",
        "env.max_episode_steps=4", "evaluation.num_episodes=2", "evaluation.num_videos_per_task=0",
        "tracking.progress=false", "output_dir=run",
    ]  # fmt: skip
    assert main(["train", "model=your_model", *small]) == 0
    first_line = (PROJECT / "rlinf/config/model/your_model.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert Path(template.__file__).relative_to(PROJECT).as_posix() in first_line
    assert "your_model, chunks of 1 actions x 2 dimensions" in capsys.readouterr().out
