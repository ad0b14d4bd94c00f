"""`hf-specbranch bench` compares ways that give the same tokens, and its figures follow from what it ran."""

import copy
import io
import json
import re
import signal
from statistics import median

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_specbranch import SpecBranchStats, load_demo_pair, specbranch
from hf_specbranch.bench import Shape, grow, limit, measure
from hf_specbranch.bench.differences import difference, first_difference, summary
from hf_specbranch.bench.findings import pooled
from hf_specbranch.bench.further import Further
from hf_specbranch.bench.grow_head import grow_head
from hf_specbranch.bench.limit import distance_to_limit, weight_bytes
from hf_specbranch.bench.measure import Benchmark, Plan, Progress, complaints
from hf_specbranch.bench.predictions import predictions
from hf_specbranch.bench.report import build
from hf_specbranch.bench.tables import GROUPS, lines, markdown, print_report
from hf_specbranch.bench.timing import TimingStreamer, percentile
from hf_specbranch.bench.ways import TITLES, Choices, Pair, Way, check_names
from hf_specbranch.cli import app

from .families import make
from .heads import random_head
from .models import llama, prompt

COLUMNS = [column.key for group in GROUPS for column in group]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def pair(target, draft):
    return Pair(specbranch(copy.deepcopy(target)), copy.deepcopy(draft), None, random_head(target, draft))


@pytest.fixture(scope="module")
def finished(pair):
    """All ways on two prompts of the tiny pair, and how many generations that took."""
    prompts = [(f"p{length}", prompt(length=length, seed=length)) for length in (7, 12)]
    few = dict(repeat=2, sweep=(1, 3), sweep_epsilon=(0.1,), sweep_prompts=1, stream_prompts=1)
    plan = Plan(check_names(tuple(TITLES)), Choices(gamma=4), NEW_TOKENS, **few)
    heard = Heard()
    benchmark = Benchmark(pair, prompts, plan, heard)
    expected = benchmark.generations
    benchmark.run()
    report = build(benchmark, {"seed": 0}, {"predictions": predictions(benchmark)}, interrupted=False)
    return benchmark, report, (heard, expected)


class Heard(Progress):
    """Remembers what it was told."""

    def __init__(self):
        self.generations, self.deeds, self.lines = 0, [], []

    def advance(self):
        self.generations += 1

    def doing(self, what):
        self.deeds.append(what)

    def say(self, line):
        self.lines.append(line)


def test_every_way_runs_and_gives_the_tokens_of_plain_generate(finished):
    benchmark, report, _ = finished
    assert list(report["ways"]) == list(TITLES)
    assert report["differences"]["outputs"] == 0
    assert {len(way["prompts"]) for way in report["ways"].values()} == {2}
    assert {len(entry["seconds"]) for way in report["ways"].values() for entry in way["prompts"]} == {2}


def test_without_plain_generate_the_first_way_is_what_all_are_compared_with(pair):
    plan = Plan(check_names(("vanilla-stop", "autoregressive")), new_tokens=6, stream_prompts=0)
    benchmark = Benchmark(pair, [("a", prompt(length=7))], plan)
    benchmark.run()
    report = build(benchmark, {}, {"predictions": predictions(benchmark)}, interrupted=False)
    assert list(report["ways"]) == ["autoregressive", "vanilla-stop"] and "plain" not in benchmark.spent
    assert report["compared_with"] == "autoregressive" and "all outputs equal autoregressive's" in lines(report)
    assert all(way["ratio_to_plain"] is None for way in report["ways"].values())
    assert report["ways"]["vanilla-stop"]["ratio_to_autoregressive"] > 0
    benchmark.outputs[0] = [*benchmark.outputs[0][:-1], 40]  # as if it had said something else
    benchmark.measure(benchmark.measurements["vanilla-stop"], 0)
    assert "1 outputs differ from autoregressive's" in markdown(build(benchmark, {}, {}, interrupted=False))


def test_a_way_alone_is_compared_with_nothing(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("autoregressive",), new_tokens=4, stream_prompts=0))
    benchmark.run()
    assert "compared with no other's" in markdown(build(benchmark, {}, {}, interrupted=False))


def test_where_no_way_could_start_the_reasons_are_shown(target, draft):
    broken = copy.deepcopy(draft)
    broken.register_forward_pre_hook(_refuse)
    pair = Pair(specbranch(copy.deepcopy(target)), broken, None)
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("assisted",), new_tokens=4))
    benchmark.run()
    console = Console(file=io.StringIO(), width=100)
    print_report(build(benchmark, {}, {}, interrupted=False), console)
    printed = console.file.getvalue()
    assert "nothing was measured" in printed and "assisted is left out, it failed: RuntimeError" in printed


