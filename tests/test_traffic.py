"""`hf-specbranch bench --traffic` replays changing lengths and batch sizes, and compares with steady state."""

import copy
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from hf_specbranch import SpecBranchMixin, SpecBranchStats, specbranch
from hf_specbranch.bench.measure import Progress
from hf_specbranch.bench.methods import Pair
from hf_specbranch.bench.results import Difference
from hf_specbranch.bench.traffic import (
    BATCHES,
    CHAT,
    CHAT_CACHED,
    MIXED,
    MIXED_AGAIN,
    REQUESTS,
    Item,
    TextSource,
    Traffic,
    inputs_of,
)
from hf_specbranch.bench.traffic_report import GROUPS, bars, build_traffic, is_tie, steady_time
from hf_specbranch.bench.traffic_run import TrafficBenchmark
from hf_specbranch.cli import app

from .models import VOCABULARY, prompt
from .tokens import LETTERS, letter_tokenizer

TEXTS = [LETTERS[at : at + 9] for at in range(0, 30, 3)]
SMALL = Traffic(6, 60, mixed=3, turns=4, batch_sizes=(1, 3, 1), requests=3, steady_runs=1, compared=1)


class Counter(Progress):
    def __init__(self):
        self.calls, self.lines = 0, []

    def advance(self):
        self.calls += 1

    def say(self, line):
        self.lines.append(line)


def small_pair(target, draft):
    return Pair(specbranch(copy.deepcopy(target)), copy.deepcopy(draft), letter_tokenizer(VOCABULARY))


@pytest.fixture(scope="module")
def finished(target, draft):
    """Small traffic with a target that often wants to end, and how many calls were made."""
    pair, counter = small_pair(target, draft), Counter()
    plain = target.generate(**prompt(), max_new_tokens=6, do_sample=False, eos_token_id=None)
    pair.target.generation_config.eos_token_id = plain[0, 8:].tolist()
    benchmark = TrafficBenchmark(pair, TEXTS, SMALL, progress=counter)
    benchmark.run()
    return benchmark, counter


@pytest.fixture
def replayed(finished):
    """The same, to be changed by a test."""
    benchmark = copy.copy(finished[0])
    # Items stay the same objects: steady times are found by them.
    benchmark.replays = {name: copy.copy(replay) for name, replay in benchmark.replays.items()}
    for replay in benchmark.replays.values():
        replay.calls = [copy.copy(call) for call in replay.calls]
        replay.differences = list(replay.differences)
    benchmark.steady = {item: copy.copy(call) for item, call in benchmark.steady.items()}
    return benchmark


def bar(benchmark, name):
    (found,) = [each for each in bars(benchmark) if name in each.name]
    return found


def test_default_traffic_is_the_documented_one():
    traffic = Traffic()
    lengths, turns = traffic.mixed_lengths(), traffic.chat_lengths()
    assert len(lengths) == 16 and (min(lengths), max(lengths)) == (50, 5000) and lengths != sorted(lengths)
    assert turns[0] == 200 and 3800 < turns[-1] <= 4000 and len(turns) == 16
    assert all(later - earlier > 128 for earlier, later in zip(turns, turns[1:]))
    assert [len(rows) for rows in traffic.batch_lengths()] == [1, 4, 1, 4, 2, 1, 8, 1]
    requests = traffic.request_lengths()
    assert len(requests) == 200 and {len(rows) for rows in requests} == {1, 2, 4, 8}
    assert len({rows[0] for rows in requests}) > 100 and max(map(max, requests)) <= 5000
    assert requests == Traffic().request_lengths() != Traffic(seed=1).request_lengths()


def test_prompts_have_exact_lengths_and_begin_as_the_tokenizer_says(target, draft):
    pair = small_pair(target, draft)
    pair.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    source = TextSource(pair, TEXTS, seed=3)
    prompts = [source.prompt(length) for length in (2, 60, 60, 777)]
    assert [len(tokens) for tokens in prompts] == [2, 60, 60, 777] and prompts[1] != prompts[2]
    assert all(tokens[0] == 1 and 1 not in tokens[1:] for tokens in prompts)
    again = TextSource(pair, TEXTS, seed=3)
    assert prompts == [again.prompt(length) for length in (2, 60, 60, 777)]


