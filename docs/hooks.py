"""Hooks of `make docs`. They add pages that the navigation does not name, and exported names that no page of the
reference has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dataplane.errors
import workers

GUIDES = "Guides"
_BASE = dataplane.errors.DataPlaneError
REST = "<!-- every other name -->"
"""Placeholder in a page of the reference for the names of its package that no page has."""
ERRORS = "<!-- every error -->"
PACKAGES = {"api/data.md": dataplane, "api/workers.md": workers}


def on_config(config: Any) -> Any:
    """Add pages that are not named in the navigation to the guides."""
    folder = Path(config.docs_dir)
    named = set(_leaves(config.nav))
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    guides = next(section[GUIDES] for section in config.nav if GUIDES in section)
    guides += [name for name in there if name not in named]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace the placeholders in a page of the reference."""
    if REST in markdown:
        markdown = markdown.replace(REST, _rest(PACKAGES[page.file.src_uri], Path(config.docs_dir)))
    return markdown.replace(ERRORS, _directives("dataplane.errors", _errors(), "show_if_no_docstring: true"))


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for each in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(each)]


def _rest(package: Any, folder: Path) -> str:
    """Return a directive for each exported name that no page of the reference has."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (folder / "api").glob("*.md"))
    named = set(re.findall(rf"^::: {package.__name__}\.(\w+)$", pages, re.M)) | set(_errors())
    return _directives(package.__name__, [name for name in package.__all__ if name not in named])


def _errors() -> list[str]:
    found = vars(dataplane.errors)
    return sorted(name for name, each in found.items() if isinstance(each, type) and issubclass(each, _BASE))


def _directives(package: str, names: list[str], *options: str) -> str:
    more = "".join(f"\n      {option}" for option in options)
    return "\n\n".join(f"::: {package}.{name}" + (f"\n    options:{more}" if more else "") for name in names)
