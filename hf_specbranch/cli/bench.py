"""`hf-specbranch bench`: every way to generate the same tokens, measured in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
import typer
from tqdm import tqdm
from transformers.utils import logging

from ..bench.further import Further
from ..bench.grow import check_growth
from ..bench.grow import grow as grow_model
from ..bench.grow_head import grow_head
from ..bench.measure import Benchmark, Plan, Progress
from ..bench.predictions import predictions
from ..bench.prompts import Prompt, python_prompts, read_prompts
from ..bench.report import build
from ..bench.shapes import Shape, resolve_shape
from ..bench.tables import markdown, print_report
from ..bench.ways import TITLES, Choices, Pair, check_names
from ..config import RUNTIMES
from ..demo_pair import load_demo_pair
from ..heads import LengthHead
from ..mixin import specbranch
from ..plots import save_speedup
from .options import check_file, check_picture
from .pair import EMBEDDED, load_pair
from .printing import INTERRUPTED, TERMINATED, Console, Terminated, leaving_cleanly, terminable

DEFAULT_WAYS = ",".join(name for name in TITLES if name != "specbranch-best")
EPILOG = "Ways: " + "; ".join(f"{name}: {title}" for name, title in TITLES.items()) + "."


def bench(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Target model. Default: the embedded one.")] = None,
    draft: Annotated[str | None, typer.Option(help='Draft model; "good" or "weak" for the embedded target.')] = None,
    grow: Annotated[str | None, typer.Option(help="Enlarge the pair to named shapes, e.g. 7b:68m.")] = None,
    head: Annotated[str | None, typer.Option(help="Length head. Default: the embedded pair's own.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with id and prompt. Default: our own 40.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Take the first so many.")] = 10,
    new_tokens: Annotated[int, typer.Option(min=2, help="At most, for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Measured runs of a way on a prompt.")] = 1,
    ways: Annotated[str, typer.Option(help="Comma-separated names; only these run. See below.")] = DEFAULT_WAYS,
    gamma: Annotated[int | None, typer.Option(min=1, help="Longest draft of unswept ways.")] = None,
    epsilon: Annotated[float | None, typer.Option(min=0, max=1, help="Our confidence threshold.")] = None,
    branches: Annotated[int | None, typer.Option(min=1, help="Our most branches.")] = None,
    sweep: Annotated[str, typer.Option(help="Draft lengths that sweeps try.")] = "2,4,6,8,12,16",
    sweep_prompts: Annotated[int, typer.Option(min=1, help="Prompts of a sweep.")] = 2,
    sweep_specbranch: Annotated[
        bool, typer.Option("--sweep-specbranch", help="Also sweep specbranch: the way specbranch-best.")
    ] = False,
    sweep_epsilon: Annotated[str, typer.Option(help="Thresholds to try with it, e.g. 0.2,0.4,0.6.")] = "",
    stream_prompts: Annotated[int, typer.Option(min=0, help="Prompts of the streamed pass.")] = 1,
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Hold the simulation against what was measured.")
    ] = True,
    pass_at: Annotated[
        str, typer.Option(help="Contexts to time a target pass at, at the first a draft step too; empty: none.")
    ] = "512",
    first_token_at: Annotated[
        int | None, typer.Option("--time-to-first-token", min=1, help="Also on a prompt of so many tokens.")
    ] = None,
    round_cost_at: Annotated[
        str, typer.Option("--round-cost", help="Also time a round at these contexts, e.g. 500,4000.")
    ] = "",
    stability_runs: Annotated[
        int | None, typer.Option("--stability", min=2, help="Also run one prompt so many times.")
    ] = None,
    each_kernel: Annotated[bool, typer.Option("--each-kernel", help="Also time each kernel of a pass alone.")] = False,
    device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of both models' weights in memory.")] = "float32",
    runtime: Annotated[str, typer.Option(help="Of our ways: auto, eager or graph.")] = "auto",
    kernels: Annotated[
        bool | None,
        typer.Option("--kernels/--no-kernels", help="Under graphs, our kernels. Default: in half precision."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for torch; 0 leaves it as it is.")] = 0,
    seed: Annotated[int, typer.Option(help="Of sampling, and of weights that grown models do not use.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw speed-up, rollback, acceptance.")] = None,
) -> None:
    """Measure every way to generate the same tokens: transformers' own and ours, on the same models and prompts.

    Batch size 1. Ways run in turns, prompt by prompt, after a warm-up; greedy outputs are compared with plain
    generate()'s, or with those of the first way if --ways leaves plain out, which saves time on a GPU. Ctrl-C, or a
    signal to terminate, shows and writes what is measured so far.

    Example: hf-specbranch bench --grow 7b:68m --device cuda --dtype bfloat16 --new-tokens 256 --json bench.json
    """
    files = Files(json_file, markdown_file, png_file)
    files.check()
    chosen = (*_split(ways), *(["specbranch-best"] if sweep_specbranch else []))
    plan = Plan(
        names=check_names(chosen),
        choices=Choices(gamma, epsilon, branches, runtime, "auto" if kernels is None else kernels),
        new_tokens=new_tokens,
        repeat=repeat,
        sweep=_lengths(sweep, "--sweep"),
        sweep_epsilon=_thresholds(sweep_epsilon),
        sweep_prompts=sweep_prompts,
        stream_prompts=stream_prompts,
        temperature=temperature,
    )
    check_plan(plan)
    further = Further(
        _lengths(pass_at, "--pass-at"),
        first_token_at,
        _lengths(round_cost_at, "--round-cost"),
        stability_runs,
        each_kernel,
    )
    texts = (read_prompts(prompts) if prompts is not None else python_prompts())[:num_prompts]
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.manual_seed(seed)
    with leaving_cleanly(), terminable():
        pair = load_models(Names(target, draft, grow, head, device, dtype))
        further.check(pair)
        status = measure_and_show(pair, texts, plan, further, files, _plain(context.params))
    raise typer.Exit(status)


class Files(NamedTuple):
    """Where the report goes beside the terminal."""

    json: Path | None
    markdown: Path | None
    png: Path | None

    def check(self) -> None:
        """Refuse what cannot be written, before any work."""
        check_file("--json", self.json)
        check_file("--markdown", self.markdown)
        check_picture(self.png)

    def write(self, report: dict[str, Any]) -> None:
        if self.json is not None:
            self.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if self.markdown is not None:
            self.markdown.write_text(markdown(report), encoding="utf-8")
        if self.png is not None:
            save_speedup(report, self.png)


class Names(NamedTuple):
    """The pair as it was asked for."""

    target: str | None
    draft: str | None
    grow: str | None
    head: str | None
    device: str
    dtype: str


def measure_and_show(
    pair: Pair, texts: list[Prompt], plan: Plan, further: Further, files: Files, settings: dict[str, Any]
) -> int:
    """Run everything and report it, cut short or not; the exit status: 130 or 143 if so, 1 if a way failed."""
    device = pair.target.device
    inputs = [(text.id, dict(pair.tokenizer(text.prompt, return_tensors="pt").to(device))) for text in texts]
    extras: dict[str, Any] = {}
    stopped: BaseException | None = None
    with tqdm(unit="run", leave=False, file=sys.stderr, disable=None) as bar:
        benchmark = Benchmark(pair, inputs, plan, Bar(bar))
        bar.reset(benchmark.generations)
        try:
            benchmark.run()
            bar.set_description("further measurements")
            if settings["predict"] and not plan.temperature and (found := predictions(benchmark)) is not None:
                extras["predictions"] = found
            further.run(pair, benchmark.inputs, plan, extras)
        except (KeyboardInterrupt, Exception) as error:  # figures that took an hour are not thrown away
            stopped = error
            benchmark.even_out()
    report = build(benchmark, settings, extras, interrupted=stopped is not None)
    try:
        print_report(report, Console())
    finally:  # the reader of a pipe may be gone
        files.write(report)
    if isinstance(stopped, KeyboardInterrupt):
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    if stopped is not None:
        raise stopped
    return 1 if benchmark.failed else 0


class Bar(Progress):
    """Shows a run on a progress bar; what is worth saying stays on the screen, or in a log, above it."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def doing(self, what: str) -> None:
        self.bar.set_description(what)

    def advance(self) -> None:
        self.bar.update()

    def say(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)


