"""Tests of the documentation: its Python runs, its commands, messages, links and names exist, its pages build."""

import ast
import dataclasses
import importlib
import importlib.util
import logging as python_logging
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
from transformers.utils import logging

from hf_specbranch import SpecBranchConfig
from hf_specbranch.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = 'title="not run: '  # what a reader sees above a block that needs more than this package


class Block(NamedTuple):
    language: str
    options: str
    code: str
    line: int


def blocks(page):
    text = page.read_text()
    return [
        Block(found["language"], found["options"], found["code"], text[: found.start("code")].count("\n"))
        for found in FENCE.finditer(text)
    ]


def name_of(page):
    return str(page.relative_to(ROOT))


def compiled(page, block):
    """Code that an error message places in the page."""
    return compile("\n" * block.line + block.code, name_of(page), "exec")


def python_pages(run):
    """Pages with Python blocks that are to be run, or with blocks that are not."""
    return [
        page
        for page in PAGES
        if any(block.language == "python" and (NOT_RUN not in block.options) == run for block in blocks(page))
    ]


@pytest.fixture
def same_log_level():
    """A page shows how to change it."""
    logger = python_logging.getLogger("hf_specbranch")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("page", python_pages(run=True), ids=name_of)
def test_every_python_block_runs(page, tmp_path, monkeypatch, same_log_level):
    """The blocks of a page are one program, read from top to bottom."""
    monkeypatch.chdir(tmp_path)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    names = {"__name__": "docs"}
    for block in blocks(page):
        if block.language == "python" and NOT_RUN not in block.options:
            exec(compiled(page, block), names)


@pytest.mark.parametrize("page", python_pages(run=False), ids=name_of)
def test_unrun_blocks_import_what_exists(page):
    for block in blocks(page):
        if block.language == "python" and NOT_RUN in block.options:
            compiled(page, block)
            imports = [node for node in ast.parse(block.code).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            exec(compile(ast.Module(imports, type_ignores=[]), name_of(page), "exec"), {})


# ---- commands


def commands():
    """Every command by the words that call it, as in "head train"."""
    found = {}

    def walk(command, words):
        for name, each in getattr(command, "commands", {}).items():
            walk(each, [*words, name])
        if not hasattr(command, "commands"):
            found[" ".join(words)] = {
                flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
            }

    walk(typer.main.get_command(app), [])
    return found


def written_commands(page):
    """`hf-specbranch` lines of a page's shell blocks, continued lines joined."""
    for block in blocks(page):
        if block.language in ("bash", ""):
            for line in block.code.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s[|;#]\s|&&", line):
                    if part.strip().startswith("hf-specbranch "):
                        yield part.strip().removeprefix("hf-specbranch ")


def test_commands_have_the_options_shown():
    known, shown = commands(), 0
    for page in PAGES:
        for line in written_commands(page):
            called = next(
                (name for name in sorted(known, key=len, reverse=True) if f"{line} ".startswith(f"{name} ")), None
            )
            assert called is not None, f"{name_of(page)}: hf-specbranch {line}"
            options = set(re.findall(r"(?<=\s)--[a-z-]+", line)) - {"--help"}
            assert options <= known[called], f"{name_of(page)}: hf-specbranch {line}"
            shown += 1
    assert shown > 20


def test_cli_page_lists_every_option():
    text = (ROOT / "docs/cli.md").read_text()
    sections = {part.split("\n")[0].strip("` "): part for part in re.split(r"^##+ ", text, flags=re.MULTILINE)}
    shared = sections["Options of several commands"]
    for command, options in commands().items():
        for option in options:
            if option.startswith("--"):
                where = sections[f"hf-specbranch {command}"] + shared
                assert f"`{option}" in where, f"hf-specbranch {command} {option} is not in docs/cli.md"


def test_quick_start_lists_every_setting():
    text = (ROOT / "docs/index.md").read_text()
    assert all(f"| `{field.name}` |" in text for field in dataclasses.fields(SpecBranchConfig))


# ---- messages


def first_cells(text, header):
    """Return the first cells of all tables whose first column has this header."""
    tables = re.findall(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [row.split(" | ")[0] for table in tables for row in table.splitlines()]


def test_troubleshooting_messages_are_ours():
    """The first cells of the tables quote messages up to what varies; the source breaks them over lines."""
    package = "".join(path.read_text() for path in (ROOT / "hf_specbranch").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", package)
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        part
        for cell in first_cells(text, "message")
        for message in re.findall(r"`([^`]+)`", cell)
        for part in message.split("…")
        if part.strip()
    ]
    assert len(quoted) > 20
    missing = [part for part in quoted if part.strip() not in source]
    assert not missing


# ---- links and names


def anchors(page):
    """Return the anchors of a page: its headings, and the names that the API reference documents."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", each) for each in plain} | set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_hold(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if link.startswith("http"):
            continue
        linked = (page.parent / link) if link else page
        assert linked.exists(), f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors(linked), f"{name_of(page)}: {link}#{anchor}"


def test_api_page_names_what_exists():
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_architecture_page_names_files_that_exist():
    """A path is relative to the package, or to the repository for tests, examples and the package itself."""
    for name in re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", (ROOT / "docs/architecture.md").read_text()):
        assert (ROOT / name).exists() or (ROOT / "hf_specbranch" / name).exists(), name


def test_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(page.name in navigation for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api/index.html").read_text().count("SpecBranchConfig") > 1
