"""`hf-specbranch bench` by kind of prompt: which prompts run, on which methods, and the table."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_specbranch.bench.kinds import markdown_kinds, print_kinds
from hf_specbranch.bench.measure import Benchmark, Plan
from hf_specbranch.bench.methods import check_names
from hf_specbranch.bench.prompts import Prompt, in_turn, read_sets
from hf_specbranch.bench.report import build
from hf_specbranch.cli import app
from hf_specbranch.progress import Progress

from .benchmarks import tiny_pair
from .models import prompt


class Counted(Progress):
    count = 0

    def advance(self):
        self.count += 1


def test_prompts_of_several_files_run_in_turn(tmp_path):
    (code := tmp_path / "code.jsonl").write_text('{"id": "1", "prompt": "a"}\n{"id": "2", "prompt": "b"}\n')
    (mixed := tmp_path / "mixed.jsonl").write_text('{"id": "3", "prompt": "c", "category": "prose"}\n')
    prompts = read_sets([code, mixed])
    assert prompts == [Prompt("1", "a", "code"), Prompt("2", "b", "code"), Prompt("3", "c", "prose")]
    assert [each.id for each in in_turn(prompts, 3)] == ["1", "3", "2"]
    assert [each.kind for each in read_sets([code])] == ["", ""]


def test_figures_by_kind(target, draft):
    names = check_names(("plain", "autoregressive", "auto"))
    plan, progress = Plan(names, max_new_tokens=8, stream_prompts=0, slow_prompts=2), Counted()
    prompts = [(str(seed), prompt(length=5 + seed, seed=seed)) for seed in range(5)]
    benchmark = Benchmark(tiny_pair(target, draft), prompts, plan, progress, ["code", "prose"] * 2 + ["code"])
    benchmark.run()
    assert progress.count == benchmark.generations
    report = build(benchmark, {}, interrupted=False)
    kinds, methods = report["kinds"], report["methods"]
    assert {kind: found["prompts"] for kind, found in kinds.items()} == {"code": 3, "prose": 2, "all": 5}
    assert [kinds[kind]["methods"]["plain"]["prompts"] for kind in kinds] == [1, 1, 2]
    assert report["differences"]["outputs"] == 0
    auto = kinds["all"]["methods"]["auto"]
    assert auto["tokens_per_second"] == pytest.approx(methods["auto"]["overall_tokens_per_second"])
    ours = methods["autoregressive"]["overall_tokens_per_second"]
    assert auto["ratio_to_autoregressive"] == pytest.approx(auto["tokens_per_second"] / ours)
    lines = markdown_kinds(report).splitlines()
    assert lines[0].startswith("| kind | prompts | plain | autoregressive | auto |") and lines[4].startswith(
        "| all | 5 |"
    )
    assert "(1)" in lines[2]
    print_kinds(report, console := Console(file=io.StringIO(), width=60))
    assert "prose" in console.file.getvalue()


def test_one_kind_has_no_table(target, draft):
    plan = Plan(check_names(("autoregressive",)), max_new_tokens=4, stream_prompts=0)
    benchmark = Benchmark(tiny_pair(target, draft), [("a", prompt())], plan)
    benchmark.run()
    report = build(benchmark, {}, interrupted=False)
    assert report["kinds"] == {} and markdown_kinds(report) == ""


@pytest.mark.slow
def test_command_takes_kinds(tmp_path):
    texts = [{"id": str(number), "prompt": "def f(x):", "kind": "ab"[number % 2]} for number in range(4)]
    (path := tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    out = tmp_path / "bench.json"
    command = ["bench", "--prompts", str(path), "--num-prompts", "2", "--slow-prompts", "1", "--max-new-tokens", "3"]
    done = CliRunner().invoke(app, [*command, "--methods", "plain,autoregressive", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert set(json.loads(out.read_text())["kinds"]) == {"a", "b", "all"}
    refused = CliRunner().invoke(app, [*command, "--methods", "plain", "--chat"])
    assert refused.exit_code and "chat template" in str(refused.exception)
