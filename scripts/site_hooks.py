"""Hooks for ``mkdocs build`` that convert links for GitHub to links for the site.

README.md becomes the site's first page, and CONTRIBUTING.md and CHANGELOG.md are also included. Other files outside docs/ are
not on the site: links to them point to ``repo_url`` from mkdocs.yml, or if it is not set, become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Maps files in the project's root to pages of the site."""
LINK = re.compile(
    r"^```.*?^```"  # a block of code,
    r"|(!?\[(?:`[^`]*`|\[[^\]]*\]|[^\[\]`])*\])\(([^)\s]+)\)"  # or a link: its text, its target,
    r"|`[^`\n]+`",  # or code in a line
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from the project's root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links, except in code."""
    return LINK.sub(lambda found: site_link(found, page.file.src_uri, config.repo_url), markdown)


def site_link(found: re.Match, page: str, repo_url: str | None) -> str:
    """Return the replacement for a match of ``LINK`` in a page; code is unchanged."""
    text, target = found.groups()
    name, _, anchor = (target or "").partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return found[0]
    source = next((root for root, on_site in PAGES.items() if on_site == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    if path in PAGES or path.startswith("docs/"):
        link = posixpath.relpath(PAGES.get(path, path.removeprefix("docs/")), posixpath.dirname(page) or ".")
        return f"{text}({link}#{anchor})" if anchor else f"{text}({link})"
    return f"{text}({repo_url.rstrip('/')}/blob/main/{path})" if repo_url else text[1:-1]
