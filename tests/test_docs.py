"""What the documentation says is true: its Python runs, its commands and messages exist, its pages build."""

import ast
import dataclasses
import importlib.util
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


@pytest.mark.parametrize("page", python_pages(run=True), ids=name_of)
def test_every_python_block_runs(page, tmp_path, monkeypatch):
    """The blocks of a page are one program, read from top to bottom."""
    monkeypatch.chdir(tmp_path)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    names = {"__name__": "docs"}
    for block in blocks(page):
        if block.language == "python" and NOT_RUN not in block.options:
            exec(compiled(page, block), names)


@pytest.mark.parametrize("page", python_pages(run=False), ids=name_of)
def test_blocks_that_are_not_run_name_only_what_exists(page):
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


def test_every_command_in_the_docs_has_the_options_it_is_shown_with():
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


def test_the_command_line_page_lists_every_option():
    text = (ROOT / "docs/cli.md").read_text()
    sections = {part.split("\n")[0].strip("` "): part for part in re.split(r"^##+ ", text, flags=re.MULTILINE)}
    shared = sections["Options of several commands"]
    for command, options in commands().items():
        for option in options:
            if option.startswith("--"):
                where = sections[f"hf-specbranch {command}"] + shared
                assert f"`{option}" in where, f"hf-specbranch {command} {option} is not in docs/cli.md"


def test_the_quick_start_lists_every_setting():
    text = (ROOT / "docs/index.md").read_text()
    assert all(f"| `{field.name}` |" in text for field in dataclasses.fields(SpecBranchConfig))


# ---- messages


def test_every_message_in_the_troubleshooting_page_is_one_of_ours():
    """Headings quote messages up to what varies; the source breaks them over lines."""
    package = "".join(path.read_text() for path in (ROOT / "hf_specbranch").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", package)
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        part
        for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", heading)
        for part in message.split("…")
        if part.strip()
    ]
    assert len(quoted) > 20
    missing = [part for part in quoted if part.strip() not in source]
    assert not missing


def test_the_readme_links_to_what_is_there():
    """Links between pages are checked when the site is built; the README is no part of it."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert links and all((ROOT / link).exists() for link in links if not link.startswith("http"))


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(page.name in navigation for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api/index.html").read_text().count("SpecBranchConfig") > 1
