"""`hf-specbranch bench`: compare methods of generating the same tokens, replay traffic, or time model families."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from ..bench.methods import DEFAULT_METHODS, METHODS, Overrides, Pair, check_names
from ..bench.prompts import Prompt, in_turn, python_prompts, read_sets
from ..bench.shapes import SHAPES
from ..bench.traffic import LONGEST, SHORTEST_LONGEST
from ..config import RUNTIMES
from ..progress import TqdmProgress
from . import options
from .bench_report import Files, exit_status, plain_values
from .printing import Console, leaving_cleanly, note, terminable

if TYPE_CHECKING:
    from ..bench.measure import Plan
    from ..bench.traffic import Traffic

EPILOG = "Methods: " + "; ".join(f"{name}: {title}" for name, title in METHODS.items()) + "."
EPILOG += f"\n\nFamilies: {', '.join(SHAPES)}."
# The kinds of benchmark that use an option; all of them use the others.
OF_METHODS = ("num_prompts", "slow_prompts", "chat", "temperature", "methods", "sweep", "png_file")
OF_TRAFFIC = ("traffic_max_length", "requests", "steady_runs", "warm_up", "check")
OF_FAMILIES = ("context_length", "bandwidth", "plain", "tiny")
OF_A_PAIR = (
    "target", "draft", "revision", "draft_revision", "trust_remote_code", "grow", "length_head", "prompts",
)  # fmt: skip
OF_DRAFTING = ("max_draft_length", "confidence_threshold", "max_branches", "draft_weights", "draft_shortlist")
USED_BY: dict[str, tuple[str, ...]] = {
    "repeat": ("methods", "families"),
    "traffic": ("methods", "traffic"),
    **dict.fromkeys(OF_METHODS, ("methods",)),
    **dict.fromkeys(OF_TRAFFIC, ("traffic",)),
    **dict.fromkeys(OF_FAMILIES, ("families",)),
    **dict.fromkeys((*OF_A_PAIR, *OF_DRAFTING), ("methods", "traffic")),
}
RENAMED_METHODS = {"specbranch-outcomes": "specbranch-rejections"}  # accepted for one release


@options.with_model_options()
def bench(
    given: options.ModelOptions,
    context: typer.Context,
    grow: Annotated[str | None, typer.Option(help="Enlarge the pair, e.g. 7b:68m or qwen3-8b:qwen3-0.6b.")] = None,
    length_head: Annotated[str | None, typer.Option(help="Length head. Default: the embedded pair's.")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSON lines with id, prompt and perhaps kind. Default: our own 40.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Use N prompts, of each kind in turn.")] = 10,
    slow_prompts: Annotated[
        int | None, typer.Option(min=1, help="Transformers' own methods run on the first N of them only.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the target's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens to generate per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the free weights of grown models.")] = 0,
    methods: Annotated[str, typer.Option(help="Comma-separated names; only these run. See below.")] = ",".join(
        DEFAULT_METHODS
    ),
    repeat: Annotated[int, typer.Option(min=1, help="Measured runs per method and prompt.")] = 1,
    sweep: Annotated[str, typer.Option(help="Draft lengths that the -best methods try.")] = "2,4,6,8,12,16",
    max_draft_length: options.MaxDraftLength = None,
    confidence_threshold: options.ConfidenceThreshold = None,
    max_branches: options.MaxBranches = None,
    draft_weights: options.DraftWeights = None,
    draft_shortlist: options.DraftShortlist = None,
    runtime: Annotated[str, typer.Option(help=f"Of our methods: {', '.join(RUNTIMES)}.")] = "auto",
    kernels: Annotated[
        bool | None,
        typer.Option("--kernels/--no-kernels", help="Our kernels in captured graphs. Default: in half precision."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw speed-up, rollback, acceptance.")] = None,
    traffic: Annotated[bool, typer.Option("--traffic", help="Replay changing lengths and batch sizes.")] = False,
    traffic_max_length: Annotated[
        int, typer.Option(min=SHORTEST_LONGEST, help="Longest prompt of the traffic; others scale with it.")
    ] = LONGEST,
    requests: Annotated[int, typer.Option(min=0, help="Random requests of the traffic.")] = 200,
    steady_runs: Annotated[int, typer.Option(min=1, help="Repetitions per steady time.")] = 3,
    warm_up: Annotated[bool, typer.Option("--warm-up", help="Warm up all sizes of the traffic first.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the traffic misses a bar.")] = False,
    families: Annotated[
        str | None,
        typer.Option(help="Time random models: names as below, ids or folders; or all."),
    ] = None,
    context_length: Annotated[int, typer.Option(min=1, help="Tokens of context of the families.")] = 512,
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="TB/s of the limit. Default: measured.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Time plain generate() of the families too.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Shrink the families: a quick trial on a CPU.")] = False,
) -> None:
    """Compare transformers' own methods and ours on the same models and prompts.

    Batch size 1. Methods run in turns, prompt by prompt, after a warm-up. Greedy outputs are compared with those of
    the first method: plain generate(), unless --methods leaves it out, which saves time on a GPU. Ctrl-C or SIGTERM
    shows and writes what is measured so far.

    With --traffic, our default method replays mixed prompt lengths, growing chats, changing batch sizes and random
    requests instead, and is compared with its own steady state.

    With --families, models of real shapes with random weights decode without a draft, one after another. The time per
    token is compared with the time to read the weights. Nothing is downloaded for names of shapes.

    Example: hf-specbranch bench --grow 7b:68m --device cuda --dtype bfloat16 --max-new-tokens 256 --json bench.json
    """
    files = Files(json_file, markdown_file, png_file)
    files.check()
    check_unused(context, "traffic" if traffic else "families" if families is not None else "methods")
    import torch

    from ..bench.measure import Plan
    from ..bench.traffic import Traffic, fitting_length
    from .bench_families import families_and_show
    from .pair import PairNames, load_bench_pair

    overrides = Overrides(
        max_draft_length, confidence_threshold, max_branches, runtime, "auto" if kernels is None else kernels,
        options.draft_form(draft_weights, draft_shortlist),
    )  # fmt: skip
    plan = Plan(
        names=check_names(_names(methods)),
        overrides=overrides,
        max_new_tokens=max_new_tokens,
        repeat=repeat,
        sweep=_lengths(sweep),
        temperature=temperature,
        slow_prompts=slow_prompts,
    )
    check_plan(plan)
    device, dtype = given.place()
    settings = plain_values(context.params) | {"device": device, "dtype": dtype}
    if families is not None:
        raise typer.Exit(families_and_show(_split(families), overrides, files, settings))
    texts = read_sets(prompts) if prompts else python_prompts()
    torch.manual_seed(seed)
    with leaving_cleanly(), terminable():
        pair = load_bench_pair(PairNames(given.target, given.draft, grow, length_head, device, dtype, given.loading))
        if pair.head is None and "specbranch-head" in plan.names and not traffic:
            note("no length head for this pair: specbranch-head is left out (--length-head names one)")
        if traffic:
            longest = fitting_length(pair, traffic_max_length, max_new_tokens)
            replayed = Traffic(
                max_new_tokens, longest, requests=requests, steady_runs=steady_runs, warm_up=warm_up, seed=seed
            )
            status = replay_and_show(pair, texts, replayed, overrides, files, settings)
        else:
            some = in_turn(texts, num_prompts)
            status = measure_and_show(pair, some, plan, files, settings)
    raise typer.Exit(status)


def measure_and_show(pair: Pair, texts: list[Prompt], plan: Plan, files: Files, settings: dict[str, Any]) -> int:
    """Run the plan and report it, interrupted or not.

    Returns:
        The exit status: 130 or 143 if it was interrupted, 1 if a method failed, else 0.
    """
    from ..bench.measure import Benchmark
    from ..bench.report import build, markdown, print_report

    device = pair.target.device
    inputs = [(text.id, inputs_of(pair.tokenizer, text.prompt, device, settings["chat"])) for text in texts]
    stopped: BaseException | None = None
    with tqdm(unit="run", leave=False, file=sys.stderr, disable=None) as bar:
        benchmark = Benchmark(pair, inputs, plan, TqdmProgress(bar), [text.kind for text in texts])
        bar.reset(benchmark.generations)
        try:
            benchmark.run()
        except (KeyboardInterrupt, Exception) as error:  # keep what is measured so far
            stopped = error
            benchmark.even_out()
    report = build(benchmark, settings, interrupted=stopped is not None)
    try:
        print_report(report, Console())
    finally:  # the reader of a pipe may be gone
        files.write(report, markdown)
    return exit_status(stopped, failed=bool(benchmark.failed))


def inputs_of(tokenizer: Any, prompt: str, device: Any, chat: bool) -> dict[str, Any]:
    """Return a tokenized prompt, in the chat template as what the user says if wanted."""
    if not chat:
        return dict(tokenizer(prompt, return_tensors="pt").to(device))
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--chat: the tokenizer of the target has no chat template, leave it out")
    said = [{"role": "user", "content": prompt}]
    more = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(said, **more).to(device))


def replay_and_show(
    pair: Pair, texts: list[Prompt], traffic: Traffic, overrides: Overrides, files: Files, settings: dict[str, Any]
) -> int:
    """Replay traffic and report it, interrupted or not.

    Returns:
        The exit status: 130 or 143 if it was interrupted, 1 if a bar is missed and `settings` has `check`, else 0.
    """
    from ..bench.traffic_report import build_traffic, print_traffic, traffic_markdown
    from ..bench.traffic_run import TrafficBenchmark

    stopped: BaseException | None = None
    with tqdm(unit="call", leave=False, file=sys.stderr, disable=None) as bar:
        prompts = [text.prompt for text in texts]
        benchmark = TrafficBenchmark(pair, prompts, traffic, overrides.settings("auto"), TqdmProgress(bar))
        bar.reset(benchmark.calls)
        try:
            benchmark.run()
        except (KeyboardInterrupt, Exception) as error:  # keep what is measured so far
            stopped = error
    report = build_traffic(benchmark, settings, interrupted=stopped is not None)
    try:
        print_traffic(report, Console())
    finally:  # the reader of a pipe may be gone
        files.write(report, traffic_markdown)
    missed = settings["check"] and not all(bar["met"] for bar in report["bars"])
    return exit_status(stopped, failed=missed)


def check_unused(context: typer.Context, kind: str) -> None:
    """Refuse options that this kind of benchmark does not use, rather than ignore them."""
    unused = [name for name, kinds in USED_BY.items() if kind not in kinds]
    given = [name for name in unused if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if not given:
        return
    place = f"not used with --{kind}"
    if kind == "methods":
        place = f"only used with --{USED_BY[given[0]][0]}"
        given = [name for name in given if USED_BY[name] == USED_BY[given[0]]]
    listed = ", ".join("--" + name.removesuffix("_file").replace("_", "-") for name in given)
    raise ValueError(f"{listed}: {place}, leave it out")


def check_plan(plan: Plan) -> None:
    """Refuse settings that no method could run with."""
    if plan.overrides.runtime not in RUNTIMES:
        raise ValueError(f"--runtime {plan.overrides.runtime}: expected one of {', '.join(RUNTIMES)}")
    if not plan.sweep and any(name.endswith("-best") for name in plan.names):
        raise ValueError("--sweep is empty: expected draft lengths, e.g. 2,4,8, or leave the -best methods out")


def _names(given: str) -> tuple[str, ...]:
    names = _split(given)
    for old in set(names) & set(RENAMED_METHODS):
        note(f"warning: method {old} is now {RENAMED_METHODS[old]}; the next release will not accept {old}")
    return tuple(RENAMED_METHODS.get(name, name) for name in names)


def _split(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]


def _lengths(given: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) > 0 for part in _split(given)):
        raise ValueError(f"--sweep {given}: expected whole numbers above 0 with commas between them, e.g. 2,4,8")
    return tuple(int(part) for part in _split(given))
