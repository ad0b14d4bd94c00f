"""From what a user gives as `length_head` to a hook of the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..decoding.hooks import SpeculationHook
from .files import WEIGHTS, load
from .hub import load_found, locate, search
from .identity import DEMO_HEADS, ModelIdentity
from .model import LengthHead

logger = logging.getLogger("hf_specbranch")
_loaded: dict[tuple[str, int], LengthHead] = {}  # by folder and time of change
_searched: dict[tuple[str, str], LengthHead | None] = {}  # by pair; one search, one message a process


def resolve_head(given: Any, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None) -> Any:
    """A hook or callable for the loop, or None.

    Args:
        given: None, a callable or hook (returned as it is), a `LengthHead`, a folder, a repository id with or
            without `@revision`, or "auto".
        target: the model the head reads.
        draft: the model it judges.
        tokenizer: theirs, if at hand.

    Raises:
        OSError: a named head cannot be had.
        ValueError: it is damaged or made for another pair.
    """
    if isinstance(given, str):
        given = _automatic(target, draft) if given == "auto" else _named(given)
    if not isinstance(given, LengthHead):
        return given
    given.check_pair(target, draft, tokenizer)
    hook: SpeculationHook = given.bind(target)
    return hook


def _named(name: str) -> LengthHead:
    folder = locate(name)
    key = (str(folder), _changed(folder))
    if key not in _loaded:
        _loaded[key] = load(folder)
    return _loaded[key]


def _changed(folder: Path) -> int:
    weights = folder / WEIGHTS
    return weights.stat().st_mtime_ns if weights.exists() else 0


def _automatic(target: PreTrainedModel, draft: PreTrainedModel) -> LengthHead | None:
    """The best head on the Hub for this pair; without one, generation goes on."""
    pair = (ModelIdentity.of(target).id, ModelIdentity.of(draft).id)
    if pair not in _searched:
        _searched[pair] = _first_that_fits(pair, target, draft)
    return _searched[pair]


def _first_that_fits(pair: tuple[str, str], target: PreTrainedModel, draft: PreTrainedModel) -> LengthHead | None:
    if pair in DEMO_HEADS:
        return _named(str(DEMO_HEADS[pair]))
    try:
        candidates = [head for head in search(*pair) if head.for_draft]
    except OSError as error:
        logger.warning("length_head='auto': %s; going on without a head", error)
        return None
    for candidate in candidates:
        try:
            head = load_found(candidate)
            head.check_pair(target, draft)
        except (OSError, ValueError) as error:
            logger.warning("length_head='auto': passing over %s (%s)", candidate.repo_id, error)
            continue
        logger.warning("length_head='auto': using %s at revision %s", candidate.repo_id, candidate.revision)
        return head
    logger.warning("length_head='auto': no head for %s with %s on the Hub; going on without one", *pair)
    return None
