"""`hf-specbranch bench --families` times models with random weights against the time to read their weights."""

import gc
import json
import weakref

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch.bench import families as families_module
from hf_specbranch.bench.families import FamiliesBenchmark, FamiliesPlan
from hf_specbranch.bench.limit import token_cost
from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import SHAPES, config_of
from hf_specbranch.cli import app
from hf_specbranch.progress import Progress

from .models import llama, slowly

# Milliseconds to read what a token needs in bfloat16 at 4.28 TB/s.
LIMITS = {
    "qwen2.5-7b": 3.30, "llama3.1-8b": 3.51, "mistral-7b": 3.32, "qwen3-8b": 3.54, "gemma2-9b": 4.32,
    "phi3-mini": 1.74, "starcoder2-7b": 3.35, "gemma3-4b": 1.81, "smollm3-3b": 1.44, "olmo2-7b": 3.22,
    "llama3.2-1b": 0.58, "pythia-6.9b": 3.11, "command-r7b": 3.75, "glm4-9b": 4.10, "glm4-9b-0414": 4.10,
    "qwen2.5-0.5b": 0.23, "gpt-oss-20b": 1.69, "qwen3-30b-a3b": 1.42,
}  # fmt: skip
BILLIONS = {  # parameters and active ones, as published
    "llama3.1-8b": (8.03, 8.03), "qwen3-30b-a3b": (30.5, 3.3), "gpt-oss-20b": (20.9, 4.2), "mixtral-8x7b": (46.7, 12.9),
    "olmoe-1b-7b": (6.9, 1.3), "qwen1.5-moe-a2.7b": (14.3, 2.7), "granite3.1-3b-a800m": (3.3, 0.88),
    "moonlight-16b-a3b": (15.96, 2.9), "qwen3-0.6b": (0.596, 0.596), "qwen3-32b": (32.8, 32.8),
}  # fmt: skip


def cost(name):
    return token_cost(random_model(config_of(name), "meta", torch.bfloat16))


@pytest.mark.parametrize("name", [each if number % 3 == 0 else slowly(each) for number, each in enumerate(LIMITS)])
def test_limit_follows_from_the_shape(name):
    assert cost(name).bytes / 4.28e9 == pytest.approx(LIMITS[name], rel=0.02)


@pytest.mark.parametrize("name", [each if number % 3 == 0 else slowly(each) for number, each in enumerate(BILLIONS)])
def test_shapes_have_the_published_sizes(name):
    found = cost(name)
    assert found[:2] == pytest.approx([1e9 * billions for billions in BILLIONS[name]], rel=0.02)


def test_embedding_table_counts_only_as_output_layer():
    table = 48 * 32 * 4
    untied, tied = llama(0), llama(0, tie_word_embeddings=True)
    everything = sum(weight.numel() * 4 for weight in untied.parameters())
    assert token_cost(untied).bytes == token_cost(tied).bytes == everything - table


def run(*arguments):
    words = ["bench", "--threads", "1", "--max-new-tokens", "4", "--context-length", "32", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "120"})


def test_command_measures_shapes_and_folders(tmp_path):
    config_of("smollm3-3b", tiny=True).save_pretrained(tmp_path / "mine")
    names = f"qwen3-30b-a3b,llama3.2-1b,{tmp_path / 'mine'}"
    files = ["--json", tmp_path / "f.json", "--markdown", tmp_path / "f.md"]
    done = run("--families", names, "--tiny", "--plain", "--bandwidth", 0.002, *files)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "f.json").read_text())
    assert list(report["models"]) == names.split(",") and report["bandwidth"] == 2e9
    for model in report["models"].values():
        assert model["limit_ms"] == pytest.approx(model["read_bytes"] / 2e6)
        assert model["ratio"] == pytest.approx(model["ours_ms"] / model["limit_ms"]) and model["plain_ms"] > 0
        assert model["runtime"] == "eager" and model["kernels_per_token"] is None
    mixture = report["models"]["qwen3-30b-a3b"]
    assert mixture["active_parameters"] < mixture["parameters"]
    assert "0.002 TB/s (as given)" in done.stdout and "| llama3.2-1b |" in (tmp_path / "f.md").read_text()


def test_failing_model_does_not_end_the_run(tmp_path):
    done = run(
        "--families", "pythia-6.9b,llama3.2-1b", "--tiny", "--context-length", 2048, "--json", tmp_path / "f.json"
    )
    models = json.loads((tmp_path / "f.json").read_text())["models"]
    assert done.exit_code == 1 and models["llama3.2-1b"]["ours_ms"] > 0
    assert "pythia-6.9b failed: ValueError: 2048 tokens of context and 4 new ones do not fit" in done.stdout


def test_models_are_freed(monkeypatch):
    built = []

    def remembered(config, device, *rest):
        model = random_model(config, device, *rest)
        built.append(weakref.ref(model))
        return model

    monkeypatch.setattr(families_module, "random_model", remembered)
    configs = {name: config_of(name, tiny=True) for name in ("qwen3-8b", "olmo2-7b")}
    plan = FamiliesPlan(torch.device("cpu"), torch.float32, context=16, max_new_tokens=4)
    benchmark = FamiliesBenchmark(configs, plan)
    benchmark.run()
    gc.collect()
    assert len(built) == 4 and not any(model() for model in built)
    assert benchmark.bandwidth > 0 and all(result.ours_ms for result in benchmark.results.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "warp"], "--families warp: expected all, a folder, a repository id, or one of llama3.1-8b"),
        (["--families", ","], "--families is empty"),
        (["--families", "/no/such"], "--families /no/such: no such folder"),
        (["--families", "all", "--grow", "7b:68m"], "--grow: not used with --families"),
        (["--families", "all", "--check"], "--check: not used with --families"),
        (["--families", "all", "--device", "toaster"], "--device toaster: expected cpu"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    assert message in str(run(*arguments).exception)


def test_options_of_families_are_refused_elsewhere():
    done = CliRunner().invoke(app, ["bench", "--tiny", "--plain"])
    assert str(done.exception) == "--plain, --tiny: only used with --families, leave it out"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_runs(name):
    plan = FamiliesPlan(torch.device("cpu"), torch.float32, context=32, max_new_tokens=4)
    benchmark = FamiliesBenchmark({name: config_of(name, tiny=True)}, plan)
    benchmark.run()
    assert not benchmark.results[name].failed


@pytest.mark.gpu
def test_captured_models_are_counted():
    plan = FamiliesPlan(torch.device("cuda"), torch.bfloat16, context=64, max_new_tokens=16)
    benchmark = FamiliesBenchmark({"llama3.2-1b": config_of("llama3.2-1b", layers=2)}, plan)
    benchmark.run()
    result = benchmark.results["llama3.2-1b"]
    assert not result.failed and result.runtime == "graph" and not result.reason
    assert 5 < result.kernels_per_token < 100 and result.fused_modules and result.ratio > 1


def test_broken_cuda_context_ends_the_list_and_keeps_the_results(monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Said(Progress):
        def say(self, line):
            lines.append(line)

    lines = []
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    plan = FamiliesPlan(torch.device("cuda", 99), torch.float32, bandwidth=1e12)  # no such device: the model fails
    names = ("llama3.2-1b", "qwen3-0.6b")
    benchmark = FamiliesBenchmark({name: config_of(name, tiny=True) for name in names}, plan, Said())
    benchmark.run()
    assert list(benchmark.results) == ["llama3.2-1b"] and benchmark.results["llama3.2-1b"].failed
    assert lines[-1] == "llama3.2-1b has broken the CUDA context: measure the models after it in a new process"
