"""The documentation agrees with the code: links, commands, tables, generated pages. The built site is complete."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

from model.api.body_limit import MAX_BODY_BYTES, MAX_TOTAL_BODY_BYTES
from model.api.body_scan import MAX_TEXT_BYTES
from model.api.fair_queue import MAX_WAITING
from model.api.service import HEARTBEAT_SECONDS
from model.images.containers import MAX_JPEG_SCAN_PIXELS, MAX_JPEG_SCANS
from model.images.inputs import MAX_FILE_BYTES, MAX_INPUT_PIXELS, MAX_INPUT_SIDE, MAX_REQUEST_PIXELS
from model.images.postprocess import RING_WIDTH
from model.request_fields import Defaults, GenerationRequest
from model.settings import Limits, Settings
from model.statuses import STATUSES
from model.validation import MAX_PROMPT_WEIGHT
from preheat.docs_pages import request_reference
from tests.support.commands import command_tree
from tests.support.metrics import declared_metrics
from tests.support.repository import PACKAGES, REPOSITORY

DOCS = REPOSITORY / "docs"
ROOT_PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "deploy" / "README.md"]
PAGES = [*ROOT_PAGES, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("log/*.md"))]
# Only stores raise and catch it.
INTERNAL_ERRORS = {"FileMissing"}


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor_of(heading: str) -> str:
    """Return a heading's anchor, as MkDocs and code hosts derive it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code_blocks(page.read_text()), re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


def test_relative_links_resolve() -> None:
    broken = []
    for page in PAGES:
        prose = re.sub(r"`[^`\n]+`", "", without_code_blocks(page.read_text()))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not urlsplit(target).scheme and (not file.exists() or (anchor and anchor not in anchors(file))):
                broken.append(f"{relative(page)}: {target}")
    assert broken == []


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `preheat` command in the page's code blocks."""
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    for block in [*fenced, *indented]:
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.findall(r"(?:^\s*|\| )(?:\.venv/bin/)?preheat ([^|]+)", line):
                yield shlex.split(command, comments=True)


