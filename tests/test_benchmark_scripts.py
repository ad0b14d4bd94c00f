"""The scripts in examples/benchmarks measure what they say, and each of them runs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from hf_specbranch.bench.limit import token_cost
from hf_specbranch.bench.measure import Benchmark, Plan
from hf_specbranch.bench.methods import Overrides
from hf_specbranch.bench.report import build

from .benchmarks import NEW_TOKENS, benchmark_of_all_methods, tiny_pair
from .families import make
from .models import prompt

SCRIPTS = Path(__file__).parents[1] / "examples" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))
choose_plans = importlib.import_module("choose_plans")
cpu_first_calls = importlib.import_module("cpu_first_calls")
each_kernel = importlib.import_module("each_kernel")
experts = importlib.import_module("experts")
first_call = importlib.import_module("first_call")
lab = importlib.import_module("lab")
latency = importlib.import_module("latency")
other_drafts = importlib.import_module("other_drafts")
overhead = importlib.import_module("overhead")
pass_time = importlib.import_module("pass_time")
predictions = importlib.import_module("predictions")
recurrent = importlib.import_module("recurrent")
scaling = importlib.import_module("scaling")
serving = importlib.import_module("serving")


@pytest.fixture(scope="module")
def pair(target, draft):
    return tiny_pair(target, draft)


@pytest.fixture(scope="module")
def finished(pair):
    """All methods on two prompts of the tiny pair."""
    benchmark = benchmark_of_all_methods(pair, repeat=1)
    benchmark.run()
    return benchmark, build(benchmark, {}, interrupted=False)


def test_experts_are_timed_for_each_number_of_tokens(tmp_path, capsys):
    file = tmp_path / "experts.json"
    experts.main(["--shapes", "32x16x8x2", "--tokens", "1,6", "--layers", "1", "--repeat", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    assert [entry["tokens"] for entry in found] == [1, 6] and found[0]["touched"] == 2 < found[1]["touched"] <= 8
    assert all(entry["us"] > 0 for entry in found) and len(capsys.readouterr().out.splitlines()) == 2


def test_plans_are_chosen_by_the_time_of_a_pass():
    """One product after the other, each with its launch, and only where the pass is faster twice."""
    first, second = "H|bfloat16 dense|1 rows|2048x2048|whole", "H|bfloat16|16|2048x8192|split-k"
    plans = {first: choose_plans.Plan(1, 0, 16, 8, 2), second: None}
    wanted = choose_plans.Plan(1, 0, 16, 4, 4, next=choose_plans.LATE)
    lucky = iter([0.1])

    def seconds():
        took = 3.0 + (plans[first].warps != 4) + (plans[first].next != choose_plans.LATE) * 0.5
        if plans[second] == choose_plans.PLANS[-1]:  # fast once, by chance
            took = next(lucky, took)
        return took + (plans[second] is not None) * 0.001

    built = []
    assert choose_plans.search(plans, [first, second], seconds, 60.0, lambda *given: built.append(given)) == 3.0
    assert built[0] == (first, choose_plans.candidates(first)) and {key for key, _ in built} == {first, second}
    assert (first, choose_plans.launches(plans[first]._replace(next=0))) in built
    assert plans[first]._replace(spans=4) == wanted and plans[second] is None
    assert choose_plans.search(plans, [first], seconds, 0.0) == 3.0  # no time to try anything
    rows = [choose_plans.candidates(key) for key in (first, second)]
    assert all(plan.spans * 128 * plan.warps >= 2048 for plan in rows[0] if plan.stages) and None in rows[1]


def test_plans_of_several_tokens_are_chosen_apart():
    """Layers of any width have some to begin with, and no thread has more of W and x than its registers."""
    products = ("9728x896|gated", "896x4864|split-k", "1152x896|split-k", "3072x2048|split-k", "151936x896|whole")
    used = [f"H|bfloat16|16|{each}" for each in products]
    assert choose_plans.wide_plans(used) == {}  # this model is narrow
    for tokens, rows in ((2, 4), (4, 4), (5, 8), (8, 8)):
        plans = choose_plans.wide_plans(used, tokens)
        kinds = ("9728x896|normed-gated", "896x4864|whole", "1152x896|normed")
        assert list(plans) == [f"H|bfloat16 dense|{rows} rows|{each}" for each in kinds]
        for key, plan in plans.items():
            tried = choose_plans.candidates(key)
            assert plan in tried and len(tried) > 8
            assert all(2 * each.spans * (16 + rows) * each.warps <= 2048 and each.spans * rows <= 32 for each in tried)


@pytest.mark.parametrize("tokens", ["0", "9", "four"])
def test_plans_are_for_one_to_eight_tokens(tokens, capsys):
    with pytest.raises(SystemExit):
        choose_plans.main(["--tokens", tokens])
    assert "argument --tokens: invalid" in capsys.readouterr().err


def test_plans_are_chosen_on_a_gpu_only(capsys):
    with pytest.raises(SystemExit):
        choose_plans.main(["--device", "cpu"])
    assert "on CUDA devices only" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_model_without_plans_is_timed_all_the_same(target, graph_runners, monkeypatch, tokens):
    """As on a CPU, where no product has a plan."""
    monkeypatch.setattr(choose_plans.autotune, "plans", shipped := choose_plans.autotune.plans)
    read = []
    hook = target.get_input_embeddings().register_forward_hook(lambda _, given, out: read.append(given[0].shape[1]))
    before, after, plans = choose_plans.choose(target, "target", wide=True, limit=1.0, queries=tokens)
    hook.remove()
    assert before > 0 < after and plans == {} and choose_plans.autotune.plans is not shipped
    assert read[-1] == tokens


@pytest.mark.gpu
def test_plans_of_a_small_model_are_chosen(tmp_path):
    file = tmp_path / "plans.json"
    choose_plans.main(["--model", "qwen2.5-0.5b", "--seconds", "3", "--json", str(file)])
    plans = json.loads(file.read_text())
    assert any("|1 rows|" in key for key in plans) and any("|16|" in key for key in plans)


def test_recurrent_model_is_measured_at_a_known_acceptance(tmp_path, capsys):
    file, sizes = tmp_path / "recurrent.json", ["--context", "16", "--new-tokens", "33", "--repeat", "1"]
    recurrent.main([*sizes, "--replaced", "0.2", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["equal"] and 2.5 < found["mean_acceptance_length"] < 6  # (1 - 0.8 ** 8) / 0.2 is 4.2
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]) == 6


# ---- predictions


@pytest.mark.slow
def test_methods_are_predicted_from_each_other(finished):
    benchmark, report = finished
    found = predictions.predictions(benchmark)
    methods = report["methods"]
    others = ("auto", "auto-no-lookup", "no-draft", "specbranch-head")
    ours = [name for name, row in methods.items() if row["settings"] and name not in others]
    assert list(found["methods"]) == ours
    for name, row in found["methods"].items():
        assert row["measured"]["tokens_per_pass"] == methods[name]["mean_acceptance_length"]
        assert row["predicted"]["tokens_per_pass"] == pytest.approx(row["measured"]["tokens_per_pass"], rel=0.15)
        speeds = [(entry["new_tokens"] - 1) / median(entry["decode_seconds"]) for entry in methods[name]["prompts"]]
        assert row["measured"]["tokens_per_second"] == pytest.approx(median(speeds))
        assert row["predicted"]["tokens_per_second"] > 0 and row["error"]["tokens_per_second"] > -1
    assert found["median_error"]["tokens_per_pass"] < 0.05
    assert "predicted by replay" in predictions.lines(found)[0] and found["costs"]["target_pass_ms"] > 0
    lengths = [entry["max_draft_length"] for entry in found["by_length"]["vanilla-best"]]
    assert lengths == [1, 3] and all(
        entry["predicted"] > 0 < entry["measured"] for entry in found["by_length"]["pearl-best"]
    )


def test_too_few_methods_predict_nothing(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "autoregressive"), max_new_tokens=6))
    benchmark.run()
    assert predictions.predictions(benchmark) is None


@pytest.mark.slow
def test_predictions_are_drawn(finished, tmp_path):
    pytest.importorskip("matplotlib")
    predictions.save_predictions(predictions.predictions(finished[0]), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# ---- the time of a pass


def test_distance_to_the_limit(pair):
    found = pass_time.distance_to_limit(pair.target, (16, 64), "auto")  # caches grow in steps of 64
    assert found["limit_ms"] == pytest.approx(1000 * found["weight_bytes"] / found["copy_bytes_per_second"])
    assert [(entry["context"], entry["tokens"]) for entry in found["passes"]] == [(16, 1), (16, 8), (64, 1), (64, 8)]
    for entry in found["passes"]:
        assert entry["times_the_limit"] == pytest.approx(entry["ms"] / found["limit_ms"])


def test_draft_step_is_the_difference_of_stages(pair, monkeypatch):
    masks, stages = [], []

    def timed(work, *_):
        masks.clear()
        work()
        stages.append(len(masks))
        return [3.0 + 0.5 * len(masks)]

    monkeypatch.setattr(pass_time, "timed", timed)
    monkeypatch.setattr(pass_time, "copy_bandwidth", lambda _: 2.0 * token_cost(pair.draft).bytes)
    hook = pair.draft.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    try:
        found = pass_time.draft_steps(pair.draft, 16, "eager")
    finally:
        hook.remove()
    assert stages == [2, 6, 2, 6]
    assert masks[0][0, 0, :, :24].tolist() == [
        [slot < 16 or slot == 16 + own for slot in range(24)] for own in range(4)
    ]
    assert [(entry["branches"], entry["ms"]) for entry in found["steps"]] == [(1, 500.0), (4, 500.0)]
    assert found["limit_ms"] == 500.0 and found["steps"][0]["times_the_limit"] == 1.0


# ---- latency and kernels


@pytest.mark.slow
def test_latency_is_measured_and_printed(pair, finished):
    benchmark, ours = finished[0], Overrides(max_draft_length=4)
    found = {
        "time_to_first_token": [latency.time_to_first_token(pair, benchmark.inputs, ours, 30, repeats=1)],
        "step_cost": latency.step_cost(pair, benchmark.inputs, ours, [(20, 1), (20, 3)], repeats=1),
        "round_cost": latency.round_cost(pair, benchmark.inputs, ours, (238, 244), repeats=1),
        "stability": latency.stability(pair, benchmark.inputs[0], ours, 3, NEW_TOKENS),
    }
    assert found["time_to_first_token"][0]["prompt_tokens"] == 30 and found["time_to_first_token"][0]["ratio"] > 0
    one, three = found["step_cost"]
    assert three["rows"] == 3 and three["limit_ms"] > one["limit_ms"] > 0 and three["ratio"] > 0
    assert [row["context"] for row in found["round_cost"]] == [238, 244]
    speeds = found["stability"]["tokens_per_second"]
    assert len(speeds) == 3 and found["stability"]["ratio"] == pytest.approx(speeds[-1] / speeds[0])
    text = "\n".join(latency.lines(found))
    assert "at 244 tokens of context" in text and "3 runs" in text and "30-token prompt" in text
    assert "3 rows at 20 tokens" in text


def test_each_kernel_is_timed(pair):
    found = each_kernel.each_kernel(pair.target)
    assert len(found) == 9 and all(min(entry["us"], entry["torch_us"]) > 0 for entry in found)
    text = "\n".join(each_kernel.lines(found))
    assert "norm with residual: " in text and "product, down (" in text


def test_models_with_other_sizes_are_refused():
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no intermediate_size in its config"):
        each_kernel.check_sizes(make("gpt2"))


def test_contexts_that_do_not_fit_are_refused(pair):
    with pytest.raises(ValueError, match="255 tokens leaves no room for 8 more in the target's context of 256"):
        lab.check_context(pair, (255,))


# ---- the scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (pass_time, ["--contexts", "16", "--draft-weights", "int8", "--draft-shortlist", "512"]),
        (each_kernel, ["--tokens", "2", "--context", "16"]),
        (latency, ["--rounds-at", "20", "--repeat", "1", "--num-prompts", "1"]),
        (serving, ["--streams", "1,2", "--requests", "1", "--max-new-tokens", "4", "--num-prompts", "2"]),
        (other_drafts, ["--new-tokens", "4", "--num-prompts", "1"]),
        (cpu_first_calls, ["--busy", "1", "--pairs", "2", "--new-tokens", "8"]),
        (first_call, ["--processes", "1", "--new-tokens", "4", "--prompt-length", "16"]),
        (
            predictions,
            ["--methods", "autoregressive,vanilla-best,vanilla-stop,specbranch", "--sweep", "2"]
            + ["--num-prompts", "1", "--max-new-tokens", "8"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_script_writes_its_result(script, arguments, tmp_path, capsys):
    script.main([*arguments, "--threads", "1", "--json", str(tmp_path / "result.json")])
    assert capsys.readouterr().out.strip() and json.loads((tmp_path / "result.json").read_text())


def test_overhead_compares_with_transformers(capsys):
    overhead.main(["--lengths", "2", "--max-new-tokens", "8", "--repeats", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["ratio"] > 0


def test_scaling_predicts_less_gain_for_more_users(capsys):
    scaling.main(["--num-prompts", "1", "--max-new-tokens", "24"])
    tables = capsys.readouterr().out.split("\n\n")
    gains = [float(line.split("|")[4].strip(" x")) for line in tables[1].splitlines()[2:]]
    assert len(tables) == 3 and gains == sorted(gains, reverse=True) and gains[0] > 1.5 > gains[-1] > 0.9


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install 'hf_specbranch[ray]'")
def test_first_token_is_timed_on_ray(tmp_path):
    command = [sys.executable, str(SCRIPTS / "first_token_on_ray.py"), "--requests", "4", "--threads", "1"]
    file = tmp_path / "result.json"
    subprocess.run([*command, "--json", str(file)], check=True, timeout=400)
    found = json.loads(file.read_text())
    assert found["median_ms"]["server"] > found["median_ms"]["empty"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_script_has_help(path):
    if path.stem == "lab":
        pytest.skip("a module of the scripts")
    if path.stem == "first_token_on_ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'hf_specbranch[ray]'")
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and f"python examples/benchmarks/{path.name}" in done.stdout
