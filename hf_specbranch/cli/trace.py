"""`hf-specbranch trace`: record one generation and draw it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import POLICIES
from . import options
from .generate import prompt_from
from .printing import leaving_cleanly

if TYPE_CHECKING:
    from ..timeline import Recording

WARM_UP_TOKENS = 16
AGREEMENT = "agreement.json"


@options.with_generation_options(max_new_tokens=64)
def trace(
    given: options.GenerationOptions,
    out: Annotated[Path, typer.Option(help="Folder to write to; created if missing.")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Default: standard input.")] = None,
    compare: Annotated[str | None, typer.Option(help="A second policy, on the same time scale.")] = None,
    as_json: options.Json = False,
) -> None:
    """Record one generation and draw its timeline: which model ran when, on which tokens, and their fate.

    timeline.html is a page for any browser. trace.json opens in Perfetto. agreement.json (greedy only) is the input
    of hf_specbranch.planning.simulate, which predicts other machines.

    Example: hf-specbranch trace "def add(a, b):" --out timeline --compare vanilla
    """
    with leaving_cleanly():
        text = prompt_from(prompt)
        settings = given.settings()
        if compare is not None and compare not in POLICIES:
            raise ValueError(f"--compare {compare}: expected one of {', '.join(POLICIES)}")
        options.check_folder_out("--out", out)
        sampling, limits = given.sampling(), given.limits()
        import torch

        from ..attach import specbranch
        from ..decoding.assembly import is_cheap
        from ..planning.simulate import record_agreement, save_agreements
        from ..timeline import record
        from ..timeline.record import as_if_captured

        settings = replace(settings, length_head=given.head() or settings.length_head)
        target, draft, tokenizer = given.open_pair()
        model = specbranch(target, draft=draft)
        policies = [settings.policy] if compare is None else [settings.policy, compare]
        recordings = []
        for name in policies:
            chosen = replace(settings, policy=name)
            if name != "auto":  # the planner of auto decides for itself, and what it ran is drawn
                chosen = as_if_captured(chosen, target.device, is_cheap(target, draft))
            for count in (min(WARM_UP_TOKENS, given.max_new_tokens), given.max_new_tokens):  # the first is a warm-up
                torch.manual_seed(given.seed)
                found = record(
                    model, tokenizer, text, specbranch=chosen, **sampling, **limits | {"max_new_tokens": count}
                )
            recordings.append(found)
        trace_file, page_file = save(recordings, out)
        if not sampling["do_sample"]:  # greedy text can be replayed with other settings and step costs
            ids = tokenizer(text, return_tensors="pt")["input_ids"].to(target.device)
            save_agreements([record_agreement(model, draft, {"input_ids": ids}, given.max_new_tokens)], out / AGREEMENT)
        if as_json:
            stats = [each.stats.to_dict() for each in recordings]
            print(json.dumps({"trace": str(trace_file), "timeline": str(page_file), "stats": stats}))
        else:
            for each in recordings:
                print(f"{each.stats}\n")
            print(f"{page_file}: open it in a browser\n{trace_file}: open it in Perfetto")
            if not sampling["do_sample"]:
                print(f"{out / AGREEMENT}: input of hf_specbranch.planning.simulate")


def save(recordings: list[Recording], folder: Path) -> tuple[Path, Path]:
    """Write trace.json and timeline.html into the folder."""
    from ..timeline import chrome_trace, timeline_page

    folder.mkdir(parents=True, exist_ok=True)
    trace_file, page_file = folder / "trace.json", folder / "timeline.html"
    trace_file.write_text(json.dumps(chrome_trace(recordings)), encoding="utf-8")
    page_file.write_text(timeline_page(recordings), encoding="utf-8")
    return trace_file, page_file
