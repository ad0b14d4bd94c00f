"""The wheel: it builds reproducibly, carries what users need and nothing else, and works installed alone."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hf_specbranch

ROOT = Path(__file__).parent.parent
LARGEST = 25 * 2**20  # bytes; the embedded target is 20 MB


def build(folder, kind="wheel"):
    """Build from the checkout with what is installed, without a network."""
    script = f"from hatchling.build import build_{kind}; print(build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return folder / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling: pip install 'hf_specbranch[release]'")
    return build(tmp_path_factory.mktemp("dist"))


def test_one_version_everywhere():
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert hf_specbranch.__version__ == declared == cited
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()


def test_everything_imported_is_declared():
    declared = set(re.findall(r'^    "([\w-]+)>=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    declared = {name.replace("-", "_") for name in declared}
    package = ROOT / "hf_specbranch"
    extras = {package / "serving/http_app.py", package / "serving/ray_serve.py"}  # imported where they are asked for
    sources = "\n".join(path.read_text() for path in package.rglob("*.py") if path not in extras)
    imported = set(re.findall(r"^(?:from|import) (\w+)", sources, re.MULTILINE))  # at the top of modules
    assert imported - set(sys.stdlib_module_names) <= declared | {"hf_specbranch"}


@pytest.mark.slow
def test_wheel_is_reproducible_and_lean(wheel, tmp_path):
    assert build(tmp_path).read_bytes() == wheel.read_bytes()
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
    assert {name.split("/")[0] for name in names} == {"hf_specbranch", f"hf_specbranch-{metadata['Version']}.dist-info"}
    carried = {".py", ".typed", ".json", ".jsonl", ".safetensors", ".md", ".js", ".css", ".html"}
    assert {Path(name).suffix for name in names if "dist-info" not in name} <= carried
    assert "hf_specbranch/py.typed" in names and metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
def test_wheel_works_installed_alone(wheel, tmp_path):
    """In an environment that has only the wheel; its dependencies are those of this one."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    )  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    there = dict.fromkeys([sysconfig.get_path("purelib"), *(path for path in sys.path if "site-packages" in path)])
    (site / "dependencies.pth").write_text("\n".join(there))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        done = subprocess.run([python, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 3), done.stderr  # 3: the doctor's "slower"
        return done.stdout

    assert Path(run("-c", "import hf_specbranch; print(hf_specbranch.__file__)").strip()).is_relative_to(site)
    readme = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert "tokens per target pass" in run("-c", readme)
    command = ("-m", "hf_specbranch")
    assert run(*command, "--version").strip() == hf_specbranch.__version__
    assert "def add" not in run(*command, "generate", "def add(a, b):", "--max-new-tokens", "8")
    assert "timeline.html" in run(*command, "trace", "def add(a, b):", "--out", "t", "--max-new-tokens", "8")
    few = ["--num-prompts", "1", "--max-new-tokens", "8"]
    assert "plain generate()" in run(*command, "doctor", *few, "--repeat", "1")
    assert "autoregressive" in run(*command, "bench", *few, "--methods", "plain,autoregressive,auto")