def test_sampled_texts_are_drawn_again_the_same_and_not_compared(pair):
    texts = []
    for temperature in (0.0, 2.0, 2.0):
        plan = Plan(("plain", "vanilla-stop"), Choices(gamma=2), NEW_TOKENS, stream_prompts=0, temperature=temperature)
        benchmark = Benchmark(pair, [("p", prompt())], plan)
        benchmark.run()
        texts.append(benchmark.outputs[0])
        report = build(benchmark, {"temperature": temperature}, {}, interrupted=False)
        compared = not any("not compared" in line for line in lines(report))
        assert compared == (temperature == 0) and not report["differences"]["outputs"]
    assert texts[0] != texts[1] == texts[2]


def test_the_progress_bar_knows_how_many_generations_there_are(finished):
    _, _, (heard, expected) = finished
    assert heard.generations == expected
    assert "specbranch-best, sweep, drafts of 3" in heard.deeds and "lookup, prompt 2 of 2" in heard.deeds


def test_it_is_told_how_long_each_way_will_take(finished):
    benchmark, report, (heard, _) = finished
    assert len(heard.lines) == 1 and heard.lines[0].startswith("started; what is measured now takes about")
    assert all(f"{name} " in heard.lines[0] for name in TITLES)
    for way in report["ways"].values():
        measured = sum(seconds for entry in way["prompts"] for seconds in entry["seconds"])
        assert way["seconds_spent"] > measured and way["seconds_per_generation"] > 0


def test_our_ways_are_predicted_from_each_other_and_the_error_is_reported(finished):
    _, report, _ = finished
    found = report["predictions"]
    ours = [name for name, way in report["ways"].items() if way["settings"] and name not in ("auto", "specbranch-head")]
    assert list(found["ways"]) == ours
    for name, way in found["ways"].items():
        assert way["measured"]["tokens_per_pass"] == report["ways"][name]["mean_acceptance_length"]
        assert way["predicted"]["tokens_per_pass"] == pytest.approx(way["measured"]["tokens_per_pass"], rel=0.15)
        speeds = [
            (entry["new_tokens"] - 1) / median(entry["decode_seconds"]) for entry in report["ways"][name]["prompts"]
        ]
        assert way["measured"]["tokens_per_second"] == pytest.approx(median(speeds))
        assert way["predicted"]["tokens_per_second"] > 0 and way["error"]["tokens_per_second"] > -1
    assert found["median_error"]["tokens_per_pass"] < 0.05
    assert "predicted by replay" in markdown(report) and found["costs"]["target_pass_ms"] > 0
    lengths = [entry["max_draft_length"] for entry in found["by_length"]["vanilla-best"]]
    assert lengths == [1, 3] and all(
        entry["predicted"] > 0 < entry["measured"] for entry in found["by_length"]["pearl-best"]
    )


def test_too_few_of_our_ways_predict_nothing(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "autoregressive"), new_tokens=6))
    benchmark.run()
    assert predictions(benchmark) is None


def test_a_way_that_did_not_run_as_asked_is_complained_about(finished):
    benchmark, report, _ = finished
    assert report["warnings"] == [] and report["ways"]["specbranch"]["runtime"] == "eager"
    assert complaints("specbranch", "eager", "", wanted="graph") == ['specbranch ran with runtime "eager", not "graph"']
    slowed = complaints("specbranch", "graph", "a hook runs on the host", wanted="graph")
    assert slowed == ["specbranch was driven step by step from the host: a hook runs on the host"]
    assert "- warning: too slow" in markdown({**report, "warnings": ["too slow"]})
    assert [Choices(runtime=runtime).expected_runtime("cuda") for runtime in ("auto", "eager")] == [
        "graph",
        "eager",
    ]


def test_ways_that_capture_nothing_start_with_a_few_tokens(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "autoregressive"), new_tokens=24))
    benchmark.start_all()
    for name, found in benchmark.measurements.items():
        assert found.warm_up_seconds(0) == found.first_seconds - found.second_seconds
        assert benchmark.spent[name] == pytest.approx(found.first_seconds + found.second_seconds)


