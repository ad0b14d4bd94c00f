"""Our logits are as close to float32 as those of plain half precision, and the script measures that correctly."""

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.attention import AttentionForward

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
real_shapes = importlib.import_module("real_shapes")
precision = importlib.import_module("precision")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # many CPUs are very slow in bfloat16


def test_real_shapes_have_real_sizes():
    billions = {"Llama-3.1-8B": 8.03, "Qwen3-30B-A3B": 30.53, "Gemma-2-9B": 9.24, "Cohere2-7B": 8.03}
    for name, size in billions.items():
        model = real_shapes.build(name, "meta", torch.bfloat16)
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(size * 1e9, rel=1e-3)


# Rotary of neighbouring channels, layers without any, rotary of half of the channels.
@pytest.mark.compat
@pytest.mark.parametrize("name, expected", [("GLM-4-9B", 0), ("Cohere2-7B", 0), ("SmolLM3-3B", 3), ("gpt-oss-20b", 0)])
def test_attention_kind_is_found_by_positions(name, expected):
    """Tiny random models attend to all tokens nearly equally, so only positions tell the kinds apart."""
    model = real_shapes.build(name, DEVICE, HALF, tiny=True)
    fuse(model)
    with fused(model):
        kinds = [type(getattr(vars(module).get("forward"), "ours", None)) for module in model.modules()]
    assert kinds.count(AttentionForward) == expected


@pytest.mark.compat
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-30B-A3B"])
@torch.no_grad()
def test_reference_is_float32(name):
    model = real_shapes.build(name, DEVICE, HALF, tiny=True)
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
@pytest.mark.parametrize("name", real_shapes.CONFIGS)
def test_error_equals_plain_half_precision(name):
    measured = precision.measure(real_shapes.build(name, DEVICE, HALF, tiny=True))
    assert measured.worst <= precision.MOST
    assert measured.noise <= 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Cohere2-7B", "Llama-3.2-1B", "Gemma-2-9B", "SmolLM3-3B"])
def test_error_equals_plain_bfloat16_at_real_sizes(name):
    """Some layers of each; `examples/benchmarks/precision.py` measures all of them."""
    measured = precision.measure(real_shapes.build(name, "cuda", torch.bfloat16, layers=8))
    assert measured.kernels == "fused"
    assert measured.worst <= precision.MOST


def test_failing_model_does_not_end_the_run(monkeypatch, capsys):
    def fail(name, *args, **kwargs):
        raise RuntimeError(f"no memory for {name}")

    monkeypatch.setattr(precision, "build", fail)
    monkeypatch.setattr(sys, "argv", ["precision.py", "--tiny", "--device", "cpu", "Llama-3.1-8B", "Qwen3-8B"])
    assert precision.main() == 1
    assert "| Qwen3-8B | RuntimeError: no memory for Qwen3-8B |" in capsys.readouterr().out
