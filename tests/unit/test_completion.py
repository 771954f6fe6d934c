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
        ("rlinf evaluate evaluation.greedy=", ["true", "false"]),
        ("rlinf train trainer.sharding=", ["replicate", "auto", "fsdp2"]),
        ("rlinf train cluster.dead", ["cluster.deadlines."]),
        (
            "rlinf train experiment=metaworld_residual algorithm.ta",
            ["algorithm.tau=", "algorithm.target_update_interval=", "algorithm.target_entropy="],
        ),
        ("rlinf train env=no_such_env env.ta", ["env.tasks="]),
        ("rlinf why outputs/", []),
        ("rlinf robot max_", ["max_relative_target=", "max_observation_age_s=", "max_failures="]),
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
