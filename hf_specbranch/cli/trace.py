"""`hf-specbranch trace`: record one generation and draw it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..config import POLICIES
from ..decoding.assembly import is_cheap
from ..mixin import specbranch
from ..planning.simulate import record_agreement, save_agreements
from ..timeline import Recording, chrome_trace, record, timeline_page
from ..timeline.record import as_if_captured
from . import options
from .generate import prompt_from
from .printing import leaving_cleanly, stats_lines

WARM_UP_TOKENS = 16
AGREEMENT = "agreement.json"


def trace(
    out: Annotated[Path, typer.Option(help="Folder for what is written; made if need be.")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Default: standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from here.")] = None,
    compare: Annotated[str | None, typer.Option(help="A second policy, on the same scale of time.")] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    head: options.Head = None,
    config: options.Config = None,
    policy: options.Policy = None,
    gamma: options.Gamma = None,
    epsilon: options.Epsilon = None,
    branches: options.Branches = None,
    runtime: options.Runtime = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = 0,
    as_json: options.Json = False,
) -> None:
    """Record one generation and draw it: who worked when, on which tokens, and what became of them.

    timeline.html is one page for any browser; trace.json opens in Perfetto; agreement.json (greedy only) is what
    hf_specbranch.planning.simulate predicts other machines from.

    Example: hf-specbranch trace "def add(a, b):" --out timeline --compare vanilla
    """
    with leaving_cleanly():
        text = prompt_from(prompt, file)
        settings = options.settings_from(config, policy, gamma, epsilon, branches, runtime)
        if compare is not None and compare not in POLICIES:
            raise ValueError(f"--compare {compare}: expected one of {', '.join(POLICIES)}")
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"--out {out}: a file of that name is there; name a folder")
        sampling = options.sampling_from(temperature, top_k, top_p)
        settings = replace(settings, length_head=options.head_from(head, target, draft, device) or settings.length_head)
        large, small, tokenizer = options.open_pair(target, draft, device, dtype, threads)
        model = specbranch(large, draft=small)
        policies = [settings.policy] if compare is None else [settings.policy, compare]
        if "auto" in policies:
            print("auto changes its plans in mid-text; what is drawn for it is specbranch", file=sys.stderr)
        recordings = []
        for name in policies:
            chosen = as_if_captured(replace(settings, policy=name), large.device, is_cheap(large, small))
            for count in (min(WARM_UP_TOKENS, max_new_tokens), max_new_tokens):  # what is slow once is not drawn
                torch.manual_seed(seed)
                found = record(model, tokenizer, text, specbranch=chosen, max_new_tokens=count, **sampling)
            recordings.append(found)
        trace_file, page_file = save(recordings, out)
        if not sampling["do_sample"]:  # a greedy text can be replayed with other settings and step costs
            ids = tokenizer(text, return_tensors="pt")["input_ids"].to(large.device)
            save_agreements([record_agreement(model, small, {"input_ids": ids}, max_new_tokens)], out / AGREEMENT)
        if as_json:
            stats = [each.stats.to_dict() for each in recordings]
            print(json.dumps({"trace": str(trace_file), "timeline": str(page_file), "stats": stats}))
        else:
            for each in recordings:
                print("\n".join(stats_lines(each.stats)) + "\n")
            print(f"{page_file}: open it in a browser\n{trace_file}: open it in Perfetto")
            if not sampling["do_sample"]:
                print(f"{out / AGREEMENT}: how the draft did, for hf_specbranch.planning.simulate")


def save(recordings: list[Recording], folder: Path) -> tuple[Path, Path]:
    """Write trace.json and timeline.html into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    trace_file, page_file = folder / "trace.json", folder / "timeline.html"
    trace_file.write_text(json.dumps(chrome_trace(recordings)), encoding="utf-8")
    page_file.write_text(timeline_page(recordings), encoding="utf-8")
    return trace_file, page_file
