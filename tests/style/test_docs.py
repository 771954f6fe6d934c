"""The documentation is what its generator writes, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_generator():
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date_and_links_are_whole():
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_reference_has_every_key_once():
    from rlinf.config.options import to_mapping
    from rlinf.config.schema import build_config

    text = load_generator().configuration_page()

    def keys(mapping, path=""):
        for name, value in mapping.items():
            dotted = f"{path}{name}"
            if isinstance(value, dict) and value:
                yield from keys(value, f"{dotted}.")
            else:
                yield dotted

    missing = [key for key in keys(to_mapping(build_config({}))) if f"| `{key}` |" not in text]
    assert missing == []


def test_broken_links_are_found(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.md").write_text("# The Title\n[good](b.md) [anchor](#the-title) [web](https://example.org)\n```\n[code](x.md)\n```\n")
    (docs / "b.md").write_text("# B\n[bad](c.md) [worse](a.md#no-such-heading)\n")
    assert load_generator().broken_links(docs) == ["docs/b.md: c.md", "docs/b.md: a.md#no-such-heading"]
