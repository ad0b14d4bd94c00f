"""The digest that Triton computes of its own files is kept on disk for as long as these files stay as they are."""

import os
import shutil

import pytest

from hf_specbranch.kernels.backend import triton
from hf_specbranch.kernels.triton_key import keep_triton_key, kept_key

from .kernels import where_triton_runs

KEY = "3.6.0" + "-".join(["0a" * 32] * 3)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triton"


@pytest.fixture
def root(tmp_path):
    """A folder with files where Triton has some."""
    for name in ("runtime/cache.py", "compiler/compiler.py", "backends/nvidia/compiler.py", "_C/libtriton.so"):
        file = tmp_path / "triton" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "triton"


class Digest:
    """Counts how often it is computed."""

    def __init__(self, key=KEY):
        self.key, self.computed = key, 0

    def __call__(self):
        self.computed += 1
        return self.key


def test_digest_is_computed_once(root):
    digest = Digest()
    assert [kept_key(root, digest) for _ in range(3)] == [KEY] * 3 and digest.computed == 1


def longer(file):
    file.write_text("another one")


def later(file):
    os.utime(file, ns=(0, 0))


@pytest.mark.parametrize("change", [longer, later, os.remove])
@pytest.mark.parametrize("name", ["runtime/cache.py", "backends/nvidia/compiler.py", "_C/libtriton.so"])
def test_changed_file_ends_it(change, name, root):
    digest = Digest()
    kept_key(root, digest)
    change(root / name)
    kept_key(root, digest)
    assert digest.computed == 2


def link(root, name, to):
    try:
        (root / name).symlink_to(to)
    except OSError:
        pytest.skip("no links here")


def test_changed_file_in_a_linked_folder_ends_it(root, tmp_path):
    """An editable installation of Triton links to the folders of its backends."""
    file = tmp_path / "third_party" / "compiler.py"
    file.parent.mkdir()
    file.write_text("one")
    link(root, "backends/amd", file.parent)
    digest = Digest()
    kept_key(root, digest)
    longer(file)
    kept_key(root, digest)
    assert digest.computed == 2


def test_link_to_nothing_is_no_error(root, tmp_path):
    link(root, "_C/gone.so", tmp_path / "gone.so")
    digest = Digest()
    assert kept_key(root, digest) == KEY and digest.computed == 1


def test_another_place_has_another_digest(root, tmp_path):
    digest = Digest()
    kept_key(root, digest)
    kept_key(shutil.copytree(root, tmp_path / "other"), digest)
    assert digest.computed == 2


@pytest.mark.parametrize("content", ["", "3.6.0", KEY[:-1], KEY + "\n", "\x00"])
def test_damaged_file_is_ignored(content, root, cache):
    digest = Digest()
    kept_key(root, digest)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert kept_key(root, digest) == KEY == file.read_text() and digest.computed == 2


def test_nothing_is_kept_where_that_is_off(root, monkeypatch):
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", "off")
    digest = Digest()
    assert [kept_key(root, digest) for _ in range(2)] == [KEY] * 2 and digest.computed == 2


@where_triton_runs
@pytest.mark.skipif(not hasattr(getattr(getattr(triton, "runtime", None), "cache", None), "triton_key"), reason="older")
def test_kept_digest_is_that_of_triton(monkeypatch):
    own = triton.runtime.cache.triton_key
    for _ in range(2):
        monkeypatch.setattr(triton.runtime.cache, "triton_key", own)
        keep_triton_key()
        assert triton.runtime.cache.triton_key is not own and triton.runtime.cache.triton_key() == own()


def test_without_triton_nothing_happens():
    keep_triton_key()
