"""The command ``rlinf``: ``train``, ``sft``, ``launch``, ``evaluate``, ``robot``, ``audit``, ``serve``, ``play``, ``report``, ``why``,
``collect``, ``convert``, ``classifier``, ``export``, ``doctor``, ``check``, ``check-policy``, ``diagnose``, ``models``."""

import ast
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

from rlinf import __version__
from rlinf.config.names import group_folders, options_of
from rlinf.distributed.start import clear_launch_context, launch_context
from rlinf.errors import EXIT_FAULT, EXIT_USER_ERROR, RankError, RLinfError, did_you_mean, print_error
from rlinf.imports import import_string
from rlinf.options import keys_help

COMMANDS = {
    "train": ("rlinf.cli.run:train", "behaviour cloning (if configured), then reinforcement learning"),
    "sft": ("rlinf.cli.run:sft", "behaviour cloning only"),
    "launch": ("rlinf.recipes.cli:launch", "training of language and vision-language models: SFT, GRPO, DPO"),
    "evaluate": ("rlinf.cli.run:evaluate", "success rate of a checkpoint on held-out episodes, with videos"),
    "robot": ("rlinf.cli.run:robot", "evaluation of a checkpoint in real time, on a simulated or physical robot"),
    "audit": ("rlinf.cli.run:audit", "whether a policy uses its instruction and images, reacts, or memorises"),
    "serve": ("rlinf.cli.run:serve", "a checkpoint as a policy server for other machines and programs"),
    "play": ("rlinf.cli.play:play", "one episode of a checkpoint as a video, in a window if there is a display"),
    "report": ("rlinf.cli.report:report", "report of a run, or curves of several runs with intervals over seeds"),
    "why": ("rlinf.cli.report:why", "diagnosis of a run from its metrics: the cause, and the key to change"),
    "collect": ("rlinf.cli.run:collect", "demonstrations by the scripted expert or a checkpoint, as a LeRobotDataset"),
    "convert": ("rlinf.cli.run:convert", "HDF5 demonstrations of robomimic or LIBERO, as a LeRobotDataset"),
    "classifier": ("rlinf.cli.run:classifier", "training of a success classifier on frames, and its error rates"),
    "export": ("rlinf.cli.run:export", "a checkpoint as a folder for from_pretrained, optionally with merged adapters"),
    "doctor": ("rlinf.cli.doctor:doctor", "what works on this machine, and the memory that an experiment needs"),
    "check": ("rlinf.cli.check:check", "whether an env, perhaps your own, fulfils its contract, property by property"),
    "check-policy": (
        "rlinf.cli.check_policy:check_policy",
        "whether a lerobot policy folder is complete and consistent",
    ),
    "diagnose": ("rlinf.cli.diagnose:diagnose", "whether a model's samples and scores agree, in torch and in vLLM"),
    "models": ("rlinf.cli.listing:models", "registered models, envs, algorithms and experiments"),
}

ON_TAB = {"--install-completion": "rlinf.cli.completion:install", "--complete": "rlinf.cli.completion:complete"}
"""Arguments of shell completion: one for the user, the other for the shell's script."""

WITH_RANKS = ("train", "sft", "launch", "evaluate")
"""Commands that use all processes of torchrun or srun; the remaining ones run on rank 0 only."""

USAGES = {
    "train": "experiment=<name> [key=value ...]\n       rlinf train model=<name> env=<name> algorithm=<name> [key=value ...]",
    "sft": "experiment=<name> [key=value ...]",
    "models": "[plugins=[my_env.py]] [--config-dir <folder>]",
    "launch": "--config <recipe> [dataset script] [key=value ...] [--dry-run]",
    "evaluate": "checkpoint=<folder> [key=value ...]\n       rlinf evaluate checkpoint=<folder> questions=<file> [key=value ...]\n"
    "       rlinf evaluate --compare A B",
    "robot": "checkpoint=<folder> [fps=20] [execution=async] [latency_s=0.15] [key=value ...]",
    "audit": "checkpoint=<folder> [key=value ...]",
    "serve": "checkpoint=<folder> [port=8000] [host=127.0.0.1] [key=value ...]",
    "play": "checkpoint=<folder> [episode=...] [output=...] [window=...] [key=value ...]",
    "report": "<run folder> ... [output=runs.html]",
    "why": "<run folder> [--json]",
    "collect": "dataset=<new folder> [checkpoint=<folder>] [key=value ...]",
    "convert": "source=<HDF5 file or folder> dataset=<new folder> [key=value ...]",
    "classifier": "data=<dataset> output_dir=<new folder> [test=<dataset>] [key=value ...]",
    "export": "checkpoint=<folder> output=<new folder> [merge_lora=...] [key=value ...]",
    "doctor": "[experiment=<name> | checkpoint=<folder> | env=<name>] [key=value ...]",
    "check": "env=<name> [env.key=value ...] [plugins=[my_env.py]]",
    "check-policy": "<folder> [interpreter=<python>] [override_config={...}] [migrate=<new folder>]",
    "diagnose": "model=<name> [key=value ...]\n       rlinf diagnose <folder or hub id> [key=value ...]",
}
"""Arguments shown in each command's usage."""

OWN_KEYS = {
    "robot": "rlinf.robot.config:RobotConfig",
    "serve": "rlinf.commands.serve_config:ServeConfig",
    "play": "rlinf.cli.play:PlayConfig",
    "convert": "rlinf.data.hdf5:ConvertConfig",
    "classifier": "rlinf.commands.classifier:ClassifierConfig",
    "export": "rlinf.cli.run:ExportConfig",
}
"""Dataclasses with the keys of specific commands."""

