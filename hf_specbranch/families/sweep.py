"""Compare speculation with plain `generate()` on every architecture, and write the results as a table."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

import transformers

from .check import EQUAL, ERROR, NEAR_TIE, NOT_BUILT, PLAIN_FAILS, REFUSED, WRONG, Case, check, one_line
from .tiny import Family, language_models, vision_models

WORST_FIRST = (WRONG, ERROR, NEAR_TIE, EQUAL, REFUSED, PLAIN_FAILS, NOT_BUILT)
SEEDS = 3  # tried in turn while a text ends in a near tie


@dataclass(frozen=True)
class Result:
    """The comparisons of one architecture."""

    family: Family
    cases: tuple[Case, ...]

    @property
    def state(self) -> str:
        """The worst state of its cases; "equal" if some are equal and others are refused."""
        return min((case.state for case in self.cases), key=WORST_FIRST.index)

    def states(self, images: bool) -> str:
        """Return the states for prompts with or without images, as the table shows them."""
        cases = [case for case in self.cases if not case.inputs or ("image" in case.inputs) == images]
        by_inputs = {case.inputs: _worst(cases, case.inputs) for case in cases}
        if len(set(by_inputs.values())) <= 1:
            return next(iter(by_inputs.values()), "")
        return "; ".join(f"{inputs}: {state}" for inputs, state in by_inputs.items())

    @property
    def note(self) -> str:
        """Why it is not equal throughout."""
        notes: dict[str, str] = {}  # one of those that differ only in a number
        for case in self.cases:
            notes.setdefault(re.sub(r"\d+", "", case.note), case.note)
        return "; ".join(filter(None, notes.values()))


def _worst(cases: Iterable[Case], inputs: str) -> str:
    return min((case.state for case in cases if case.inputs == inputs), key=WORST_FIRST.index)


def try_family(family: Family) -> Result:
    """Build an architecture and compare every policy with plain `generate()`."""
    result = Result(family, ())
    for seed in range(SEEDS):
        with redirect_stdout(io.StringIO()):  # some models print warnings
            try:
                model = family.build(seed)
            except Exception as error:
                return Result(family, (Case("", "", NOT_BUILT, one_line(error)),))
            result = Result(family, tuple(check(model)))
        if result.state != NEAR_TIE:
            break
    return result


def sweep(only: Sequence[str] = ()) -> Iterator[Result]:
    """Compare all architectures, or those of the named model types with their variants.

    Raises:
        ValueError: for a name that is not known.
    """
    families = [*language_models(), *vision_models()]
    known = {family.model_type for family in families}
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"no architecture is called {', '.join(unknown)}: names are those of AutoConfig, e.g. llama")
    for family in families:
        if not only or family.model_type in only:
            yield try_family(family)


def markdown(results: Sequence[Result]) -> str:
    """Return the page of the docs: a table of all results, those that are not equal first."""
    counts = Counter(result.state for result in results)
    total = ", ".join(f"{counts[state]} {state}" for state in WORST_FIRST if counts[state] or state == WRONG)
    lines = [
        "# Architectures",
        "",
        f"Written by `hf-specbranch families --markdown docs/families.md` with transformers "
        f"{transformers.__version__}: {total}.",
        "",
        *_INTRODUCTION.strip().split("\n"),
    ]
    for title, states in _SECTIONS.items():
        chosen = [result for result in results if result.state in states]
        if chosen:
            lines += [
                "",
                f"## {title}",
                "",
                "| architecture | class | text | images | remarks |",
                "|---|---|---|---|---|",
            ]
            lines += [_row(result) for result in chosen]
    return "\n".join(lines) + "\n"


_INTRODUCTION = f"""
Every architecture of `AutoModelForCausalLM` and `AutoModelForImageTextToText` is built with a few small layers and
random weights in float32, with windows of 8 tokens. A copy with noise in its weights drafts for it. The policies
"autoregressive", "vanilla" (with tree leaves) and "specbranch" then continue one prompt and a left-padded batch, past
the windows, and prompts with images where the vision tower takes them in a form that the command knows. The tokens are
compared with those of plain `generate(do_sample=False)`.

- {EQUAL}: the same tokens throughout.
- {REFUSED}: an error before any work, with the reason given here. `specbranch=False` decodes as transformers does.
- {PLAIN_FAILS}: transformers' own `generate()` does not run on such inputs.
- {NOT_BUILT}: needs a package that was not installed, or has no tiny form.
"""
_SECTIONS = {
    "Wrong": (WRONG, ERROR, NEAR_TIE),
    "Equal": (EQUAL,),
    "Refused": (REFUSED,),
    "Not compared": (PLAIN_FAILS, NOT_BUILT),
}


def _row(result: Result) -> str:
    family = result.family
    cells = (family.name, f"`{family.model_class}`", result.states(False), result.states(True), result.note)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
