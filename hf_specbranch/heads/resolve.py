"""From what a user gives as `length_head` to a hook of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..decoding.hooks import SpeculationHook
from .cache import LeastRecentlyUsed
from .config import LengthHeadConfig
from .files import WEIGHTS, load
from .hub import Accept, load_found, locate, search
from .identity import DEMO_HEADS, ModelIdentity, tokenizer_hash
from .model import LengthHead
from .validation import HeadError, HeadUnavailableError

logger = logging.getLogger("hf_specbranch")
PairKey = tuple[ModelIdentity, ModelIdentity, str | None]  # target, draft and the hash of their vocabulary


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
        given = _HEADS.for_pair(target, draft, tokenizer) if given == "auto" else _HEADS.named(given)
    if not isinstance(given, LengthHead):
        return given
    given.check_pair(target, draft, tokenizer)
    hook: SpeculationHook = given.bind(target)
    return hook


class HeadStore:
    """Heads that were loaded from a folder or found on the Hub; those used last are kept.

    Args:
        limit: how many of each are kept.
    """

    def __init__(self, limit: int) -> None:
        self._loaded: LeastRecentlyUsed[tuple[str, int], LengthHead] = LeastRecentlyUsed(limit)
        self._found: LeastRecentlyUsed[PairKey, LengthHead | None] = LeastRecentlyUsed(limit)

    def named(self, name: str) -> LengthHead:
        """Load a head by folder or repository id; again if its file has changed."""
        folder = locate(name)
        return self._loaded.get((str(folder), _changed(folder)), lambda _: load(folder))

    def for_pair(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> LengthHead | None:
        """Return the best head on the Hub for a pair, or None; each pair is searched and reported once."""
        vocabulary = None if tokenizer is None else tokenizer_hash(tokenizer)
        pair = (ModelIdentity.of(target), ModelIdentity.of(draft), vocabulary)
        return self._found.get(pair, lambda _: self._first_that_fits(target, draft, tokenizer))

    def _first_that_fits(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> LengthHead | None:
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
        if pair in DEMO_HEADS and (
            head := attempt("the embedded head", partial(self._embedded, DEMO_HEADS[pair], accept))
        ):
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

    def _embedded(self, folder: Path, accept: Accept) -> LengthHead:
        head = self.named(str(folder))
        accept(head.config)
        return head


def _changed(folder: Path) -> int:
    try:
        return (folder / WEIGHTS).stat().st_mtime_ns
    except OSError:  # `load` says what is wrong
        return 0


_HEADS = HeadStore(limit=16)