def test_every_column_is_there_and_transformers_ways_have_no_draft_figures(finished):
    _, report, _ = finished
    for way in report["ways"].values():
        assert set(COLUMNS) <= set(way)
        assert way["tokens_per_second"] > 0 and way["time_to_first_token_ms"] > 0 and way["gap_p95_ms"] > 0
        assert (way["mean_acceptance_length"] is None) == (way["settings"] is None)
        assert way["peak_memory_gib"] is None  # no CUDA here
    assert report["ways"]["autoregressive"]["rollback_rate"] is None


def test_rates_are_those_of_all_prompts_together(finished):
    _, report, _ = finished
    way = report["ways"]["specbranch"]
    stats = [entry["stats"] for entry in way["prompts"]]
    total = {name: sum(entry[name] for entry in stats) for name in stats[0] if isinstance(stats[0][name], (int, float))}
    rolled, accepted = total["rollback_tokens"], total["num_accepted_tokens"]
    assert way["rollback_rate"] == pytest.approx(rolled / (rolled + accepted))
    assert way["mean_acceptance_length"] == pytest.approx(total["new_tokens"] / total["row_passes"])
    assert way["wasted_per_token"] == pytest.approx(total["wasted_branch_tokens"] / total["new_tokens"])
    assert sum(way["acceptance_histogram"]) == total["num_drafts"]


def test_ratios_are_taken_within_a_prompt(finished):
    _, report, _ = finished
    plain, ours = (report["ways"][name] for name in ("plain", "vanilla-stop"))
    ratios = [
        mine["tokens_per_second"] / theirs["tokens_per_second"]
        for mine, theirs in zip(ours["prompts"], plain["prompts"])
    ]
    assert ours["ratio_to_plain"] == pytest.approx(sum(ratios) / 2)
    assert plain["ratio_to_plain"] == report["ways"]["autoregressive"]["ratio_to_autoregressive"] == 1.0


def test_a_sweep_takes_the_fastest_length_and_fixed_lengths_never_stop(finished):
    _, report, _ = finished
    for name in ("vanilla-best", "pearl-best", "specbranch-best"):
        tried = report["sweeps"][name]
        assert [entry["max_draft_length"] for entry in tried] == [1, 3]
        best = max(tried, key=lambda entry: entry["tokens_per_second"])
        assert report["ways"][name]["settings"]["max_draft_length"] == best["max_draft_length"]
    assert report["ways"]["vanilla-best"]["settings"]["confidence_threshold"] == 0.0
    assert report["ways"]["specbranch-best"]["settings"]["confidence_threshold"] == 0.1


def test_what_the_user_sets_reaches_our_ways(finished):
    _, report, _ = finished
    assert report["ways"]["specbranch"]["settings"]["max_draft_length"] == 4
    assert report["ways"]["specbranch-one-branch"]["settings"]["max_branches"] == 1
    assert report["ways"]["specbranch-no-overlap"]["settings"]["overlap"] is False
    assert report["ways"]["assisted"]["arguments"]["num_assistant_tokens"] == 4
    assert report["ways"]["specbranch-head"]["head"] is True


def test_transformers_draft_settings_are_put_back(pair):
    way = Way("assisted", drafts=True, draft_settings={"num_assistant_tokens": 3})
    with way.prepared(pair) as arguments:
        assert pair.draft.generation_config.num_assistant_tokens == 3 and arguments["specbranch"] is False
    assert pair.draft.generation_config.num_assistant_tokens is None


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal_and_cut_nothing(finished, width):
    _, report, _ = finished
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    for name, way in report["ways"].items():
        assert re.search(rf"^{name} .*{way['tokens_per_second']:.1f}", printed, re.MULTILINE), name


def test_markdown_has_a_row_for_each_way_and_a_cell_for_each_column(finished):
    _, report, _ = finished
    rows = [line for line in markdown(report).splitlines() if line.startswith("|")]
    assert len(rows) == len(TITLES) + 2
    assert {row.count("|") for row in rows} == {len(COLUMNS) + 2}


def test_the_margin_of_a_differing_output_is_that_of_the_models_logits(pair):
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
    assert summary([found])["largest_margin"] == pytest.approx(expected, abs=1e-4)


def test_equal_outputs_have_no_difference_and_a_shorter_one_no_margin(pair):
    ids = prompt(length=5)["input_ids"]
    assert difference(pair.target, "way", "p", ids, [4, 5], [4, 5]) is None
    ended = difference(pair.target, "way", "p", ids, [4, 5], [4])
    assert (ended.position, ended.expected_token, ended.token, ended.margin) == (1, 5, None, None)
    assert summary([ended])["without_margin"] == 1
    assert first_difference([4], [9, 1]) == 0


