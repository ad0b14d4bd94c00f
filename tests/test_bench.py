"""`hf-specbranch bench` compares methods that give the same tokens; its figures follow from what it ran."""

import copy
import io
import json
import re
import signal
from importlib.metadata import version

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_specbranch import SpecBranchStats, load_demo_pair, specbranch
from hf_specbranch.bench import Shape, grow, measure
from hf_specbranch.bench.grow_head import grow_head
from hf_specbranch.bench.measure import Benchmark, Plan, Progress, complaints
from hf_specbranch.bench.methods import METHODS, Method, Overrides, Pair, check_names, fixed_methods
from hf_specbranch.bench.report import GROUPS, build, lines, markdown, print_report
from hf_specbranch.bench.results import difference, first_difference, pooled, summarize
from hf_specbranch.bench.timing import TimingStreamer, percentile
from hf_specbranch.cli import app

from .benchmarks import NEW_TOKENS, RUNNABLE, benchmark_of_all_methods, tiny_pair
from .heads import random_head
from .models import prompt

COLUMNS = [column.key for group in GROUPS for column in group]


@pytest.fixture(scope="module")
def pair(target, draft):
    return tiny_pair(target, draft)


@pytest.fixture(scope="module")
def finished(pair):
    """All methods on two prompts of the tiny pair, and how many generations that took."""
    progress = RecordedProgress()
    benchmark = benchmark_of_all_methods(pair, progress, repeat=1, stream_prompts=1)
    expected = benchmark.generations
    benchmark.run()
    report = build(benchmark, {"seed": 0}, interrupted=False)
    return benchmark, report, (progress, expected)


class RecordedProgress(Progress):
    """Records what it is told."""

    def __init__(self):
        self.generations, self.steps, self.lines = 0, [], []

    def advance(self):
        self.generations += 1

    def doing(self, what):
        self.steps.append(what)

    def say(self, line):
        self.lines.append(line)


def test_all_methods_give_the_tokens_of_plain_generate(finished):
    benchmark, report, _ = finished
    assert list(report["methods"]) == RUNNABLE
    assert report["differences"]["outputs"] == 0
    assert {len(method["prompts"]) for method in report["methods"].values()} == {2}


def test_first_method_is_the_reference_without_plain(pair):
    plan = Plan(check_names(("vanilla-stop", "autoregressive")), max_new_tokens=6, stream_prompts=0)
    benchmark = Benchmark(pair, [("a", prompt(length=7))], plan)
    benchmark.run()
    report = build(benchmark, {}, interrupted=False)
    assert list(report["methods"]) == ["autoregressive", "vanilla-stop"] and "plain" not in benchmark.spent
    assert report["compared_with"] == "autoregressive" and "all outputs equal autoregressive's" in lines(report)
    assert all(method["ratio_to_plain"] is None for method in report["methods"].values())
    assert report["methods"]["vanilla-stop"]["ratio_to_autoregressive"] > 0
    benchmark.outputs[0] = [*benchmark.outputs[0][:-1], 40]  # another output
    benchmark.measure(benchmark.measurements["vanilla-stop"], 0)
    assert "1 outputs differ from autoregressive's" in markdown(build(benchmark, {}, interrupted=False))


def test_single_method_is_not_compared(pair):
    benchmark = Benchmark(
        pair, [("a", prompt(length=7))], Plan(("autoregressive",), max_new_tokens=4, stream_prompts=0, repeat=3)
    )
    benchmark.run()
    report = build(benchmark, {}, interrupted=False)
    assert "only one method ran" in markdown(report)
    assert [len(entry["seconds"]) for entry in report["methods"]["autoregressive"]["prompts"]] == [3]


def test_reasons_are_shown_when_nothing_starts(target, draft):
    broken = copy.deepcopy(draft)
    broken.register_forward_pre_hook(_refuse)
    pair = Pair(specbranch(copy.deepcopy(target)), broken, None)
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("assisted",), max_new_tokens=4))
    benchmark.run()
    console = Console(file=io.StringIO(), width=100)
    print_report(build(benchmark, {}, interrupted=False), console)
    printed = console.file.getvalue()
    assert "nothing was measured" in printed and "assisted is left out, it failed: RuntimeError" in printed


def test_default_without_a_draft_is_given_none():
    methods = fixed_methods(("no-draft", "auto"), Overrides(), None)
    assert not methods["no-draft"].drafts and methods["auto"].drafts
    assert methods["no-draft"].settings.policy == "auto"  # lookup too, unlike the method "autoregressive"


