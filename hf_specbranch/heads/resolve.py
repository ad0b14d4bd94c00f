"""From what a user gives as `length_head` to a hook of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..decoding.hooks import SpeculationHook
from .config import LengthHeadConfig
from .files import WEIGHTS, load
from .hub import Accept, load_found, locate, search
from .identity import DEMO_HEADS, ModelIdentity, tokenizer_hash
from .model import LengthHead
from .validation import HeadError, HeadUnavailableError

logger = logging.getLogger("hf_specbranch")
_loaded: dict[tuple[str, int], LengthHead] = {}  # by folder and time of change
# By pair and vocabulary; one search and one message per process.
_searched: dict[tuple[ModelIdentity, ModelIdentity, str | None], LengthHead | None] = {}


def resolve_head(given: Any, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None) -> Any:
    """A hook or callable for the loop, or None.

    Args:
        given: None, a callable or hook (returned as it is), a `LengthHead`, a folder, a repository id with or
            without `@revision`, or "auto".
        target: the model the head reads.
        draft: the model it judges.
        tokenizer: theirs, if at hand.

    Raises:
        HeadUnavailableError: a named head cannot be had.
        HeadError: it is damaged or made for another pair.
    """
    if isinstance(given, str):
        given = _automatic(target, draft, tokenizer) if given == "auto" else _named(given)
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
    try:
        return (folder / WEIGHTS).stat().st_mtime_ns
    except OSError:  # `load` says what is wrong
        return 0


def _automatic(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> LengthHead | None:
    """The best head on the Hub for this pair; without one, generation goes on."""
    vocabulary = None if tokenizer is None else tokenizer_hash(tokenizer)
    pair = (ModelIdentity.of(target), ModelIdentity.of(draft), vocabulary)
    if pair not in _searched:
        _searched[pair] = _first_that_fits(target, draft, tokenizer)
    return _searched[pair]


def _first_that_fits(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> LengthHead | None:
    """The first candidate that is sound and made for this pair; the others are named in the log."""

    def attempt(name: str, load_it: Callable[[], LengthHead]) -> LengthHead | None:
        try:
            return load_it()
        except (HeadError, HeadUnavailableError) as error:
            logger.warning("length_head='auto': skipping %s: %s", name, error)
            return None

    def accept(config: LengthHeadConfig) -> None:
        config.check_fit(target, draft, tokenizer)

    pair = (ModelIdentity.of(target).id, ModelIdentity.of(draft).id)
    if pair in DEMO_HEADS and (head := attempt("the embedded head", partial(_embedded, DEMO_HEADS[pair], accept))):
        return head
    try:
        candidates = [found for found in search(*pair) if found.for_draft]
    except OSError as error:
        logger.warning("length_head='auto': %s; going on without a head", error)
        return None
    for candidate in candidates:
        if head := attempt(candidate.repo_id, partial(load_found, candidate, accept)):
            logger.warning("length_head='auto': using %s at revision %s", candidate.repo_id, candidate.revision)
            return head
    logger.warning("length_head='auto': no head for %s with %s on the Hub; going on without one", *pair)
    return None


def _embedded(folder: Path, accept: Accept) -> LengthHead:
    head = _named(str(folder))
    accept(head.config)
    return head
