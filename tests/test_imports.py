"""The architecture: modules import each other in one direction, and one call enters few of them."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import hf_specbranch
from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch

ROOT = Path(hf_specbranch.__file__).parent
PACKAGE = ROOT.name


def module_name(path, root=ROOT):
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(name, source, known, is_package):
    """The modules of `known` that one module names in an import, wherever in its source.

    `from a.b import c` is an import of `a.b.c` if that is a module, else of `a.b`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if is_package else name.split(".")[:-1]
            above = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                found.add(whole if whole in known else origin)
    return found & known - {name}


def import_graph(root=ROOT):
    """Which modules each module of a package imports. A package's `__init__` is a node of its own."""
    files = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    return {
        name: imported_by(name, path.read_text(), files.keys(), path.name == "__init__.py")
        for name, path in files.items()
    }


def cycles(graph):
    """Strongly connected components of more than one module (Tarjan's algorithm)."""
    index, low, on_stack, stack, found = {}, {}, set(), [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on_stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
                on_stack.discard(component[-1])
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_import_cycles():
    """Imports inside functions and under TYPE_CHECKING count too."""
    graph = import_graph()
    assert len(graph) > 50 and any(graph.values())
    assert cycles(graph) == []


def test_import_cycles_are_found(tmp_path):
    """In a package whose modules import each other lazily and for types only."""
    root = tmp_path / "package"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").write_text("from .first import one\n")
    (root / "first.py").write_text("def one():\n    from .inner import second\n    return second\n")
    (root / "inner" / "__init__.py").write_text("")
    (root / "inner" / "second.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..first import one\nfrom . import third\n"
    )
    (root / "inner" / "third.py").write_text("import package.inner\n")
    graph = import_graph(root)
    assert graph == {
        "package": {"package.first"},
        "package.first": {"package.inner.second"},
        "package.inner": set(),
        "package.inner.second": {"package.first", "package.inner.third"},
        "package.inner.third": {"package.inner"},
    }
    assert cycles(graph) == [["package.first", "package.inner.second"]]


class FilesEntered:
    """The files of ours that are entered while it is active, over the whole time and round by round."""

    def __init__(self):
        self.all, self.rounds, self.ours = set(), [], str(ROOT) + os.sep

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(self.ours):
            return
        name = path.removeprefix(self.ours)
        if frame.f_code.co_name == "propose":
            self.rounds.append(set())
        self.all.add(name)
        if self.rounds:
            self.rounds[-1].add(name)


def test_one_call_enters_few_files():
    target, draft, tokenizer = load_demo_pair()
    model = specbranch(target, draft)
    inputs = tokenizer("def add(a, b):", return_tensors="pt")
    arguments = {**inputs, "do_sample": False, "specbranch": SpecBranchConfig(policy="specbranch")}
    model.generate(**arguments, max_new_tokens=4)  # what is found out once
    entered = FilesEntered()
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        model.generate(**arguments, max_new_tokens=40)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(entered.all) <= 25, sorted(entered.all)
    middle = entered.rounds[1:-1]
    assert len(middle) > 3 and max(map(len, middle)) <= 14, sorted(max(middle, key=len))


def test_no_file_is_long():
    longest = max(ROOT.rglob("*.py"), key=lambda path: len(path.read_text().splitlines()))
    assert len(longest.read_text().splitlines()) <= 350, longest


WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # its import fails, as on Windows and macOS
import hf_specbranch
for module in pkgutil.walk_packages(hf_specbranch.__path__, "hf_specbranch."):
    if not module.name.endswith(("__main__", "ray_serve")):  # Ray is an extra
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("ray", "starlette", "uvicorn"):  # extras
                raise
"""


def test_every_module_is_imported_without_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
