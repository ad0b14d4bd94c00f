"""`hf-specbranch doctor`: say whether a pair is worth it on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..bench.prompts import python_prompts, read_prompts
from ..checks import Check, versions
from . import options
from .printing import Console, leaving_cleanly
from .progress import showing_progress

if TYPE_CHECKING:
    from ..doctor import Report

UNUSABLE, SLOWER = 1, 3


@options.with_model_options()
def doctor(
    given: options.ModelOptions,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with id and prompt. Default: our own.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Use the first N prompts.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Per prompt.")] = 48,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each; the fastest counts.")] = 2,
    max_draft_length: Annotated[int, typer.Option(min=1, help="Draft length of the measured settings.")] = 8,
    max_branches: Annotated[int, typer.Option(min=1, max=8, help="Branches of the measured settings.")] = 4,
    runtime: options.Runtime = None,
    recording: Annotated[
        Path | None, typer.Option(help="Write how the draft agrees with each text, for hf_specbranch.planning.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check a pair, measure it on a few prompts, and say whether speculation pays, and with which settings.

    Exit code: 0 if it pays, 1 if the pair cannot be used, 3 if speculation would be slower.

    Example: hf-specbranch doctor --target org/large --draft org/small --prompts mine.jsonl
    """
    with leaving_cleanly():
        options.check_file("--recording", recording)
        texts = [each.prompt for each in (read_prompts(prompts) if prompts else python_prompts())][:num_prompts]
        given.check()
        console = Console(highlight=False)
        checks = [versions()]
        if not as_json:
            _show_check(checks[0], console)
        with showing_progress(quiet=as_json) as progress:
            progress.doing("importing torch and transformers")
            from ..doctor import examination_generations, measure_pair
            from ..pair_checks import check_everything
            from ..planning.simulate import save_agreements
            from ..vocabularies import load_tokenizer

            progress.doing("loading the models")
            large, small, tokenizer = given.open_pair()
            draft_tokenizer = load_tokenizer(small.name_or_path, **given.loading.draft)
        for check in check_everything(large, small, tokenizer, draft_tokenizer):
            checks.append(check)
            if not as_json:
                _show_check(check, console)
        with showing_progress(examination_generations(len(texts), repeat), quiet=as_json) as progress:
            report = measure_pair(
                checks,
                large,
                small,
                tokenizer,
                texts,
                max_new_tokens,
                max_draft_length,
                max_branches,
                repeat,
                runtime or "auto",
                progress,
                draft_tokenizer,
            )
        if recording is not None:
            save_agreements(report.recording, recording)
        if as_json:
            print(json.dumps(report.to_dict()))
        else:
            for check in report.checks[len(checks) :]:
                _show_check(check, console)
            show(report, console)
    if not report.usable:
        raise typer.Exit(UNUSABLE)
    if report.recommended is None:
        raise typer.Exit(SLOWER)


def show(report: Report, console: Console) -> None:
    """Print what was measured and what follows from it, at any terminal width."""
    if report.explained:
        console.print(f"\n{report.explained}\n")
        console.print(_policies(report))
    elif report.policies:
        agree, costs = report.agreement, report.costs
        console.print(
            f"\nThe draft's first choice is the target's token at {agree['first']:.0%} of {agree['tokens']} positions, "
            f"one of its first four at {agree['in_four']:.0%}. Its confidence is {agree['confidence_when_right']:.2f} "
            f"when right, {agree['confidence_when_wrong']:.2f} when wrong."
        )
        console.print(
            f"\nA target pass takes {costs['target_pass_ms']:.2f} ms and {costs['target_token_ms']:.2f} for each "
            f"further token; a draft step {costs['draft_step_ms']:.2f} ms and {costs['draft_branch_ms']:.2f} for each "
            f"further branch: {costs['speed_ratio']:.1f} draft steps per pass. Of drafting that "
            f"overlaps with a pass {costs['hidden']:.0%} is hidden.\n"
        )
        console.print(_policies(report))
        console.print(
            "\nTokens per second after the first token. ratio: predicted speed over plain generate(). "
            '"best": the best settings that `hf-specbranch tune` would try. The median error of the predictions is '
            f"{report.prediction_error:.0%}."
        )
    console.print(f"\n{report.verdict}")
    if report.recommended is not None:
        chosen = {name: report.recommended[name] for name in _SHOWN}
        settings = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        console.print(f"\nSpecBranchConfig({settings})", soft_wrap=False)
    if report.planned:
        console.print(
            f'\nThe default, policy "auto", plans for itself; at these costs it would choose: {report.planned}.'
        )


_SHOWN = ("policy", "max_draft_length", "confidence_threshold", "max_branches", "overlap")


def _show_check(check: Check, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=len("FAIL"))
    table.add_column(width=len("vocabulary"))
    table.add_row(check.state, check.name, check.found)
    console.print(table)
    console.file.flush()


def _policies(report: Report) -> Table:
    """Return the table of speeds; "best" is the best on the grid that `tune` searches."""
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    table.add_row("plain generate()", "", f"{report.plain:.1f}", "1.00")
    for row in report.policies:
        measured = "" if row.measured is None else f"{row.measured:.1f}"
        predicted = "" if row.predicted is None else f"{row.predicted:.1f}"
        table.add_row(row.name, predicted, measured, f"{row.ratio:.2f}")
    return table
