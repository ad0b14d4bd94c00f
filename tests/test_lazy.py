"""Importing the package, and asking the command for help, imports neither torch nor transformers."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_specbranch
from hf_specbranch.lazy import after_import

ROOT = Path(__file__).parent.parent
HELP_SECONDS = 2.0  # of CPU time, on any machine; importing torch and transformers takes more

HELP = """
import json, sys, time
from typer.testing import CliRunner
from hf_specbranch.cli import app

said = [CliRunner().invoke(app, ["--help"]), CliRunner().invoke(app, ["--version"])]
seconds = time.process_time()  # since the process began
for words in json.loads(sys.argv[1]):
    said.append(CliRunner().invoke(app, [*words, "--help"]))
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
print(json.dumps({"seconds": seconds, "codes": [each.exit_code for each in said], "heavy": heavy}))
"""


def python(code, *arguments):
    """Run code in a new process, and return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ)
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_help_is_quick():
    commands = [["generate"], ["chat"], ["doctor"], ["tune"], ["warmup"], ["trace"], ["families"], ["bench"], ["head"]]
    inner = [["head", name] for name in ("collect", "train", "eval", "push", "search")]
    found = json.loads(python(HELP, json.dumps([*commands, *inner])))
    assert not found["heavy"] and set(found["codes"]) == {0}
    assert found["seconds"] < HELP_SECONDS


def test_import_of_the_package_imports_nothing_heavy():
    code = "import hf_specbranch, sys; from hf_specbranch import SpecBranchConfig; print('torch' in sys.modules)"
    assert python(code) == "False\n"


@pytest.mark.parametrize("package", ["hf_specbranch", "hf_specbranch.heads"])
def test_every_public_name_is_found_and_listed(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


def test_submodules_are_attributes():
    assert hf_specbranch.planning.simulate.predict is hf_specbranch.planning.predict
    for missing in ("no_such_name", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'hf_specbranch' has no attribute '{missing}'"):
            getattr(hf_specbranch, missing)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Two modules on the path: `library_of_test`, and `user_of_test`, which imports it and registers itself there."""
    (tmp_path / "library_of_test.py").write_text("registered = []\n")
    (tmp_path / "user_of_test.py").write_text("import library_of_test\nlibrary_of_test.registered.append(__name__)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in ("library_of_test", "user_of_test"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("first", ["library_of_test", "user_of_test"])
def test_import_registers_once_in_any_order(modules, first):
    finders = list(sys.meta_path)
    after_import("library_of_test", lambda: importlib.import_module("user_of_test"))
    assert "library_of_test" not in sys.modules
    importlib.import_module(first)
    assert sys.modules["library_of_test"].registered == ["user_of_test"] and sys.meta_path == finders


def test_import_registers_with_an_imported_module(modules):
    importlib.import_module("library_of_test")
    after_import("library_of_test", lambda: importlib.import_module("user_of_test"))
    assert sys.modules["library_of_test"].registered == ["user_of_test"]


def test_failed_import_is_tried_again(modules, tmp_path):
    (tmp_path / "library_of_test.py").write_text("raise RuntimeError\n")
    calls = []
    after_import("library_of_test", lambda: calls.append(1))
    with pytest.raises(RuntimeError):
        importlib.import_module("library_of_test")
    (tmp_path / "library_of_test.py").write_text("works = True  # now\n")
    importlib.invalidate_caches()
    importlib.import_module("library_of_test")
    assert calls == [1]
