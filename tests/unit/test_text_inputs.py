"""Text given to commands that train policies: one sentence that says where text is trained."""

import json

import pytest

from rlinf.cli import EXIT_USER_ERROR, main

PAGE = "To train a model on text, use `rlinf launch --config <recipe>`: docs/recipes.md"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with a text file, a folder of text and a language model's folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "llama").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("chat.jsonl", "'chat.jsonl' is a text file"),
        ("llama", "'llama' is a language model (llama)"),
        ("experiment=quickstart sft.dataset=chat.jsonl", "sft.dataset is 'chat.jsonl'"),
        ("experiment=quickstart sft.dataset=texts", "sft.dataset is 'texts'"),
        ("experiment=quickstart model.model_path=llama", "model.model_path is 'llama', a language model (llama)"),
        ("model.model_type=llama model.model_path=llama", "model.model_path is 'llama', a language model (llama)"),
        ("model=hf_vla model.model_path=llama", "model.model_path is 'llama', a language model (llama)"),
    ],
)
def test_text_is_refused_with_the_page_that_trains_it(words, named, here, started, capsys):
    assert main(["train", *words.split()]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert named in said and PAGE in said and len(said.splitlines()) == 1 and started == []


def test_runs_checkpoints_and_other_models_with_a_log_beside_them_are_no_text(here, started, capsys):
    files = {"run_a": "metrics.jsonl", "other_run": "log.jsonl", "policy_b": "log.jsonl", "saved": "a.jsonl"}
    for name, file in files.items():
        (here / name).mkdir()
        (here / name / file).write_text("{}\n")
    (here / "other_run" / "checkpoints").mkdir()
    (here / "policy_b" / "config.json").write_text(json.dumps({"model_type": "mlp"}))
    (here / "saved" / "state.json").write_text("{}")
    for name in files:
        assert main(["evaluate", name]) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert name in said and "text" not in said and PAGE not in said