@pytest.mark.slow
def test_sampled_texts_are_reproducible_and_not_compared(pair):
    texts = []
    for temperature in (0.0, 2.0, 2.0):
        plan = Plan(
            ("plain", "vanilla-stop"),
            Overrides(max_draft_length=2),
            NEW_TOKENS,
            stream_prompts=0,
            temperature=temperature,
        )
        benchmark = Benchmark(pair, [("p", prompt())], plan)
        benchmark.run()
        texts.append(benchmark.outputs[0])
        report = build(benchmark, {"temperature": temperature}, interrupted=False)
        compared = not any("not compared" in line for line in lines(report))
        assert compared == (temperature == 0) and not report["differences"]["outputs"]
    assert texts[0] != texts[1] == texts[2]


def test_progress_counts_all_generations(finished):
    _, _, (progress, expected) = finished
    assert progress.generations == expected
    assert "specbranch-best, sweep, draft length 3" in progress.steps and "lookup, prompt 2 of 2" in progress.steps


def test_duration_is_estimated_per_method(finished):
    benchmark, report, (progress, _) = finished
    assert len(progress.lines) == 1 and progress.lines[0].startswith("all methods have started; measuring takes about")
    assert all(f"{name} " in progress.lines[0] for name in RUNNABLE)
    for method in report["methods"].values():
        measured = sum(seconds for entry in method["prompts"] for seconds in entry["seconds"])
        assert method["seconds_spent"] > measured and method["seconds_per_generation"] > 0


def test_unexpected_runtime_is_reported(finished):
    benchmark, report, _ = finished
    assert report["warnings"] == [] and report["methods"]["specbranch"]["runtime"] == "eager"
    assert complaints("specbranch", "eager", "", wanted="graph") == ['specbranch ran with runtime "eager", not "graph"']
    slowed = complaints("specbranch", "graph", "a hook runs on the host", wanted="graph")
    assert slowed == ["specbranch was driven step by step from the host: a hook runs on the host"]
    assert "- warning: too slow" in markdown({**report, "warnings": ["too slow"]})
    assert [Overrides(runtime=runtime).expected_runtime("cuda") for runtime in ("auto", "eager")] == [
        "graph",
        "eager",
    ]


def test_uncaptured_methods_start_with_few_tokens(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "autoregressive"), max_new_tokens=24))
    benchmark.start_all()
    for name, found in benchmark.measurements.items():
        assert found.warm_up_seconds(0) == found.first_seconds - found.second_seconds
        assert benchmark.spent[name] == pytest.approx(found.first_seconds + found.second_seconds)


def test_transformers_methods_have_no_draft_figures(finished):
    _, report, _ = finished
    for method in report["methods"].values():
        assert set(COLUMNS) <= set(method)
        assert method["tokens_per_second"] > 0 and method["time_to_first_token_ms"] > 0 and method["gap_p95_ms"] > 0
        assert (method["mean_acceptance_length"] is None) == (method["settings"] is None)
        assert method["peak_memory_gib"] is None  # no CUDA here
    assert report["methods"]["autoregressive"]["rollback_rate"] is None


def test_rates_are_pooled_over_prompts(finished):
    _, report, _ = finished
    method = report["methods"]["specbranch"]
    stats = [entry["stats"] for entry in method["prompts"]]
    total = {name: sum(entry[name] for entry in stats) for name in stats[0] if isinstance(stats[0][name], (int, float))}
    rolled, accepted = total["rollback_tokens"], total["num_accepted_tokens"]
    assert method["rollback_rate"] == pytest.approx(rolled / (rolled + accepted))
    assert method["mean_acceptance_length"] == pytest.approx(total["new_tokens"] / total["row_passes"])
    assert method["wasted_per_token"] == pytest.approx(total["wasted_branch_tokens"] / total["new_tokens"])
    assert sum(method["acceptance_histogram"]) == total["num_drafts"]


def test_ratios_compare_the_same_prompt(finished):
    _, report, _ = finished
    plain, ours = (report["methods"][name] for name in ("plain", "vanilla-stop"))
    ratios = [
        mine["tokens_per_second"] / theirs["tokens_per_second"]
        for mine, theirs in zip(ours["prompts"], plain["prompts"])
    ]
    assert ours["ratio_to_plain"] == pytest.approx(sum(ratios) / 2)
    assert plain["ratio_to_plain"] == report["methods"]["autoregressive"]["ratio_to_autoregressive"] == 1.0