def load_models(names: Names) -> Pair:
    """The pair, grown if asked, with a head if there is one that fits."""
    device = _device(names.device)
    shapes = _shapes(names.grow)
    logging.disable_progress_bar()
    head = _small_head(names)
    if shapes is None:
        target, draft, tokenizer = load_pair(names.target, names.draft, names.device, names.dtype)
    else:
        small, small_draft, tokenizer = load_pair(names.target, names.draft, "cpu", "float32")
        dtype = getattr(torch, names.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {names.dtype!r}: expected float32, bfloat16 or float16")
        for model, shape in zip((small, small_draft), shapes):
            check_growth(model, shape)
        target = grow_model(small, shapes[0], dtype, device)
        draft = grow_model(small_draft, shapes[1], dtype, device)
        if head is not None:
            head.check_pair(small, small_draft, tokenizer)
            head = grow_head(head, target, draft)
    if head is not None:
        head.check_pair(target, draft, tokenizer)
    else:
        print("no length head for this pair: the way specbranch-head is left out (--head names one)", file=sys.stderr)
    return Pair(specbranch(target), draft, tokenizer, head)


def check_plan(plan: Plan) -> None:
    """Refuse settings that no way could run with."""
    if plan.choices.runtime not in RUNTIMES:
        raise ValueError(f"--runtime {plan.choices.runtime}: expected one of {', '.join(RUNTIMES)}")
    if not plan.sweep and any(name.endswith("-best") for name in plan.names):
        raise ValueError("--sweep is empty: expected draft lengths, e.g. 2,4,8, or leave the ways ending in -best out")


def _small_head(names: Names) -> LengthHead | None:
    """The named head, or the one that comes with the embedded pair."""
    if names.head is not None:
        return LengthHead.from_pretrained(names.head)
    if names.target is not None or names.draft not in (None, *EMBEDDED):
        return None
    return load_demo_pair(cast(Literal["good", "weak"], names.draft or "good"), head=True)[3]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    return device


def _shapes(given: str | None) -> tuple[Shape, Shape] | None:
    if given is None:
        return None
    parts = given.split(":")
    if len(parts) != 2:
        raise ValueError(f"--grow {given}: expected the target's shape and the draft's, e.g. 7b:68m")
    return resolve_shape(parts[0]), resolve_shape(parts[1])


def _split(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]


def _lengths(given: str, option: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) > 0 for part in _split(given)):
        raise ValueError(f"{option} {given}: expected whole numbers above 0 with commas between them, e.g. 2,4,8")
    return tuple(int(part) for part in _split(given))


def _thresholds(given: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in _split(given))
    except ValueError:
        numbers = (-1.0,)
    if not all(0 <= number <= 1 for number in numbers):
        raise ValueError(
            f"--sweep-epsilon {given}: expected numbers from 0 to 1 with commas between them, e.g. 0.2,0.4"
        )
    return numbers


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON can hold them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