def test_a_way_that_gives_other_tokens_is_reported(pair):
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "autoregressive"), new_tokens=6))
    benchmark.start_all()
    benchmark.measure(benchmark.measurements["plain"], 0)
    benchmark.outputs[0] = [*benchmark.outputs[0][:-1], 40]  # as if plain generate() had said something else
    benchmark.measure(benchmark.measurements["autoregressive"], 0)
    report = build(benchmark, {}, {}, interrupted=False)
    assert report["ways"]["autoregressive"]["differing_outputs"] == report["differences"]["outputs"] == 1
    assert report["differences"]["each"][0]["position"] == 5
    assert "1 outputs differ" in markdown(report)


def test_a_way_that_cannot_start_is_left_out_and_named(target, draft):
    broken = copy.deepcopy(draft)
    broken.register_forward_pre_hook(_refuse)
    pair = Pair(specbranch(copy.deepcopy(target)), broken, None)
    benchmark = Benchmark(pair, [("a", prompt(length=7))], Plan(("plain", "assisted", "autoregressive"), new_tokens=4))
    benchmark.run()
    report = build(benchmark, {}, {}, interrupted=False)
    assert list(report["ways"]) == ["plain", "autoregressive"]
    assert "assisted is left out, it failed: RuntimeError: out of order" in markdown(report)


def _refuse(*_):
    raise RuntimeError("out of order")


def test_weights_are_counted_without_the_embedding_table_unless_it_is_the_output_layer():
    table = 48 * 32 * 4
    untied, tied = llama(0), llama(0, tie_word_embeddings=True)
    everything = sum(weight.numel() * 4 for weight in untied.parameters())
    assert weight_bytes(untied) == everything - table
    assert weight_bytes(tied) == everything - table


def test_the_distance_to_the_limit_is_the_time_of_a_pass_over_that_of_reading_the_weights(pair):
    found = distance_to_limit(pair.target, (16, 64), "auto")  # caches are made in steps of 64
    assert found["limit_ms"] == pytest.approx(1000 * found["weight_bytes"] / found["copy_bytes_per_second"])
    assert [(entry["context"], entry["tokens"]) for entry in found["passes"]] == [(16, 1), (16, 8), (64, 1), (64, 8)]
    for entry in found["passes"]:
        assert entry["times_the_limit"] == pytest.approx(entry["ms"] / found["limit_ms"])


def test_a_draft_step_is_what_a_longer_stage_takes_more(pair, monkeypatch):
    masks, stages = [], []

    def timed(work, *_):
        masks.clear()
        work()
        stages.append(len(masks))
        return [3.0 + 0.5 * len(masks)]

    monkeypatch.setattr(limit, "timed", timed)
    monkeypatch.setattr(limit, "copy_bandwidth", lambda _: 2.0 * weight_bytes(pair.draft))
    hook = pair.draft.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    try:
        found = limit.draft_steps(pair.draft, 16, "eager")
    finally:
        hook.remove()
    assert stages == [2, 6, 2, 6]
    assert masks[0][0, 0, :, :24].tolist() == [
        [slot < 16 or slot == 16 + own for slot in range(24)] for own in range(4)
    ]
    assert [(entry["branches"], entry["ms"]) for entry in found["steps"]] == [(1, 500.0), (4, 500.0)]
    assert found["limit_ms"] == 500.0 and found["steps"][0]["times_the_limit"] == 1.0


def test_further_measurements_are_taken_and_printed(pair, finished):
    benchmark, report, _ = finished
    found = {}
    further = Further(pass_at=(8,), first_token_at=30, round_cost_at=(238, 244), stability_runs=3, repeats=1)
    further = further._replace(kernels_alone=True)
    further.check(pair)
    further.run(pair, benchmark.inputs, benchmark.plan, found)
    assert found["time_to_first_token"]["prompt_tokens"] == 30 and found["time_to_first_token"]["ratio"] > 0
    assert [row["context"] for row in found["round_cost"]] == [238, 244]
    speeds = found["stability"]["tokens_per_second"]
    assert len(speeds) == 3 and found["stability"]["ratio"] == pytest.approx(speeds[-1] / speeds[0])
    assert len(found["kernels"]) == 9 and all(min(line["us"], line["torch_us"]) > 0 for line in found["kernels"])
    text = markdown({**report, **found})
    assert "norm with residual: " in text and "product, down (" in text
    assert "a round at 244 tokens" in text and "3 runs" in text and "30-token prompt" in text and "limit:" in text
    assert "a draft step (auto) with 4 branches at 8 of context" in text
    assert "limit:" in (cut_short := markdown({**report, "limit": found["limit"]})) and "draft step" not in cut_short