def test_sweep_takes_the_fastest_length(finished):
    _, report, _ = finished
    for name in ("vanilla-best", "pearl-best", "specbranch-best"):
        tried = report["sweeps"][name]
        assert [entry["max_draft_length"] for entry in tried] == [1, 3]
        best = max(tried, key=lambda entry: entry["tokens_per_second"])
        assert report["methods"][name]["settings"]["max_draft_length"] == best["max_draft_length"]
    assert report["methods"]["vanilla-best"]["settings"]["confidence_threshold"] == 0.0


def test_overrides_reach_our_methods(finished):
    _, report, _ = finished
    assert report["methods"]["specbranch"]["settings"]["max_draft_length"] == 4
    assert report["methods"]["specbranch-one-branch"]["settings"]["max_branches"] == 1
    assert report["methods"]["specbranch-no-overlap"]["settings"]["overlap"] is False
    if "assisted" in RUNNABLE:
        assert report["methods"]["assisted"]["arguments"]["num_assistant_tokens"] == 4
    assert report["methods"]["specbranch-head"]["length_head"] is True


def test_draft_generation_config_is_restored(pair):
    method = Method("assisted", drafts=True, draft_settings={"num_assistant_tokens": 3})
    with method.prepared(pair) as arguments:
        assert pair.draft.generation_config.num_assistant_tokens == 3 and arguments["specbranch"] is False
    assert pair.draft.generation_config.num_assistant_tokens is None


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal(finished, width):
    _, report, _ = finished
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    for name, method in report["methods"].items():
        assert re.search(rf"^{name} .*{method['tokens_per_second']:.1f}", printed, re.MULTILINE), name


def test_markdown_table_is_complete(finished):
    _, report, _ = finished
    rows = [line for line in markdown(report).splitlines() if line.startswith("|")]
    assert len(rows) == len(RUNNABLE) + 2
    assert {row.count("|") for row in rows} == {len(COLUMNS) + 2}


def test_margin_of_a_differing_output(pair):
    ids = prompt(length=9)["input_ids"]
    plain = pair.target.generate(ids, max_new_tokens=8, do_sample=False, specbranch=False)[0, 9:].tolist()
    logits = pair.target(torch.cat([ids, torch.tensor([plain[:3]])], 1)).logits[0, -1].detach()
    second = int(logits.topk(2).indices[1])
    other = [*plain[:3], second, *plain[4:]]
    found = difference(pair.target, "specbranch", "p", ids, plain, other)
    assert (found.position, found.expected_token, found.token, found.rank) == (3, plain[3], second, 1)
    expected = float(logits[plain[3]] - logits[second])
    assert found.margin == pytest.approx(expected, abs=1e-4) and found.margin > 0
    assert found.margin_float32 == pytest.approx(expected, abs=1e-4)
    assert found.spacing == pytest.approx(float(logits.max().abs()) * 2**-23, rel=1.0)
    assert summarize([found])["largest_margin"] == pytest.approx(expected, abs=1e-4)


def test_shorter_output_has_no_margin(pair):
    ids = prompt(length=5)["input_ids"]
    assert difference(pair.target, "method", "p", ids, [4, 5], [4, 5]) is None
    ended = difference(pair.target, "method", "p", ids, [4, 5], [4])
    assert (ended.position, ended.expected_token, ended.token, ended.margin) == (1, 5, None, None)
    assert summarize([ended])["without_margin"] == 1
    assert first_difference([4], [9, 1]) == 0


def test_differing_output_is_reported(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "autoregressive"), max_new_tokens=6))
    benchmark.start_all()
    benchmark.measure(benchmark.measurements["plain"], 0)
    benchmark.outputs[0] = [*benchmark.outputs[0][:-1], 40]  # another output of plain generate()
    benchmark.measure(benchmark.measurements["autoregressive"], 0)
    report = build(benchmark, {}, interrupted=False)
    assert report["methods"]["autoregressive"]["differing_outputs"] == report["differences"]["outputs"] == 1
    assert report["differences"]["each"][0]["position"] == 5
    assert "1 outputs differ" in markdown(report)


def test_failing_method_is_left_out_and_named(target, draft):
    broken = copy.deepcopy(draft)
    broken.register_forward_pre_hook(_refuse)
    pair = Pair(specbranch(copy.deepcopy(target)), broken, None)
    benchmark = Benchmark(
        pair, [("a", prompt(length=7))], Plan(("plain", "assisted", "autoregressive"), max_new_tokens=4)
    )
    benchmark.run()
    report = build(benchmark, {}, interrupted=False)
    assert list(report["methods"]) == ["plain", "autoregressive"]
    assert "assisted is left out, it failed: RuntimeError: out of order" in markdown(report)


