"""What runs with an older Triton, which comes with an older torch."""

import logging
from types import SimpleNamespace

import pytest
import torch

from hf_specbranch.kernels import backend
from hf_specbranch.runtime.selection import _uses_kernels

CUDA = torch.device("cuda", 0)


@pytest.fixture
def version(monkeypatch):
    """Return a function that replaces Triton by one of another version, on a GPU that has all features."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def replace(number):
        for cached in (backend._compiles, backend.dependent_launch, backend.fewest_columns):
            cached.cache_clear()
        monkeypatch.setattr(backend, "triton", SimpleNamespace(__version__=number))

    yield replace
    for cached in (backend._compiles, backend.dependent_launch, backend.fewest_columns):
        cached.cache_clear()


@pytest.mark.parametrize("number", ["3.2.0", "3.3.1"])
def test_an_old_triton_runs_no_kernels(version, caplog, number):
    """They name instructions that it does not know, so that none of them compiles. One warning says so."""
    version(number)
    model = SimpleNamespace(device=CUDA, dtype=torch.float16, modules=lambda: [])
    with caplog.at_level(logging.WARNING):
        assert not backend.serves(CUDA) and not backend.serves(CUDA) and not _uses_kernels(model, True)
    assert len(caplog.messages) == 1 and number in caplog.messages[0]


@pytest.mark.parametrize(("number", "launch"), [("3.4.0", 0), ("3.5.1", 1), ("3.10.0+git1", 1)])
def test_versions_that_run_kernels(version, caplog, number, launch):
    """Kernels with instructions for programmatic dependent launch do not compile in Triton 3.4."""
    version(number)
    assert backend.serves(CUDA) and not caplog.messages
    assert backend.dependent_launch(CUDA)["PDL"] == launch
    assert backend.fewest_columns() == (8 if launch else 16)