def test_sizes_that_a_model_does_not_have_are_refused(pair):
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no intermediate_size in its config"):
        Further(kernels_alone=True).check(pair._replace(target=make("gpt2")))


def test_contexts_that_a_model_does_not_have_are_refused(pair):
    with pytest.raises(ValueError, match="255 tokens leaves no room for 8 more in the target's context of 256"):
        Further(round_cost_at=(255,)).check(pair)


def test_gaps_count_from_token_to_token_and_are_zero_within_a_round():
    streamer = TimingStreamer()
    for tokens in ([1, 2, 3], [4], [5, 6]):  # the first is the prompt
        streamer.put(torch.tensor(tokens))
    gaps = streamer.gaps()
    assert len(gaps) == 2 and gaps[0] > 0 and gaps[1] == 0
    assert (
        percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([1.0, 5.0], 0.95) == 5.0 and percentile([], 0.5) is None
    )


def test_pooled_statistics_add_up_histograms_of_different_lengths():
    first, second = SpecBranchStats(), SpecBranchStats()
    for stats, accepted in ((first, 0), (first, 2), (second, 2), (second, 4)):
        stats.count_acceptance(accepted)
    assert pooled([first, second]).acceptance_histogram == [1, 0, 2, 0, 1]
    assert pooled([]) is None


@pytest.mark.parametrize("match_size", [4, 0])
def test_a_grown_head_says_of_the_grown_pair_what_the_head_says_of_the_pair(target, draft, match_size):
    head = random_head(target, draft, match_size=match_size, num_layers=2, drafted_tokens=3)
    twins = [grow(model, Shape(64, 3, 8, 4, 128)) for model in (target, draft)]
    grown = grow_head(head, *twins)
    grown.check_pair(*twins)
    blocks = torch.randn(5, 2 + 1 + 3, 32)  # states and embeddings
    rest = torch.rand(5, head.config.input_size - 6 * 32)
    wider = torch.nn.functional.pad(blocks, (0, 32))
    small, large = (torch.cat([states.flatten(1), rest], 1) for states in (blocks, wider))
    torch.testing.assert_close(grown(large), head(small))


# The command


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "--threads", "1", *map(str, arguments)])


