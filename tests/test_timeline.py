"""Recording a generation: every token is there once, and adds up to the statistics."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch import SpecBranchConfig, SpecBranchStats, load_demo_pair, specbranch
from hf_specbranch.cli import app, main
from hf_specbranch.timeline import chrome_trace, record
from hf_specbranch.timeline.record import as_if_captured, token_texts
from hf_specbranch.timeline.recording import BRANCHES, DRAFT, TARGET, Block, Recording
from hf_specbranch.timeline.waits import Wait, waits

from .models import slowly

PROMPT = "def add(a, b):"
METHODS = {
    "specbranch": {},
    "specbranch, drawn": {"do_sample": True},
    "specbranch, rejection branches": {"max_rejection_branches": 4},
    "specbranch, leaves": {"max_rejection_branches": 4, "tree_leaves": 6},
    "vanilla, leaves": {"tree_leaves": 6},
    "auto": {},
    "auto, drawn": {"do_sample": True},
    "pearl": {},
    "vanilla": {},
    "autoregressive": {},
}
QUICK = ("specbranch, leaves", "auto, drawn", "pearl", "autoregressive")


@pytest.fixture(scope="module")
def pair():
    target, draft, tokenizer = load_demo_pair("weak")
    return specbranch(target, draft), tokenizer


def recorded(pair, way):
    settings = {"policy": way.split(",")[0], **METHODS[way]}
    sampling = {"do_sample": settings.pop("do_sample", False)}
    torch.manual_seed(0)
    return record(*pair, PROMPT, specbranch=SpecBranchConfig(**settings), max_new_tokens=32, **sampling)


@pytest.fixture(scope="module", params=[way if way in QUICK else slowly(way) for way in METHODS])
def recording(pair, request):
    return recorded(pair, request.param)


# ---- recording


def test_fates_add_up_to_the_statistics(recording):
    stats = recording.stats
    counted = {
        "accepted": stats.num_accepted_tokens,
        "rolled back": stats.rollback_tokens,
        "wasted": stats.wasted_branch_tokens,
    }
    assert recording.fates() == counted
    assert len(recording.drafted) == stats.num_draft_tokens


def test_every_new_token_is_recorded_once(pair, recording):
    assert len(recording.committed) == recording.stats.new_tokens
    sources = [token.drafted for token in recording.committed if token.drafted is not None]
    assert len(set(sources)) == len(sources) == recording.stats.num_accepted_tokens
    for token in recording.committed:
        assert token.drafted is None or recording.drafted[token.drafted].token == token.token
    said = pair[1].decode([token.token for token in recording.committed])
    assert recording.text == said


def test_blocks_hold_every_pass_and_every_drafted_token_once(recording):
    stats, blocks = recording.stats, recording.blocks
    assert sum(block.lane == TARGET for block in blocks) == stats.target_forwards
    assert sum(block.lane == TARGET and block.name != "read a leaf" for block in blocks) == len(recording.result_times)
    assert sum(block.forwards for block in blocks if block.lane != TARGET) == stats.draft_forwards
    put_down = [index for block in blocks if block.lane != TARGET for row in block.rows for index in row]
    assert sorted(put_down) == list(range(stats.num_draft_tokens))
    assert all(0 <= block.begin < block.end <= recording.seconds for block in blocks)
    for lane in (TARGET, DRAFT, BRANCHES):
        spans = [(block.begin, block.end) for block in blocks if block.lane == lane]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_looking_on_changes_nothing(pair):
    model, tokenizer = pair
    inputs = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    seen = [token.token for token in recorded(pair, "specbranch").committed]
    assert seen == out[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_batch_is_refused(pair):
    model, tokenizer = pair
    with pytest.raises(ValueError, match="this batch has 2: pass one prompt at a time"):
        record(model, tokenizer, PROMPT, max_new_tokens=4, do_sample=True, num_return_sequences=2)


def test_a_text_that_ends_in_the_middle_of_a_chain_leaves_no_token_without_a_fate(pair):
    model, tokenizer = pair
    found = record(model, tokenizer, PROMPT, max_new_tokens=24, do_sample=False, stop_strings='"')
    assert found.stats.new_tokens < 24 and all(token.fate for token in found.drafted)
    assert len(found.drafted) == found.stats.num_draft_tokens


def test_tokens_keep_the_blank_that_some_tokenizers_drop_at_the_beginning():
    class Dropping:
        def decode(self, ids, **_):
            return "".join({1: " one", 2: " two"}[i] for i in ids).lstrip()

    assert token_texts(Dropping(), [2], anchor=1) == {2: " two"}


def test_a_recording_on_a_gpu_takes_the_settings_of_captured_stages():
    config = SpecBranchConfig()
    assert as_if_captured(config, torch.device("cpu")) == config.decided()
    there = as_if_captured(config, torch.device("cuda"))
    assert there.confidence_threshold == config.threshold(alone=True) and there.max_rejection_branches > 0


@pytest.mark.gpu
def test_on_a_gpu_rounds_are_driven_from_the_host_and_add_up_too():
    target, draft, tokenizer = load_demo_pair("weak", device="cuda")
    model = specbranch(target, draft)
    for policy in ("specbranch", "pearl", "vanilla"):
        chosen = as_if_captured(SpecBranchConfig(policy=policy), model.device)
        found = record(model, tokenizer, PROMPT, max_new_tokens=48, do_sample=False, specbranch=chosen)
        assert found.stats.slowed_by == "an observer looks at every round"
        assert sum(found.fates().values()) == found.stats.num_draft_tokens
        assert found.fates()["rolled back"] == found.stats.rollback_tokens
        assert all(block.seconds > 0 for block in found.blocks)


# ---- the bubbles


def by_hand(blocks):
    return Recording("specbranch", "", [], [], blocks, [9.0], SpecBranchStats())


def test_waits_are_the_gaps_in_each_models_work():
    drafted = Block(DRAFT, "draft", 1, 1.0, 2.0, [[0, 1]], forwards=2)
    first = Block(TARGET, "verify", 1, 2.0, 5.0, [[0, 1]], forwards=1)
    ahead = Block(BRANCHES, "draft ahead", 1, 2.0, 4.0, [[2], [3]], forwards=2)
    second = Block(TARGET, "verify", 2, 5.0, 8.0, [[2]], forwards=1)
    recording = by_hand([drafted, first, ahead, second])
    assert waits(recording) == [Wait(TARGET, 1.0, 2.0), Wait(DRAFT, 4.0, 8.0)]


def test_without_a_draft_model_nobody_waits():
    passes = [Block(TARGET, "verify", number, 2.0 * number, 2.0 * number + 1, [[]], forwards=1) for number in (1, 2)]
    assert waits(by_hand(passes)) == []
    looked_up = Block(DRAFT, "draft", 2, 3.5, 3.6, [[0, 1]], forwards=0)
    assert waits(by_hand([passes[0], looked_up, passes[1]])) == []


# ---- files


def test_the_chrome_trace_is_json_and_holds_every_new_token_once(recording):
    trace = json.loads(json.dumps(chrome_trace([recording])))
    events = trace["traceEvents"]
    committed = [text for event in events if event["name"] == "verify result" for text in event["args"]["committed"]]
    assert "".join(committed) == recording.text and len(committed) == recording.stats.new_tokens
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(recording.blocks) and all(event["dur"] > 0 for event in slices)
    fates = [token["fate"] for e in slices if e["cat"] != TARGET for row in e["args"]["tokens"] for token in row]
    assert {fate: fates.count(fate) for fate in recording.fates()} == recording.fates()
    assert trace["otherData"]["stats"][0]["new_tokens"] == recording.stats.new_tokens


# ---- the command


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_trace_writes_both_files_and_says_where(tmp_path):
    said = run("trace", PROMPT, "--out", tmp_path / "new" / "folder", "--max-new-tokens", 8, "--compare", "vanilla")
    assert said.exit_code == 0 and "8 tokens" in said.stdout
    assert all(name in said.stdout for name in ("timeline.html", "trace.json", "agreement.json"))
    trace = json.loads((tmp_path / "new" / "folder" / "trace.json").read_text())
    assert [stats["policy"] for stats in trace["otherData"]["stats"]] == ["auto", "vanilla"]
    assert "Timeline" in (tmp_path / "new" / "folder" / "timeline.html").read_text()


def test_trace_speaks_json(tmp_path):
    said = run(
        "trace",
        PROMPT,
        "--out",
        tmp_path,
        "--max-new-tokens",
        6,
        "--policy",
        "pearl",
        "--max-draft-length",
        3,
        "--json",
    )
    answer = json.loads(said.stdout)
    assert Path(answer["timeline"]).is_file() and Path(answer["trace"]).is_file()
    assert answer["stats"][0]["new_tokens"] == 6 and answer["stats"][0]["policy"] == "pearl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--compare", "fastest"],
            "--compare fastest: expected one of auto, autoregressive, vanilla, pearl",
        ),
        (["--out", __file__], "a file of that name is there; name a folder"),
        (["--top-k", "3"], "--top-k and --top-p choose among sampled tokens"),
    ],
)
def test_trace_refuses_before_any_work(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["hf-specbranch", "trace", PROMPT, "--out", str(tmp_path / "x"), *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 1 and message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