def _refuse(*_):
    raise RuntimeError("out of order")


def test_gaps_are_zero_within_a_round():
    streamer = TimingStreamer()
    for tokens in ([1, 2, 3], [4], [5, 6]):  # the first is the prompt
        streamer.put(torch.tensor(tokens))
    gaps = streamer.gaps()
    assert len(gaps) == 2 and gaps[0] > 0 and gaps[1] == 0
    assert (
        percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([1.0, 5.0], 0.95) == 5.0 and percentile([], 0.5) is None
    )


def test_pooled_histograms_of_different_lengths():
    first = SpecBranchStats(acceptance_histogram=[1, 0, 1])
    second = SpecBranchStats(acceptance_histogram=[0, 0, 1, 0, 1])
    assert pooled([first, second]).acceptance_histogram == [1, 0, 2, 0, 1]
    assert pooled([]) is None


@pytest.mark.parametrize("match_size", [4, 0])
def test_grown_head_gives_the_same_predictions(target, draft, match_size):
    head = random_head(target, draft, match_size=match_size, num_layers=2, drafted_tokens=3)
    twins = [grow(model, Shape(64, 3, 8, 4, 128)) for model in (target, draft)]
    grown = grow_head(head, *twins)
    grown.check_pair(*twins)
    blocks = torch.randn(5, 2 + 1 + 3, 32)  # states and embeddings
    rest = torch.rand(5, head.config.input_size - 6 * 32)
    wider = torch.nn.functional.pad(blocks, (0, 32))
    small, large = (torch.cat([states.flatten(1), rest], 1) for states in (blocks, wider))
    torch.testing.assert_close(grown(large), head(small))


# ---- the command


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "--threads", "1", *map(str, arguments)])