def test_the_command_writes_json_markdown_and_a_picture_for_the_embedded_pair(tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown", "png")}
    written = [part for name, path in files.items() for part in (f"--{name}", path)]
    ways = "lookup,vanilla-best,specbranch-head"
    done = run("--ways", ways, "--num-prompts", 1, "--new-tokens", 6, "--sweep", "2", "--pass-at", 32, *written)
    assert done.exit_code == 0, done.output
    report = json.loads(files["json"].read_text())
    assert list(report["ways"]) == ["lookup", "vanilla-best", "specbranch-head"]
    assert report["differences"]["outputs"] == 0 and not report["interrupted"]
    assert report["versions"]["torch"] == torch.__version__ and report["settings"]["new_tokens"] == 6
    assert report["limit"]["passes"][1]["tokens"] == 8
    assert "| vanilla-best |" in files["markdown"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "all outputs equal lookup's" in done.output and "sweep for vanilla-best" in done.output


@pytest.mark.slow
def test_a_grown_pair_runs_with_its_grown_head(tmp_path):
    done = run(
        "--draft", "weak", "--grow", "160m:68m", "--ways", "plain,specbranch-head", "--num-prompts", 1,
        "--new-tokens", 4, "--stream-prompts", 0, "--pass-at", "", "--json", tmp_path / "b.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["memory"]["target_weights"] > 4 * 100e6
    assert list(report["ways"]) == ["plain", "specbranch-head"] and report["differences"]["outputs"] == 0


def test_a_generation_in_which_graphs_were_captured_is_run_again(pair, monkeypatch):
    """As often as it takes, within reason; what counts is the last."""
    captured, real = [], measure.generate_once

    def generate_once(pair, way, inputs, *arguments):
        found = real(pair, way, inputs, *arguments)
        found.stats.graphs_captured = captured.pop() if captured and way.name == "vanilla-stop" else 0
        return found

    monkeypatch.setattr(measure, "generate_once", generate_once)
    plan = Plan(("autoregressive", "vanilla-stop"), new_tokens=4, stream_prompts=0)
    heard = Heard()
    benchmark = Benchmark(pair, [(name, prompt(length=7, seed=seed)) for seed, name in enumerate("ab")], plan, heard)
    benchmark.start_all()
    benchmark.warm_up()
    for again, counts in enumerate([[1, 2], [1, 2, 3, 4]]):
        captured[:] = counts
        benchmark.measure(benchmark.measurements["vanilla-stop"], again)
        assert len(captured) == max(0, len(counts) - 3)
    report = build(benchmark, {}, {}, interrupted=True)
    assert "vanilla-stop captured graphs in 4 measured generations, which were run again" in lines(report)
    found = report["ways"]["vanilla-stop"]
    assert [len(entry["seconds"]) for entry in found["prompts"]] == [1, 1]
    assert found["overall_tokens_per_second"] == pytest.approx(8 / sum(e["seconds"][0] for e in found["prompts"]))
    assert heard.generations == benchmark.generations - 2  # the other way has measured nothing


def test_of_a_run_cut_short_ways_are_compared_over_the_prompts_that_all_have_run(pair):
    plan = Plan(("autoregressive", "vanilla-stop"), new_tokens=4, stream_prompts=0)
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
    report = build(benchmark, {}, {}, interrupted=True)
    assert before == [[0, 1, 2], [0, 1]]
    assert [[entry["id"] for entry in way["prompts"]] for way in report["ways"].values()] == [["a", "b"]] * 2
    assert "over 2 prompts" in markdown(report)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "timeout"])
def test_a_run_cut_short_shows_and_writes_what_is_measured_so_far(stop, code, tmp_path):
    calls = []

    def interrupt(module, *_):
        calls.append(module)
        if len(calls) == 4000:
            signal.raise_signal(stop)

    hook = torch.nn.modules.module.register_module_forward_hook(interrupt)
    try:
        done = run("--ways", "plain,autoregressive", "--new-tokens", 4, "--json", tmp_path / "b.json")
    finally:
        hook.remove()
    assert done.exit_code == code, done.output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as it was
    assert "interrupted" in done.output
    report = json.loads((tmp_path / "b.json").read_text())
    measured = [len(way["prompts"]) for way in report["ways"].values()]
    assert report["interrupted"] and 0 < sum(measured) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "plain,warp"], "unknown ways warp: expected some of plain, static"),
        (["--ways", ","], "no ways are named: expected some of plain, static"),
        (["--sweep", "2,x"], "--sweep 2,x: expected whole numbers"),
        (["--sweep", ""], "--sweep is empty"),
        (["--sweep-epsilon", "0.2,3"], "--sweep-epsilon 0.2,3: expected numbers from 0 to 1"),
        (["--grow", "7b"], "--grow 7b: expected the target's shape and the draft's"),
        (["--grow", "7b:9z"], "unknown shape '9z'"),
        (["--runtime", "warp"], "--runtime warp: expected one of"),
        (["--dtype", "warp"], "dtype 'warp'"),
        (["--device", "toaster"], "--device toaster: expected cpu, cuda"),
        (["--draft", "other"], "--draft other without --target"),
        (["--prompts", "nowhere.jsonl"], "no prompt file at nowhere.jsonl"),
        (["--json", "no/such/folder/b.json"], "--json no/such/folder/b.json: expected a file in a folder that exists"),
        (["--json", "a" * 300], "a" * 300 + ": it cannot be written"),
        (["--round-cost", "5000"], "a prompt of 5000 tokens leaves no room"),
        (["--head", "/no/head/here"], "/no/head/here"),
    ],
)
def test_bad_input_is_refused_before_any_generation(arguments, message):
    done = run("--num-prompts", 1, *arguments)
    assert isinstance(done.exception, (ValueError, OSError)), done.output
    assert message in str(done.exception)
    assert "tok/s" not in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_not_there_is_refused():
    assert "torch sees no CUDA device" in str(run("--device", "cuda").exception)


def test_help_has_an_example_and_names_every_way():
    done = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0 and "hf-specbranch bench --grow 7b:68m" in done.output
    flat = re.sub(r"\s+", " ", done.output)
    assert all(f"{name}:" in flat for name in TITLES)


def test_a_head_for_another_pair_is_refused(tmp_path, target, draft):
    random_head(target, draft).save_pretrained(tmp_path / "head")
    assert "does not fit this pair" in str(run("--head", tmp_path / "head").exception)


def test_the_demo_heads_fit_their_pairs():
    *models, _, head = load_demo_pair(draft="weak", head=True)
    head.check_pair(*models)