def test_rows_are_padded_on_the_left(target, draft):
    inputs = inputs_of(Item([[5, 6, 7], [8]]), small_pair(target, draft))
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_every_call_is_made_and_has_full_length(finished):
    benchmark, counter = finished
    assert counter.calls == benchmark.calls
    counts = {name: len(replay.calls) for name, replay in benchmark.replays.items()}
    assert list(counts.values()) == [3, 3, 4, 4, 3, 3, 3]
    calls = [call for replay in benchmark.replays.values() for call in replay.calls]
    assert {len(row) for call in calls for row in call.new} == {6}
    assert benchmark.pair.target.generation_config.eos_token_id is not None  # as it was
    assert not hasattr(benchmark.pair.target.generation_config, "specbranch")


def test_steady_time_is_of_the_same_text(finished):
    benchmark, _ = finished
    texts = {call.item: call.new for replay in benchmark.replays.values() for call in replay.calls}
    assert benchmark.steady and all(call.new == texts[item] for item, call in benchmark.steady.items())
    turns = {call.item for call in benchmark.replays[CHAT].calls}  # repeated as a chat, which reuses what it did
    assert turns < benchmark.steady.keys()
    assert not any(call.stats.reused_tokens for item, call in benchmark.steady.items() if item not in turns)


def test_another_text_counts_by_its_passes(replayed):
    """Rounding may change the text of a repetition, and so how much of it is accepted."""
    set_all(replayed, over=1.0)
    call = replayed.replays[CHAT].calls[2]
    steady = replayed.steady[call.item]
    steady.new = [[(token + 1) % VOCABULARY for token in row] for row in steady.new]
    call.stats, steady.stats = SpecBranchStats(target_forwards=6), SpecBranchStats(target_forwards=4)
    assert steady_time(replayed, call) == 1.5
    assert bar(replayed, "chat, slowest").met
    call.seconds = 1.8
    assert not bar(replayed, "chat, slowest").met


def test_steady_time_is_of_the_same_lengths(finished):
    benchmark, _ = finished
    for item, call in benchmark.steady.items():
        assert list(map(len, call.item.prompts)) == list(map(len, item.prompts))
        assert call.item.cached == item.cached
    first, again = (benchmark.replays[name].calls for name in (MIXED, MIXED_AGAIN))
    assert [call.item for call in first] == [call.item for call in again]


def test_chat_turns_hold_the_text_so_far(finished):
    benchmark, _ = finished
    for name in (CHAT, CHAT_CACHED):
        calls = benchmark.replays[name].calls
        for before, after in zip(calls, calls[1:]):
            text = before.item.prompts[0] + before.new[0]
            assert after.item.prompts[0][: len(text)] == text and len(after.item.prompts[0]) > len(text)
            assert after.item.cached == (len(text) - 1 if name == CHAT_CACHED else None)


def test_outputs_equal_plain_generate_and_faults_are_found(replayed):
    assert sum(replay.compared for replay in replayed.replays.values()) >= 7
    assert bar(replayed, "differ from plain").met
    replay = replayed.replays[MIXED]
    for call in replay.calls:
        call.new = [[*row[:3], (row[3] + 1) % VOCABULARY, *row[4:]] for row in call.new]
    replayed.compare(MIXED, replay)
    assert [found.position for found in replay.differences] == [3]
    assert not bar(replayed, "differ from plain").met


def test_near_ties_are_allowed_in_half_precision_only():
    near = Difference("auto", "a", 0, 4, 5, margin=0.125, spacing=0.125)
    far = Difference("auto", "a", 0, 4, 5, margin=2.0, spacing=0.125)
    ends = Difference("auto", "a", 0, None, 5)
    half = torch.bfloat16
    assert is_tie(near, half) and not is_tie(far, half) and not is_tie(ends, half) and not is_tie(near, torch.float32)