def resolve_command(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the first words name, and the other words. `preheat bench RELEASE` is `bench latency`."""
    command = command_tree()
    while hasattr(command, "commands"):
        if command.name == "bench" and words[:1] != ["-h"] and not (words and words[0] in command.commands):
            words = ["latency", *words]
        if not words or words[0] not in command.commands:
            break
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_shown_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (page, shown) in enumerate((found, words) for found in PAGES for words in commands(found)):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for word in shown:  # a reader of the page has these files
            if not word.startswith(("-", "~", "/")) and "://" not in word and " " not in word:
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        command, rest = resolve_command(shown)
        try:
            command.make_context(command.name, rest)
        except click.ClickException as error:
            pytest.fail(f"{relative(page)}: preheat {' '.join(shown)}: {error.format_message()}")


def test_named_commands_have_their_options() -> None:
    """Commands in the prose may lack arguments, but their names and options exist."""
    unknown = []
    for page in PAGES:
        if page.parent.name == "log":
            continue
        for shown in re.findall(r"`(?:\.venv/bin/)?preheat ([a-z][^`]*)`", page.read_text()):
            command, words = resolve_command(shown.replace("\n", " ").split())
            options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            options |= {"-h", "--help"}
            is_unknown = any(word.startswith("-") and word.partition("=")[0] not in options for word in words)
            if hasattr(command, "commands") or is_unknown:
                unknown.append(f"{relative(page)}: {shown}")
    assert unknown == []


def test_shown_modules_exist_and_have_their_options() -> None:
    """The log and the rows of benchmarks name modules of earlier commits."""
    found = 0
    for page in PAGES:
        if page.parent.name == "log" or page.name.startswith("benchmarks"):
            continue
        for module, arguments in re.findall(r"python -m ([\w.]+)([^`\n]*)", page.read_text()):
            path = REPOSITORY / f"{module.replace('.', '/')}.py"
            assert path.is_file() and "__main__" in path.read_text(), f"{relative(page)}: {module}"
            parsed = "".join(source.read_text() for source in path.parent.glob("*.py"))  # modules share parsers
            missing = [option for option in re.findall(r" (--[a-z-]+)", arguments) if f'"{option}"' not in parsed]
            assert missing == [], f"{relative(page)}: {module}"
            found += 1
    assert found >= 8


def test_request_reference_is_current() -> None:
    text = request_reference.PAGE.read_text()
    assert text == request_reference.page(text), (
        "docs/requests.md differs from the schema. Run `python -m preheat.docs_pages.request_reference`."
    )
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == 10


def test_request_reference_has_every_status_and_limit() -> None:
    text = request_reference.PAGE.read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text[text.index("## Status codes") :], re.MULTILINE)
    assert sorted((int(status), kind) for status, kind in rows) == sorted(STATUSES)
    words = " ".join(text.split())
    for limit in (
        f"more than {MAX_FILE_BYTES // 2**20} MiB, {MAX_INPUT_PIXELS // 10**6} megapixels or {MAX_INPUT_SIDE:,} pixels",
        f"may have {MAX_REQUEST_PIXELS // 10**6} megapixels together",
        f"more than {MAX_JPEG_SCANS} scans is refused, and one of more than {MAX_JPEG_SCAN_PIXELS // 10**6} megapixels",
        f"at most {RING_WIDTH} pixels from one",
        f"beyond -{MAX_PROMPT_WEIGHT} to {MAX_PROMPT_WEIGHT}",
        f"more than {MAX_TEXT_BYTES // 2**20} MiB of JSON besides base64",
        f"more than {MAX_BODY_BYTES // 2**20} MiB. It is not parsed",
        f"exceed {MAX_TOTAL_BODY_BYTES // 2**20} MiB, or {MAX_WAITING} requests wait",
        f"after {HEARTBEAT_SECONDS:g} s without another event",
    ):
        assert limit in words


def test_stream_events_are_those_of_the_service() -> None:
    sent = set(re.findall(r'_line\("(\w+)"', (REPOSITORY / "model" / "api" / "service.py").read_text()))
    text = request_reference.PAGE.read_text()
    section = text[text.index("## Streams") : text.index("## Status codes")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) - {"event"} == sent


def test_every_metric_is_in_the_table() -> None:
    declared = {metric.name: (metric.kind, metric.labels) for metric in declared_metrics()}
    rows = re.findall(r"^\| `(preheat_\w+)` \| (\w+) \|(.*?)\|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert {name: (kind, set(re.findall(r"\w+", labels))) for name, kind, labels in rows} == declared


def test_every_phase_of_the_cold_start_is_in_the_table() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "model").rglob("*.py"))
    recorded = set(re.findall(r"""(?:cold_start\.phase|\.record)\("(\w+)\"""", sources))
    text = (DOCS / "scaling.md").read_text()
    table = text[text.index("| phase | what happens |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == recorded


def test_every_log_event_is_in_the_table() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "model").rglob("*.py"))
    text = (DOCS / "metrics.md").read_text()
    table = text[text.index("| `event` | when |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) - {"event"} == set(
        re.findall(r'"event": "(\w+)"', sources)
    )


def test_autoscaling_table_has_the_settings() -> None:
    files = {name: REPOSITORY / "truss" / "autoscaling" / f"{name}.json" for name in ("development", "production")}
    development, production = (json.loads(path.read_text()) for path in files.values())
    text = (DOCS / "scaling.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert {name: (int(low), int(high)) for name, low, high in rows} == {
        name: (value, production[name]) for name, value in development.items()
    }


def test_defaults_of_the_truss_example_page_are_current() -> None:
    """The page lists only defaults that differ."""
    request, release = GenerationRequest(prompt="x"), Defaults()
    here = {**request.model_dump(), **release.model_dump(), "end_cfg_frac": release.guidance_end}
    text = (DOCS / "from-truss-example.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]* \| `([^`]+)` \| `([^`]+)` \|", text, re.MULTILINE)
    assert {name: json.loads(value) for name, _, value in rows} == {name: here[name] for name, _, _ in rows}
    assert len(rows) == 3 and all(json.loads(theirs) != json.loads(ours) for _, theirs, ours in rows)


def test_gpu_table_has_the_configs() -> None:
    lines = (DOCS / "deploy.md").read_text().splitlines()
    for name in ("l4", "a10g", "a100", "h100", "h200", "cpu-demo"):
        config = yaml.safe_load((REPOSITORY / "truss" / "configs" / f"{name}.yaml").read_text())
        shown = f"`truss/configs/{name}.yaml`"
        cells = next(line for line in lines if line.startswith("|") and shown in line).split(" | ")
        torch = next(entry for entry in config["requirements"] if entry.startswith("torch=="))
        assert torch.removeprefix("torch==").partition("+")[0] == cells[2].partition(",")[0], name
        assert config["resources"].get("accelerator", "none") in cells[1], name
        assert [str(bucket["rows"]) for bucket in config["model_metadata"]["preheat"]["buckets"]] in ([cells[3]], [])


def test_every_setting_is_in_the_table() -> None:
    text = (DOCS / "deploy.md").read_text()
    shown = set(re.findall(r"`(?:model_metadata\.preheat\.)?([a-z0-9_]+(?:\.[a-z0-9_]+)?)`", text))
    names = set(Settings.model_fields) - {"limits"} | {f"limits.{name}" for name in Limits.model_fields}
    assert names - shown == set()


def config_keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config, down to its values."""
    for key, value in section.items():
        whole = f"{prefix}{key}"
        leaf = not isinstance(value, dict) or whole in ("secrets", "model_metadata.example_model_input")
        if leaf or whole == "environment_variables":
            yield whole
        else:
            yield from config_keys(value, f"{whole}.")


def test_every_config_key_is_explained() -> None:
    text = (DOCS / "deploy.md").read_text()
    for path in (REPOSITORY / "config.yaml", *(REPOSITORY / "truss" / "configs").iterdir()):
        names = (key.removeprefix("model_metadata.preheat.") for key in config_keys(yaml.safe_load(path.read_text())))
        assert [name for name in names if f"`{name}`" not in text] == [], relative(path)


@cache
def code_nodes() -> list[ast.AST]:
    """Return all syntax nodes of the packages."""
    paths = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def error_classes() -> set[str]:
    """Return the names of all subclasses of PreheatError, without importing their modules."""
    bases_of = {
        node.name: {ast.unparse(base) for base in node.bases} for node in code_nodes() if isinstance(node, ast.ClassDef)
    }
    found = {"PreheatError"}
    while more := {name for name, bases in bases_of.items() if bases & found} - found:
        found |= more
    return found - {"PreheatError"}


def error_rows() -> list[tuple[str, str]]:
    """Return (class, messages) of each row of the tables of errors."""
    text = (DOCS / "errors.md").read_text()
    return re.findall(r"^\| `(\w+)`[^|]*\| (.*?) \|", text, re.MULTILINE)


def test_every_error_is_in_the_tables() -> None:
    assert {name for name, _ in error_rows()} == error_classes() - INTERNAL_ERRORS


def contains_in_order(text: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


def test_shown_error_messages_are_those_of_the_code() -> None:
    texts = set()
    for node in code_nodes():
        if isinstance(node, ast.JoinedStr):
            texts.add("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    shown = [message for _, messages in error_rows() for message in re.findall(r"`([^`]+)`", messages)]
    stale = [message for message in shown if not any(contains_in_order(text, message.split("...")) for text in texts)]
    assert shown and stale == []


def test_every_log_entry_is_in_the_index() -> None:
    entries = {
        (page.name, anchor_of(heading))
        for page in DOCS.glob("log/*.md")
        for heading in re.findall(r"^## (\d{4}-\d\d-\d\d: .+)$", page.read_text(), re.MULTILINE)
    }
    listed = re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\) \|$", (DOCS / "log" / "index.md").read_text(), re.MULTILINE)
    assert len(listed) == len(entries) > 40
    assert set(listed) == entries


class LoadedAddresses(HTMLParser):
    """Collects the addresses that a page makes a browser load, and counts its Mermaid blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.mermaid_blocks = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        loading = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
        if tag in loading and values.get("rel") != "canonical":
            self.addresses.append(values.get(loading[tag], ""))
        self.addresses += re.findall(r"url\((.*?)\)", values.get("style", ""))
        self.mermaid_blocks += "mermaid" in values.get("class", "").split()


def build_site(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build_site(REPOSITORY, folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_strict_build_refuses_dead_links(tmp_path: Path) -> None:
    (tmp_path / "preheat").symlink_to(REPOSITORY / "preheat")
    (tmp_path / "mkdocs.yml").write_text((REPOSITORY / "mkdocs.yml").read_text())
    shutil.copytree(DOCS, tmp_path / "docs")
    page = tmp_path / "docs" / "trust.md"
    page.write_text(f"{page.read_text()}\n[a](missing.md) [b](index.md#missing)\n")
    built = build_site(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    for target in ("missing.md", "index.md#missing"):
        assert re.search(f"WARNING.*'{target}'", built.stderr), built.stderr


def test_site_loads_nothing_from_another_host(site: Path) -> None:
    foreign = []
    for page in site.rglob("*.html"):
        parser = LoadedAddresses()
        parser.feed(page.read_text())
        # The theme's script fetches Mermaid from another host if a page has such a block.
        assert parser.mermaid_blocks == 0, page.name
        foreign += [address for address in parser.addresses if urlsplit(address).netloc]
    for style in site.rglob("*.css"):
        foreign += re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", style.read_text())
    assert foreign == []


def test_site_has_exactly_the_pages_of_docs(site: Path) -> None:
    expected = {page.relative_to(DOCS).with_suffix(".html") for page in PAGES if page.is_relative_to(DOCS)}
    assert {page.relative_to(site) for page in site.rglob("*.html")} == {*expected, Path("404.html")}


def test_search_finds_no_page_of_the_log(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert not [entry["location"] for entry in found if entry["location"].startswith("log/")]
