"""Shell completion: ``rlinf --install-completion`` writes a script that calls ``rlinf --complete`` at each Tab."""

import dataclasses
import os
from contextlib import suppress
from functools import reduce
from pathlib import Path

import yaml

from rlinf.cli.commands import COMMANDS
from rlinf.config.names import GROUP, group_folders, options_of
from rlinf.config.schema import REGISTRIES, RunConfig, section_class
from rlinf.errors import ConfigError, RLinfError
from rlinf.files import write_text
from rlinf.options import override_text, public_fields

INSTALL = "--install-completion"

SHELLS = ("bash", "zsh", "fish")
"""Shells for which this folder contains a script ``completion.<shell>``."""


def install(arguments: list[str]) -> int:
    """Install completion for the given shell or ``$SHELL``; raise ConfigError if it is unknown."""
    shell = arguments[0] if arguments else Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS or len(arguments) > 1:
        actual = f"The shell is '{' '.join(arguments) or shell}'"
        raise ConfigError(f"{actual}; expected one of {', '.join(SHELLS)}. Run rlinf {INSTALL} bash, for example")
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "rlinf"
    script, loads = data / f"completion.{shell}", Path(os.environ.get("ZDOTDIR") or "~").expanduser() / ".zshrc"
    if shell == "fish":  # fish loads the files of this folder automatically
        config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
        script = loads = config / "fish" / "completions" / "rlinf.fish"
    elif shell == "bash":
        loads = Path("~/.bashrc").expanduser()
    line = f'[ -f "{script}" ] && . "{script}"  # completion of rlinf'
    try:
        _write(shell, script, loads, line)
    except OSError as error:
        reason = f"{error.filename} cannot be written ({error.strerror})"
        raise ConfigError(f"{reason}. Add the line {line} to {loads} manually") from error
    loader = "fish" if script == loads else loads
    print(f"{script}, loaded by {loader}. Open a new shell, and press Tab after `rlinf `")
    return 0


def _write(shell: str, script: Path, loads: Path, line: str) -> None:
    """Write the script, and append the line that loads it unless it is already there."""
    script.parent.mkdir(parents=True, exist_ok=True)
    write_text(script, Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8"))
    if script != loads and line.encode() not in (loads.read_bytes().split(b"\n") if loads.is_file() else []):
        with loads.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")


def complete(arguments: list[str]) -> int:
    """Print the completions of the last token of the command line ``arguments[0]``, one per line."""
    *before, current = arguments[0].split(" ")
    before = [token for token in before if token]
    if len(before) < 2:
        candidates = [*COMMANDS, "--help", "--version", INSTALL]
    elif before[1] in COMMANDS and COMMANDS[before[1]].has_config:
        candidates = overrides(before[2:], current)
        if COMMANDS[before[1]].keys is not None:
            kind, (key, equals, _) = COMMANDS[before[1]].load("keys"), current.partition("=")
            candidates += values_of(kind, key) if equals else [f"{name}=" for name in public_fields(kind)]
    else:
        candidates = []
    print("\n".join(candidate for candidate in candidates if candidate.startswith(current)))
    return 0


def overrides(given: list[str], current: str) -> list[str]:
    """Return the completions after ``given``: groups and sections, a section's keys, or the values of a group or key."""
    key, equals, _ = current.partition("=")
    section, dot, _ = key.rpartition(".")
    groups = group_folders()
    if equals and key in groups:
        return [f"{key}={option}" for option in options_of(key)]
    try:
        owner = reduce(getattr, section.split(".") if dot else [], _config_of(given, groups))
        fields = public_fields(type(owner))
    except (AttributeError, TypeError):  # an unknown section
        return []
    if equals:
        return values_of(type(owner), key)
    keys = [f"{section}{dot}{name}{'.' if dataclasses.is_dataclass(getattr(owner, name)) else '='}" for name in fields]
    return keys if dot else [f"{group}=" for group in groups] + keys


def values_of(kind: type, key: str) -> list[str]:
    """Return ``key=value`` for each choice of the field named by the last part of ``key``; booleans have two."""
    field = public_fields(kind).get(key.rpartition(".")[2])
    choices = (field.metadata["choices"] or (field.type in (bool, "bool") and (True, False)) or ()) if field else ()
    return [f"{key}={override_text(value)}" for value in choices]


def _config_of(given: list[str], groups: dict[str, Path]) -> RunConfig:
    """Return the default configuration for the env and algorithm in ``given``, or in its experiment."""
    config, chosen = RunConfig(), dict(token.split("=", 1) for token in given if "=" in token)
    experiment = groups[GROUP] / f"{chosen.get(GROUP)}.yaml"
    if experiment.is_file():
        for item in yaml.safe_load(experiment.read_text()).get("defaults", []):
            if isinstance(item, dict):
                chosen = {key.rpartition("/")[2]: option for key, option in item.items()} | chosen
    for section in REGISTRIES:
        file = groups[section] / f"{chosen.get(section)}.yaml"
        name = (yaml.safe_load(file.read_text()) or {}).get("name") if file.is_file() else chosen.get(section)
        if name:
            with suppress(RLinfError):  # an unregistered name is rejected when the command runs
                setattr(config, section, section_class(section, name)())
    return config
