"""The hooks that MkDocs calls for each page of docs/ while it builds the site.

Pages link to source files of this repository, which a code host shows. The site has no such files, so it shows their
paths in place of the links. The search leaves out the log, and lists the rows of benchmarks after other pages.
"""

import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS_BOOST = 0.1
STACKED_COLUMNS = 3  # a table of so many columns is wider than a phone
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_HEADER = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")


class _File(Protocol):
    src_uri: str


class _Page(Protocol):
    file: _File
    meta: MutableMapping[str, Any]


def on_page_markdown(markdown: str, page: _Page, **_: Any) -> str:
    """Replace links to files outside docs/ by their paths in the repository, and set the page's place in the search."""
    if page.file.src_uri.startswith("log/"):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("benchmarks"):
        page.meta["search"] = {"boost": BENCHMARKS_BOOST}
    docs = ROOT / "docs"

    def replace(link: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return link[0]  # MkDocs checks it
        path = target.relative_to(ROOT).as_posix()
        text = link[1].strip("`")
        return f"`{path}`" if text in path else f"{link[1]} (`{path}`)"

    return _LINK.sub(replace, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Label the cells of wide tables with their columns' titles. On a phone, styles.css shows the cells as a list."""
    return _TABLE.sub(_label_table, html)


def _label_table(table: re.Match[str]) -> str:
    titles = [_TAG.sub("", title).strip().replace('"', "&quot;") for title in _HEADER.findall(table[1])]
    if len(titles) < STACKED_COLUMNS:
        return table[0]

    def label_row(row: re.Match[str]) -> str:
        # The first cell of a row names it, so it needs no label.
        labels = iter([""] + [f' data-label="{title}"' if title else "" for title in titles[1:]])
        return re.sub(r"<td", lambda _: f"<td{next(labels, '')}", row[0])

    return f"<table data-stacked>{_ROW.sub(label_row, table[1])}</table>"
