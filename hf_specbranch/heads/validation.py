"""Checks on what is read from files: a head may come from anyone.

Every defect raises `HeadError`, which says what was expected and what was found.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

LARGEST_DEPTH = 16  # of nested JSON in a config
LONGEST_TEXT = 4096
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # would break lines of a card or a log

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxdict = 2, 8, 4
_short.maxstring = _short.maxlong = _short.maxother = 80

Check = Callable[[str, Any], None]


class HeadError(ValueError):
    """A length head that cannot be used: damaged, of another format, or made for another pair."""


class HeadUnavailableError(FileNotFoundError):
    """A length head that is not available: no such folder or repository, no access, no connection."""


def shown(value: Any) -> str:
    """Format a value for an error message: on one line, and never long."""
    return _short.repr(value)


def refuse(name: str, value: Any, expected: str) -> HeadError:
    return HeadError(f"{name}={shown(value)}: expected {expected}")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refuse(name, value, f"a whole number of at least {low} and at most {high}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is not a number from `low` to `high`; NaN is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise refuse(name, value, f"a number from {low} to {high}")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or CONTROL.search(value):
        raise refuse(name, value, f"a text of one line and at most {LONGEST_TEXT} characters")


def check_list(name: str, value: Any, least: int, most: int, entries: str) -> None:
    if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
        raise refuse(name, value, f"a list of {least} to {most} {entries}")


def check_depth(name: str, value: Any, depth: int = LARGEST_DEPTH) -> None:
    """Refuse JSON that is nested so deeply that reading, comparing or writing it would exhaust the stack."""
    if depth == 0:
        raise HeadError(f"{name} is nested deeply: expected at most {LARGEST_DEPTH} levels")
    if isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            check_depth(name, entry, depth - 1)


def check_record(name: str, value: Any, template: Any) -> None:
    """Compare a record with a template: a dict of required entries, a list of one entry, or a check.

    Args:
        name: for the message.
        value: what was read; further entries are allowed.
        template: what it must look like.
    """
    if isinstance(template, dict):
        if not isinstance(value, dict) or not set(template) <= set(value):
            raise refuse(name, value, f"an object with {', '.join(template)}" if template else "an object")
        for key, part in template.items():
            check_record(f"{name}.{key}", value[key], part)
    elif isinstance(template, list):
        if not isinstance(value, (list, tuple)):
            raise refuse(name, value, "a list")
        for number, entry in enumerate(value):
            check_record(f"{name}[{number}]", entry, template[0])
    else:
        template(name, value)


def _count(name: str, value: Any) -> None:
    check_whole(name, value, 0, 2**63 - 1)


def _figure(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 2**63:  # NaN may be measured
        raise refuse(name, value, "a number")


_SCORES = {"head": _figure, "confidence": _figure, "majority": _figure}
_TRAINED = {  # what the model card reads; `lines` is the number of drafts in format version 1
    "prompts": {"number": _count, "file": check_text, "sha256": check_text},
    "macro_f1": _SCORES,
    "accuracy": _SCORES,
    "lines": _count,
    "held_out_lines": _count,
    "classes": [_count],
    "temperatures": [_figure],
}
_RUN = {"temperature": _figure, "method": check_text, "rollback_rate": _figure, "tokens_per_pass": _figure}
_MEASURED = {"prompts": {"number": _count, "file": check_text}, "max_new_tokens": _count, "runs": [_RUN]}


def check_training(training: Any) -> None:
    """Check the parts of a head's training record that evaluation and the model card read; others may hold anything."""
    check_record("training", training, {})
    check_depth("training", training)
    check_record("training.prompts", training.get("prompts", {}), {})
    check_record("training.prompts.sets", training.get("prompts", {}).get("sets", []), [{}])
    if "macro_f1" in training:
        check_record("training", training, _TRAINED)
        check_list("training.classes", training["classes"], 3, 3, "numbers of drafts")
    if training.get("measured") is not None:
        check_record("training.measured", training["measured"], _MEASURED)


def check_tensors(
    found: dict[str, tuple[str, Sequence[int]]], expected: dict[str, tuple[str, Sequence[int]]], where: str
) -> None:
    """Compare names, types and shapes of tensors before any of them is read."""
    described = {name: f"{kind} {list(shape)}" for name, (kind, shape) in found.items()}
    wanted = {name: f"{kind} {list(shape)}" for name, (kind, shape) in expected.items()}
    names = sorted(name for name in {**wanted, **described} if wanted.get(name) != described.get(name))
    differences = [
        f"{shown(name)}: expected {wanted.get(name, 'no such tensor')}, found {described.get(name, 'none')}"
        for name in names[:4]
    ]
    if differences:
        more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
        raise HeadError(f"the weights in {where} do not match its config: {'; '.join(differences)}{more}")