EXAMPLES = """examples:
  rlinf train experiment=quickstart                      a small VLA on a laptop: SFT, then PPO, in minutes
  rlinf train experiment=quickstart seed=3 trainer.max_steps=20
  rlinf train model=openvla_tiny env=tabletop algorithm=ppo
  rlinf train experiment=quickstart --cfg job            print the configuration and stop
  rlinf train -m experiment=quickstart seed=0,1,2        one run per value
  rlinf launch --config mistral-7b-fsdp4-sft --dry-run   what a recipe for a language model needs
  rlinf evaluate checkpoint=outputs/quickstart/latest evaluation.num_episodes=500
  rlinf audit checkpoint=outputs/quickstart/latest
  rlinf serve checkpoint=outputs/quickstart/latest port=8000
  rlinf play checkpoint=outputs/quickstart/latest episode=3
  rlinf report multirun/quickstart/latest                the runs of a sweep on one page
  rlinf why outputs/quickstart/latest                    what its metrics show, and what to change
  rlinf collect env=tabletop dataset=data/tabletop collect.num_episodes=200
  rlinf convert source=libero_spatial dataset=data/libero_spatial
  rlinf classifier data=data/labelled output_dir=outputs/classifier
  rlinf export checkpoint=outputs/quickstart/latest output=my_policy merge_lora=true
  rlinf doctor experiment=quickstart
  rlinf check env=gymnasium env.id=Pendulum-v1
  rlinf check-policy outputs/act_so101/pretrained_model
  rlinf diagnose experiment=quickstart

In Python: import rlinf (docs/python.md). Configuration: docs/configuration.md. Your own YAML files: --config-dir <folder>.
Completion by Tab: rlinf --install-completion, for bash, zsh or fish."""

EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


def usage() -> str:
    """Return the help text of the command."""
    indented = {"width": _width(), "subsequent_indent": " " * 15}
    commands = "\n".join(textwrap.fill(f"  {name:<12} {text}", **indented) for name, (_, text) in COMMANDS.items())
    return f"usage: rlinf <command> [key=value ...]\n\ncommands:\n{commands}\n\n{wrapped(EXAMPLES)}"


def help_of(command: str) -> str:
    """Return a command's usage and docstring."""
    # The docstring is parsed from the file, because importing the module may take seconds.
    module, _, function = COMMANDS[command][0].partition(":")
    source = Path(__file__).with_name(f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    text = f"usage: rlinf {command} {USAGES[command]}\n\n{wrapped(ast.get_docstring(functions[function]))}"
    if command in OWN_KEYS:
        return f"{text}\n\nits keys, with their defaults:\n{keys_help(import_string(OWN_KEYS[command]), _width())}"
    if command not in ("train", "sft"):
        return text
    groups = {name: ", ".join(options_of(folder)) for name, folder in group_folders().items()}
    indented = {"width": _width(), "subsequent_indent": " " * 13, "break_on_hyphens": False}
    lines = [textwrap.fill(f"  {name:<10} {options}", **indented) for name, options in groups.items()]
    head = "choices, as name=choice (`rlinf models` also shows choices of third-party packages):"
    return "\n".join([f"{text}\n\n{head}", *lines])


def wrapped(text: str) -> str:
    """Wrap the paragraphs of a docstring to the terminal, except those with indented lines (examples)."""
    paragraphs = text.split("\n\n")
    options = {"width": _width(), "break_on_hyphens": False, "break_long_words": False}
    return "\n\n".join(text if "\n " in text else textwrap.fill(text, **options) for text in paragraphs)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with the arguments after ``rlinf`` (by default from ``sys.argv``), and return the exit status.

    0: success; 1: ``doctor``, ``check`` or ``diagnose`` found a fault, or one of several ranks failed; 2: an error that the user can
    fix; 130: interrupted; 141: the output pipe was closed (``| head``). Other errors are bugs and show their traceback.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Names from files and folders may contain characters that the terminal cannot show.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USER_ERROR
    command, *rest = arguments
    if command in ("-V", "--version", "version"):
        print(__version__)
        return 0
    if command not in (*COMMANDS, *ON_TAB):
        print(f"rlinf: there is no command '{command}'.{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        if command in ON_TAB:
            return import_string(ON_TAB[command])(rest)
        if {"-h", "--help"} & set(rest):
            print(help_of(command))
            return 0
        status = _run(arguments, import_string(COMMANDS[command][0]))
        # A closed pipe raises here and is handled below; at interpreter exit it would print a traceback.
        sys.stdout.flush()
        return status
    except (RLinfError, RankError) as error:
        print_error(error)
        return EXIT_USER_ERROR if isinstance(error, RLinfError) else EXIT_FAULT
    except BrokenPipeError:
        # The buffer is flushed again at exit, so redirect it to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except OSError as error:
        messages = {
            errno.ENAMETOOLONG: f"{error.filename or 'A path'!r} exceeds the maximum path length on this system. Use a shorter one",
            errno.ENOSPC: f"The disk is full: {error}. Free some space, or choose a folder on a different disk",
        }
        if error.errno not in messages:
            raise
        print(messages[error.errno], file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(arguments: list[str], command: Callable[[list[str]], int]) -> int:
    """Run a command in this process, or as one of the ranks that a launcher has started."""
    place = launch_context(os.environ)
    if place is None:
        return command(arguments[1:])
    if arguments[0] in WITH_RANKS:
        from rlinf.distributed.launch import run_with_ranks

        return run_with_ranks(place, arguments, lambda: command(arguments[1:]))
    if place.rank:
        return 0
    print(f"`rlinf {arguments[0]}` runs in one process: rank 0 runs it, the remaining ranks exit", file=sys.stderr)
    clear_launch_context(os.environ)  # otherwise the command would wait for the remaining ranks
    return command(arguments[1:])
