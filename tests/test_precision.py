"""Our logits are as close to float32 as those of plain half precision, and the script measures that correctly."""

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import SHAPES, config_of
from hf_specbranch.kernels.rotation import HALVES, Rotation
from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.attention import AttentionForward

from .models import slowly

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
precision = importlib.import_module("precision")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # many CPUs are very slow in bfloat16


def tiny(name):
    return random_model(config_of(name, tiny=True), DEVICE, HALF)


@pytest.mark.compat
@pytest.mark.parametrize(
    "name, expected",
    [
        slowly("llama3.2-1b", [HALVES] * 4),
        ("glm4-9b", [Rotation(neighbours=True)] * 4),
        ("command-r7b", [Rotation(neighbours=True, table="neighbours")] * 3 + [None]),
        slowly("smollm3-3b", [HALVES] * 3 + [None]),
        ("gpt-oss-20b", [Rotation(table="once")] * 4),
    ],
)
def test_rotation_is_found_by_positions(name, expected):
    """Tiny random models attend to all tokens nearly equally, so only positions tell the kinds apart."""
    model = tiny(name)
    fuse(model)
    with fused(model):
        replacements = [getattr(vars(module).get("forward"), "ours", None) for module in model.modules()]
    assert [each.form.rotation for each in replacements if isinstance(each, AttentionForward)] == expected


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen3-30b-a3b"])
@torch.no_grad()
def test_reference_is_float32(name):
    model = tiny(name)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    ids = torch.arange(9, device=DEVICE)[None]
    with precision.in_float32(model):
        logits = model(ids).logits
    torch.testing.assert_close(logits, copy.deepcopy(model).float()(ids).logits, atol=1e-5, rtol=1e-5)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("name", SHAPES)
def test_error_equals_plain_half_precision(name):
    measured = precision.measure(tiny(name))
    assert measured.worst <= precision.MOST
    assert measured.noise <= 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["command-r7b", "llama3.2-1b", "gemma2-9b", "smollm3-3b"])
def test_error_equals_plain_bfloat16_at_real_sizes(name):
    """Some layers of each; `examples/benchmarks/precision.py` measures all of them."""
    measured = precision.measure(random_model(config_of(name, layers=8), "cuda", torch.bfloat16))
    assert measured.kernels == "fused"
    assert measured.worst <= precision.MOST


def test_failing_model_does_not_end_the_run(monkeypatch, capsys):
    def fail(config, *args):
        raise RuntimeError(f"no memory for {config.model_type}")

    monkeypatch.setattr(precision, "random_model", fail)
    monkeypatch.setattr(sys, "argv", ["precision.py", "--tiny", "--device", "cpu", "llama3.1-8b", "qwen3-8b"])
    assert precision.main() == 1
    assert "| qwen3-8b | RuntimeError: no memory for qwen3 |" in capsys.readouterr().out