def test_command_writes_all_files(tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown", "png")}
    written = [part for name, path in files.items() for part in (f"--{name}", path)]
    methods = "lookup,vanilla-best,specbranch-head"
    done = run("--methods", methods, "--num-prompts", 1, "--max-new-tokens", 6, "--sweep", "2", *written)
    assert done.exit_code == 0, done.output
    report = json.loads(files["json"].read_text())
    assert list(report["methods"]) == ["lookup", "vanilla-best", "specbranch-head"]
    assert report["differences"]["outputs"] == 0 and not report["interrupted"]
    assert report["versions"]["torch"] == version("torch") and report["settings"]["max_new_tokens"] == 6
    assert "| vanilla-best |" in files["markdown"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "all outputs equal lookup's" in done.output and "sweep for vanilla-best" in done.output


@pytest.mark.slow
def test_grown_pair_runs_with_its_head(tmp_path):
    done = run(
        "--draft", "weak", "--grow", "160m:68m", "--methods", "plain,specbranch-head", "--num-prompts", 1,
        "--max-new-tokens", 4, "--json", tmp_path / "b.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["memory"]["target_weights"] > 4 * 100e6
    assert list(report["methods"]) == ["plain", "specbranch-head"] and report["differences"]["outputs"] == 0


def test_capturing_generation_is_repeated(pair, monkeypatch):
    """Up to three times; the last one counts."""
    captured, real = [], measure.generate_once

    def generate_once(pair, method, inputs, *arguments):
        found = real(pair, method, inputs, *arguments)
        found.stats.graphs_captured = captured.pop() if captured and method.name == "vanilla-stop" else 0
        return found

    monkeypatch.setattr(measure, "generate_once", generate_once)
    plan = Plan(("autoregressive", "vanilla-stop"), max_new_tokens=4, stream_prompts=0)
    progress = RecordedProgress()
    benchmark = Benchmark(pair, [(name, prompt(length=7, seed=seed)) for seed, name in enumerate("ab")], plan, progress)
    benchmark.start_all()
    benchmark.warm_up()
    for again, counts in enumerate([[1, 2], [1, 2, 3, 4]]):
        captured[:] = counts
        benchmark.measure(benchmark.measurements["vanilla-stop"], again)
        assert len(captured) == max(0, len(counts) - 3)
    report = build(benchmark, {}, interrupted=True)
    assert "vanilla-stop captured graphs in 4 measured generations, which were repeated" in lines(report)
    found = report["methods"]["vanilla-stop"]
    assert [len(entry["seconds"]) for entry in found["prompts"]] == [1, 1]
    assert found["overall_tokens_per_second"] == pytest.approx(8 / sum(e["seconds"][0] for e in found["prompts"]))
    assert progress.generations == benchmark.generations - 2  # the other method has measured nothing


def test_interrupted_run_compares_common_prompts(pair):
    plan = Plan(("autoregressive", "vanilla-stop"), max_new_tokens=4, stream_prompts=0)
    benchmark = Benchmark(pair, [(name, prompt(length=7, seed=seed)) for seed, name in enumerate("abc")], plan)
    measure, calls = benchmark.measure, []

    def measure_five(*arguments):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(measure(*arguments))

    benchmark.measure = measure_five
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    before = [list(found.prompts) for found in benchmark.measurements.values()]
    benchmark.even_out()
    report = build(benchmark, {}, interrupted=True)
    assert before == [[0, 1, 2], [0, 1]]
    assert [[entry["id"] for entry in method["prompts"]] for method in report["methods"].values()] == [["a", "b"]] * 2
    assert "over 2 prompts" in markdown(report)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "timeout"])
def test_interrupted_run_writes_what_is_measured(stop, code, tmp_path):
    calls = []

    def interrupt(module, *_):
        calls.append(module)
        if len(calls) == 4000:
            signal.raise_signal(stop)

    hook = torch.nn.modules.module.register_module_forward_hook(interrupt)
    try:
        done = run("--methods", "plain,autoregressive", "--max-new-tokens", 4, "--json", tmp_path / "b.json")
    finally:
        hook.remove()
    assert done.exit_code == code, done.output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as it was
    assert "interrupted" in done.output
    report = json.loads((tmp_path / "b.json").read_text())
    measured = [len(method["prompts"]) for method in report["methods"].values()]
    assert report["interrupted"] and 0 < sum(measured) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "plain,warp"], "unknown methods warp: expected some of plain, static"),
        (["--methods", ","], "no methods are named: expected some of plain, static"),
        (["--sweep", "2,x"], "--sweep 2,x: expected whole numbers"),
        (["--sweep", ""], "--sweep is empty"),
        (["--grow", "7b"], "--grow 7b: expected the target's shape and the draft's"),
        (["--grow", "7b:9z"], "unknown shape '9z'"),
        (["--runtime", "warp"], "--runtime warp: expected one of"),
        (["--dtype", "warp"], "--dtype warp: expected one of auto, float32"),
        (["--device", "toaster"], "--device toaster: expected cpu, cuda"),
        (["--draft", "other"], "--draft other without --target"),
        (["--prompts", "nowhere.jsonl"], "no prompt file at nowhere.jsonl"),
        (["--json", "no/such/folder/b.json"], "--json no/such/folder/b.json: expected a file in a folder that exists"),
        (["--json", "a" * 300], "a" * 300 + ": it cannot be written"),
        (["--round-cost", "5000"], "--round-cost was removed: see examples/benchmarks/latency.py"),
        (["--length-head", "/no/head/here"], "/no/head/here"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    done = run("--num-prompts", 1, *arguments)
    assert isinstance(done.exception, (ValueError, OSError)), done.output
    assert message in str(done.exception)
    assert "tok/s" not in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_missing_device_is_refused():
    assert "torch sees no CUDA device" in str(run("--device", "cuda").exception)


def test_help_names_every_method():
    done = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0 and "hf-specbranch bench --grow 7b:68m" in done.output
    flat = re.sub(r"\s+", " ", done.output)
    assert all(f"{name}:" in flat for name in METHODS)


def test_head_of_another_pair_is_refused(tmp_path, target, draft):
    random_head(target, draft).save_pretrained(tmp_path / "head")
    assert "does not fit this pair" in str(run("--length-head", tmp_path / "head").exception)


def test_demo_heads_fit_their_pairs():
    *models, _, head = load_demo_pair(draft="weak", head=True)
    head.check_pair(*models)


def test_old_method_name_is_accepted_with_a_warning(tmp_path):
    done = run(
        "--methods", "specbranch-outcomes", "--num-prompts", 1, "--max-new-tokens", 2, "--json", tmp_path / "b.json"
    )
    assert "warning: method specbranch-outcomes is now specbranch-rejections" in done.output
    assert list(json.loads((tmp_path / "b.json").read_text())["methods"]) == ["specbranch-rejections"]
