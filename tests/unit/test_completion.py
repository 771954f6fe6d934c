"""Completion by Tab in real shells, the words that it offers, and the help of `rlinf train`."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf.cli import EXIT_USER_ERROR, main
from rlinf.cli.commands import COMMANDS
from rlinf.imports import import_string
from rlinf.options import override_text, public_fields, to_mapping
from rlinf.serving.layouts import ROBOTS

ROOT = Path(__file__).parents[2]
SHELLS = ("bash", "zsh", "fish")


def offered(line, capsys):
    assert main(["--complete", line]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rlinf tr", ["train"]),
        ("/somewhere/bin/rlinf train experiment=tabletop_ppo_", ["tabletop_ppo_cnn", "tabletop_ppo_mlp"]),
        ("rlinf train model=open", ["openvla", "openvla_oft", "openvla_oft_tiny", "openvla_tiny"]),
        ("rlinf evaluate evaluation.greedy=", ["true", "false"]),
        ("rlinf train trainer.sharding=", ["replicate", "auto", "fsdp2"]),
        ("rlinf sft trainer.max_st", ["trainer.max_steps="]),
        ("rlinf train cluster.dead", ["cluster.deadlines."]),
        ("rlinf train cluster.deadlines.pu", ["cluster.deadlines.push="]),
        ("rlinf train algorithm=grpo algorithm.scale_b", ["algorithm.scale_by_std="]),
        (
            "rlinf train experiment=metaworld_residual algorithm.ta",
            ["algorithm.tau=", "algorithm.target_update_interval=", "algorithm.target_entropy="],
        ),
        ("rlinf train algorithm.ta", []),
        ("rlinf train no_such_section.k", []),
        ("rlinf train env=no_such_env env.ta", ["env.tasks="]),
        ("rlinf why outputs/", []),
        ("rlinf robot max_", ["max_relative_target=", "max_observation_age_s=", "max_failures="]),
        ("rlinf robot success=", ["env", "human", "page"]),
        ("rlinf robot real_time=", ["true", "false"]),
        ("rlinf robot evaluation.gre", ["evaluation.greedy="]),
        ("rlinf serve keys=", ["rlinf", *ROBOTS]),
    ],
)
def test_the_next_words(line, words, capsys):
    start = line.rpartition(" ")[2].partition("=")
    expected = [f"{start[0]}={word}" for word in words] if start[1] else words
    assert offered(line, capsys) == expected


def test_a_first_tab_offers_commands_and_a_second_word_groups_and_sections(capsys):
    assert set(COMMANDS) <= set(offered("rlinf ", capsys))
    found = offered("rlinf train ", capsys)
    assert {"experiment=", "model=", "env=", "algorithm=", "trainer.", "seed="} <= set(found)
    assert "trainer.max_steps=" not in found, "the keys of a section come after its dot"


@pytest.mark.parametrize("words", [["tcsh"], ["bash", "zsh"], []])
def test_another_shell_is_refused_in_one_sentence(words, monkeypatch, capsys):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["--install-completion", *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "expected one of bash, zsh, fish. Run rlinf --install-completion bash" in error and error.count("\n") == 1


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user with this home folder, in which `rlinf` is a command."""
    (home / "bin").mkdir(exist_ok=True)
    program = home / "bin" / "rlinf"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlinf "$@"\n')
    program.chmod(0o755)
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "dumb"}


def typed(shell: str, home: Path, keys: str, wanted: str) -> str:
    """Type keys into an interactive shell until its output has the wanted text; return the output."""
    outside, inside = pty.openpty()
    process = subprocess.Popen(
        [shell, "-i"], stdin=inside, stdout=inside, stderr=inside, env=environment(home),
        start_new_session=True, cwd=home,
    )  # fmt: skip
    os.close(inside)
    output, deadline, is_typed = "", time.monotonic() + 120, False
    try:
        while wanted not in output and time.monotonic() < deadline:
            if select.select([outside], [], [], 1.0)[0]:
                output += os.read(outside, 4096).decode(errors="replace")
            elif not is_typed:  # the prompt is there, and the shell is silent
                os.write(outside, keys.encode())
                is_typed = True
    finally:
        process.kill()
        process.wait()
        os.close(outside)
    return output


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_an_experiment_in_a_shell(shell, tmp_path, monkeypatch, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        assert main(["--install-completion", shell]) == 0
    loading = [path for path in (tmp_path / ".bashrc", tmp_path / ".zshrc") if path.is_file()]
    assert [path.read_text().count("completion of rlinf") for path in loading] == [1] * (shell != "fish"), "once"
    before, after = "rlinf train experiment=tabletop_ppo_m", "rlinf train experiment=tabletop_ppo_mlp"
    if shell == "fish":  # which tells what Tab would offer
        ask = ["fish", "-c", f"complete -C '{before}'"]
        assert subprocess.check_output(ask, env=environment(tmp_path), text=True).split() == [after.split()[-1]]
        return
    # At the start of the line "echo" is put in front, so that the shell prints the whole line that Tab has made.
    output = typed(shell, tmp_path, f"{before}\t\x01echo \r", after)
    assert after in output, output


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.keys])
def test_the_help_of_a_command_explains_its_own_keys(command, capsys):
    """Each key with its default, choices or bounds, and what it means, in order and within 80 columns."""
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.partition("its keys, with their defaults")[2].splitlines()
    words, kind = " ".join(lines).split(), import_string(COMMANDS[command].keys)
    for name, field in public_fields(kind).items():
        shown = next(line for line in lines if line.startswith(f"  {name}="))
        assert shown.split()[0] == f"{name}={override_text(to_mapping(kind())[name])}"
        assert all(str(each) in shown for each in field.metadata["choices"] or ())
        meaning, after = field.metadata["help"].split(), words.index(shown.split()[0]) + len(shown.split())
        assert words[after : after + len(meaning)] == meaning and max(map(len, lines)) <= 80


def test_help_of_train_is_one_screen_and_the_help_of_hydra_is_still_there(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 140
    words = ["usage: rlinf train", "experiment=quickstart", "quickstart_rlt", "openvla_tiny", "grpo", "--hydra-help"]
    assert [word for word in words if word not in text] == []
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--hydra-help"])
    assert "--multirun" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_usage_and_a_text(command, capsys):
    assert main([command, "--help"]) == 0
    usage, _, text = capsys.readouterr().out.partition("\n\n")
    assert usage.startswith(f"usage: rlinf {command} ") and len(text) > 40