def set_all(benchmark, over=1.0):
    """Make every call last a second, `over` times its steady time."""
    for call in benchmark.steady.values():
        call.seconds = 1.0 / over
    for replay in benchmark.replays.values():
        for call in replay.calls:
            call.seconds = 1.0


def test_figures_follow_from_the_calls(replayed):
    set_all(replayed, over=1.25)
    replayed.replays[REQUESTS].calls[1].seconds = 3.0
    replayed.replays[REQUESTS].calls[1].stats = SpecBranchStats(
        graphs_captured=4, capture_seconds=0.5, reused_tokens=7, time_to_first_token=0.25
    )
    report = build_traffic(replayed, {}, interrupted=False)
    mixed, requests = report["kinds"][MIXED], report["kinds"][REQUESTS]
    assert mixed["ratio_to_steady"] == pytest.approx(1.25)
    assert mixed["tokens_per_second"] == pytest.approx(6) and mixed["steady_tokens_per_second"] == pytest.approx(7.5)
    assert requests["ratio_to_steady"] == pytest.approx(5 / 3 * 1.25)
    assert requests["slowest_seconds"] == 3.0 and requests["slowest_ratio"] == pytest.approx(3.75)
    assert (requests["graphs_captured"], requests["capture_seconds"], requests["reused_tokens"]) == (4, 0.5, 7)
    assert requests["first_token_p95_ms"] == 250
    assert len(requests["each"]) == 3 and requests["each"][1]["stats"]["decoding_seconds"] == 0.0
    assert json.loads(json.dumps(report)) is not None
    assert all(column.key in mixed for group in GROUPS for column in group)


def test_bars_are_those_of_the_calls_that_count(replayed):
    set_all(replayed)
    assert all(each.met for each in bars(replayed))
    assert bar(replayed, "mixed").value == 1 and bar(replayed, "batch sizes").value == 0
    replayed.replays[BATCHES].calls[1].seconds = 1.5  # the first batch of this size
    replayed.replays[CHAT].calls[1].seconds = 1.5  # the second turn
    replayed.replays[MIXED_AGAIN].calls[0].seconds = 9
    assert all(each.met for each in bars(replayed))
    replayed.replays[BATCHES].calls[2].seconds = 1.03
    replayed.replays[CHAT].calls[2].seconds = 1.2
    replayed.replays[MIXED].calls[0].seconds = 1.6
    missed = [each.name for each in bars(replayed) if not each.met]
    assert [name.split(",")[0] for name in missed] == ["mixed lengths", "chat", "batch sizes seen before"]
    assert bar(replayed, "batch sizes").value == pytest.approx(30)
    assert bar(replayed, "batch sizes").line().startswith("bar MISSED: batch sizes seen before")


def test_captures_after_a_warm_up_miss_a_bar(replayed):
    set_all(replayed)
    assert not any("warm-up" in each.name for each in bars(replayed))
    replayed.warm_up_seconds = 1.0
    assert all(each.met for each in bars(replayed))
    replayed.replays[CHAT].calls[0].stats = SpecBranchStats(graphs_captured=2)
    for call in replayed.replays[REQUESTS].calls:
        call.seconds, call.memory = 1.2, 1000
    replayed.replays[REQUESTS].calls[-1].memory = 1100
    missed = [each.name for each in bars(replayed) if not each.met]
    assert [name.split(",")[0] for name in missed] == [
        "graphs captured after the warm-up", "requests after the warm-up", "memory in use",
    ]  # fmt: skip


def test_warm_up_comes_first(target, draft):
    counter = Counter()
    traffic = Traffic(4, 32, mixed=1, turns=1, batch_sizes=(1,), requests=1, steady_runs=1, compared=0, warm_up=True)
    benchmark = TrafficBenchmark(small_pair(target, draft), TEXTS, traffic, progress=counter)
    benchmark.run()
    if hasattr(SpecBranchMixin, "warm_up_specbranch"):
        assert benchmark.warm_up_seconds > 0 and bar(benchmark, "captured after the warm-up").met
    else:
        assert any("nothing is warmed up" in line for line in counter.lines)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory, target, draft):
    where = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(where / name)
        letter_tokenizer(VOCABULARY).save_pretrained(where / name)
    lines = [json.dumps({"id": str(at), "prompt": text}) for at, text in enumerate(TEXTS)]
    (where / "prompts.jsonl").write_text("\n".join(lines))
    return where


