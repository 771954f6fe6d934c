"""The command ``rlinf``: help texts, exit statuses, and the choice of the function that runs (``rlinf.cli.commands``)."""

import ast
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

import rlinf
from rlinf import wings
from rlinf.cli.commands import COMMANDS
from rlinf.config.names import group_folders, options_of
from rlinf.distributed.start import clear_launch_context, launch_context
from rlinf.errors import EXIT_FAULT, EXIT_USER_ERROR, RankError, RLinfError, did_you_mean, print_error
from rlinf.options import keys_help
from rlinf.wings import Command

ON_TAB = {
    "--install-completion": Command("rlinf.cli.completion:install", "install completion", "[shell]"),
    "--complete": Command("rlinf.cli.completion:complete", "complete a command line", "<line>"),
}
"""Arguments of shell completion: one for the user, the other for the shell's script."""

IN_PYTHON = """In Python: import rlinf (docs/python.md). Configuration: docs/configuration.md. Your own YAML files: --config-dir <folder>.
Completion by Tab: rlinf --install-completion, for bash, zsh or fish."""

EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


def usage() -> str:
    """Return the help text of the command."""
    indented = {"width": _width(), "subsequent_indent": " " * 15}
    commands = "\n".join(textwrap.fill(f"  {name:<12} {item.about}", **indented) for name, item in COMMANDS.items())
    examples = "\n".join(f"  {line}" for item in COMMANDS.values() for line in item.examples)
    return f"usage: rlinf <command> [key=value ...]\n\ncommands:\n{commands}\n\nexamples:\n{examples}\n\n{wrapped(IN_PYTHON)}"


def help_of(name: str) -> str:
    """Return a command's usage and docstring."""
    # The docstring is parsed from the file, because importing the module may take seconds.
    command = COMMANDS[name]
    module, _, function = command.run.partition(":")
    source = Path(rlinf.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    text = f"usage: rlinf {name} {command.usage}\n\n{wrapped(ast.get_docstring(functions[function]))}"
    if command.keys is not None:
        return f"{text}\n\nits keys, with their defaults:\n{keys_help(command.load('keys'), _width())}"
    if name not in ("train", "sft"):
        return text
    groups = {group: ", ".join(options_of(group)) for group in group_folders()}
    indented = {"width": _width(), "subsequent_indent": " " * 13, "break_on_hyphens": False}
    lines = [textwrap.fill(f"  {group:<10} {options}", **indented) for group, options in groups.items()]
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
        print(rlinf.__version__)
        return 0
    if command not in (*COMMANDS, *ON_TAB):
        reason = (
            wings.missing("commands", command) or f"there is no command '{command}'.{did_you_mean(command, COMMANDS)}"
        )
        print(f"rlinf: {reason}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        if command in ON_TAB:
            return ON_TAB[command].load()(rest)
        if {"-h", "--help"} & set(rest):
            print(help_of(command))
            return 0
        status = _run(arguments, _function_of(command, rest))
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


def _function_of(command: str, arguments: Sequence[str]) -> Callable[[list[str]], int]:
    """Return the function that runs a command; a key may belong to a wing with a function of its own for it."""
    for key in (f"{command} {argument.partition('=')[0]}=" for argument in arguments):
        if wings.is_entry("variants", key):
            return wings.load("variants", key)
    return COMMANDS[command].load()


def _run(arguments: list[str], command: Callable[[list[str]], int]) -> int:
    """Run a command in this process, or as one of the ranks that a launcher has started."""
    place = launch_context(os.environ)
    if place is None:
        return command(arguments[1:])
    if COMMANDS[arguments[0]].uses_ranks:
        from rlinf.distributed.launch import run_with_ranks

        return run_with_ranks(place, arguments, lambda: command(arguments[1:]))
    if place.rank:
        return 0
    print(f"`rlinf {arguments[0]}` runs in one process: rank 0 runs it, the remaining ranks exit", file=sys.stderr)
    clear_launch_context(os.environ)  # otherwise the command would wait for the remaining ranks
    return command(arguments[1:])
