"""The static files of the dashboard and their HTTP paths."""

from __future__ import annotations

from pathlib import Path

from dataplane.protocol.http import HTML, Handler, Response

PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": HTML,
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".woff2": "font/woff2",
}


def page(folder: Path = PAGE) -> dict[str, Handler]:
    """Read the files in `folder` with a suffix of `_TYPES` and return their handlers by path; index.html is at /."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _TYPES]
    return {"/" if path.name == "index.html" else f"/{path.name}": _file(path) for path in files}


def _file(path: Path) -> Handler:
    response = Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})
    return lambda request: response