def run(where, *arguments):
    models = ["--target", where / "target", "--draft", where / "draft", "--prompts", where / "prompts.jsonl"]
    words = [*models, "--threads", 1, "--max-new-tokens", 4, *arguments]
    return CliRunner().invoke(app, ["bench", *map(str, words)], env={"COLUMNS": "100"})


def test_command_prints_the_tables_last_and_writes_files(on_disk, tmp_path):
    files = ["--json", tmp_path / "t.json", "--markdown", tmp_path / "t.md"]
    done = run(on_disk, "--traffic", "--traffic-max-length", 32, "--requests", 2, "--steady-runs", 1, "--check", *files)
    report = json.loads((tmp_path / "t.json").read_text())
    assert done.exit_code == (0 if all(each["met"] for each in report["bars"]) else 1), done.output
    assert list(report["kinds"])[:2] == [MIXED, MIXED_AGAIN] and report["kinds"][REQUESTS]["calls"] == 2
    assert report["traffic"]["max_length"] == 32 and report["differences"]["outputs"] == 0
    assert done.stdout.rstrip().splitlines()[-1].startswith(REQUESTS)
    assert "x its steady" in (tmp_path / "t.md").read_text() and all(each["line"] for each in report["bars"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traffic", "--methods", "plain", "--png", "a.png"], "--methods, --png: not used with --traffic"),
        (["--requests", 3], "--requests: only used with --traffic"),
        (["--check"], "--check: only used with --traffic"),
        (["--traffic", "--max-new-tokens", 250], "leaves 6 tokens of the models' context (256)"),
    ],
)
def test_bad_input_is_refused(arguments, message, on_disk):
    pytest.importorskip("matplotlib")
    done = run(on_disk, *arguments)
    assert isinstance(done.exception, ValueError) and message in str(done.exception), done.output


def test_interrupted_traffic_keeps_its_calls(target, draft):
    class Stop(Counter):
        def advance(self):
            super().advance()
            if self.calls == 6:
                raise KeyboardInterrupt

    benchmark = TrafficBenchmark(small_pair(target, draft), TEXTS, SMALL, progress=Stop())
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    report = build_traffic(benchmark, {}, interrupted=True)
    assert [kind["calls"] for kind in report["kinds"].values()] == [3, 1]
    assert report["kinds"][MIXED]["ratio_to_steady"] is None and report["kinds"][MIXED]["tokens_per_second"] > 0


def test_captures_and_reuse_are_printed_where_there_are_some():
    stats = SpecBranchStats(new_tokens=8, total_seconds=2.0)
    assert not any("captured" in line or "in memory" in line for line in str(stats).splitlines())
    stats.graphs_captured, stats.capture_seconds, stats.reused_tokens = 3, 0.5, 120
    lines = str(stats).splitlines()
    assert "captured 3 CUDA graphs in 0.50 s; later generations reuse them" in lines
    assert "120 tokens of the prompt were still in memory and not read again" in lines
    assert stats.decoding_seconds == 1.5 and stats.tokens_per_second == 4.0


@pytest.mark.gpu
def test_memory_and_captures_are_measured_on_a_gpu(target, draft):
    pair = small_pair(target, draft)
    pair = pair._replace(target=pair.target.to("cuda"), draft=pair.draft.to("cuda"))
    benchmark = TrafficBenchmark(pair, TEXTS, SMALL)
    benchmark.run()
    kinds = build_traffic(benchmark, {}, interrupted=False)["kinds"]
    assert all(kind["peak_gib"] >= kind["end_gib"] > 0 for kind in kinds.values())
    assert benchmark.first.stats.graphs_captured > 0
    assert bar(benchmark, "differ from plain").met
