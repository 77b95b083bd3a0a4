"""The hook that MkDocs calls for each page of docs/ while it builds the site.

Pages link to source files of this repository, which a code host shows. The site has no such files, so it shows their
paths in place of the links.
"""

import re
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")


class _File(Protocol):
    src_uri: str


class _Page(Protocol):
    file: _File


def on_page_markdown(markdown: str, page: _Page, **_: Any) -> str:
    """Replace links to files outside docs/ by their paths in the repository. MkDocs calls this for each page."""
    docs = ROOT / "docs"

    def replace(link: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return link[0]  # MkDocs checks it
        path = target.relative_to(ROOT).as_posix()
        text = link[1].strip("`")
        return f"`{path}`" if text in path else f"{link[1]} (`{path}`)"

    return _LINK.sub(replace, markdown)
