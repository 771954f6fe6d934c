"""Registries: where a name comes from, which of two wins, and what is said about one that stands for nothing."""

from types import SimpleNamespace

import pytest

from rlinf import registry as module
from rlinf.errors import ConfigError
from rlinf.registry import BUILTIN, USER_CODE, Registry, registering


def point(name, value, distribution=("some-package", "1.2")):
    target, _, attribute = value.partition(":")
    dist = distribution and SimpleNamespace(name=distribution[0], version=distribution[1])
    return SimpleNamespace(name=name, module=target, attr=attribute, dist=dist)


@pytest.fixture
def announced(monkeypatch):
    """Entry points of installed packages, to be filled."""
    points = []
    monkeypatch.setattr(module, "installed_points", lambda: SimpleNamespace(select=lambda group: points))
    return points


def origins(registry):
    return {name: entry.origin for name, entry in registry.entries().items()}


def test_origin_is_who_registered_the_name(announced):
    announced.append(point("packaged", "json:loads"))
    registry = Registry("thing", "rlinf.things", {"builtin": "json:dumps"})
    registry.register("own", object())
    with registering("my_plugin.py"):
        registry.register("plugged", object())
    registry.register("later", object())
    assert origins(registry) == {
        "builtin": BUILTIN, "own": USER_CODE, "plugged": "my_plugin.py", "later": USER_CODE, "packaged": "some-package 1.2",
    }  # fmt: skip


def test_plugin_that_fails_does_not_leave_its_name_behind():
    registry = Registry("thing", "rlinf.things", {})
    with pytest.raises(ZeroDivisionError), registering("broken.py"):
        raise ZeroDivisionError
    registry.register("own", object())
    assert origins(registry)["own"] == USER_CODE


def test_taken_names_are_not_hidden_by_packages_and_the_loser_is_known(announced):
    announced += [
        point("builtin", "json:loads"),
        point("shared", "json:loads"),
        point("shared", "json:dumps", ("late", "9")),
    ]
    registry = Registry("thing", "rlinf.things", {"builtin": "json:dumps"})
    assert registry.get("builtin").__name__ == "dumps" and registry.get("shared").__name__ == "loads"
    assert [(entry.name, entry.origin) for entry in registry.hidden] == [
        ("builtin", "some-package 1.2"),
        ("shared", "late 9"),
    ]


def test_user_code_may_replace_a_name():
    registry = Registry("thing", "rlinf.things", {"builtin": "json:dumps"})
    registry.register("builtin", 5)
    assert registry.get("builtin") == 5


@pytest.mark.parametrize("target", ["json:no_such_name", "json", "json:"])
def test_name_that_stands_for_nothing_says_who_registered_it(announced, target):
    announced.append(point("thing", target))
    registry = Registry("model type", "rlinf.models", {})
    with pytest.raises(ConfigError, match=r"some-package 1.2 .*Required: module:attribute"):
        registry.get("thing")


def test_unknown_name_is_corrected(announced):
    registry = Registry("env", "rlinf.envs", {"tabletop": "json:dumps"})
    with pytest.raises(ConfigError, match="Unknown env 'tabeltop'. Did you mean 'tabletop'?"):
        registry.get("tabeltop")
