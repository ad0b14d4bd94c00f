"""The length head as users meet it: loaded by name, checked against a pair, and bound to a target as a hook."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.hooks import LengthHeadHook
from . import hub
from .cache import LeastRecentlyUsed
from .config import DEMO_HEADS, LengthHeadConfig, ModelIdentity, tokenizer_hash
from .files import WEIGHTS, read, save
from .folded import BoundHead
from .network import HeadNetwork
from .validation import HeadError, HeadUnavailableError

logger = logging.getLogger("hf_specbranch")
PairKey = tuple[ModelIdentity, ModelIdentity, str | None]  # target, draft and the hash of their vocabulary


class LengthHead(HeadNetwork):
    """Predicts, before the target verifies a draft, whether none (0), some (1) or all (2) of it will be accepted.

    It is the H-RAD of the paper: 0 sends nothing, 2 sends the whole draft, 1 lets confidence decide. Pass it to
    `generate(length_head=head)` or `specbranch(model, head=head)`. A head cannot make the output wrong: it decides
    what is sent to the target in this round, and what is not sent is kept.

    Args:
        config: its inputs and sizes.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer, head = load_demo_pair(draft="weak", head=True)
        >>> model = specbranch(target, draft=draft, head=head)
        >>> out = model.generate(**tokenizer("def add(a, b):", return_tensors="pt"), max_new_tokens=16)
    """

    origin = ""  # where it was loaded from: `org/head@commit`, or a folder

    def bind(self, target: PreTrainedModel) -> LengthHeadHook:
        """Return the head as a hook, on the target's device, reading the target's embeddings."""
        embeddings = target.get_input_embeddings()
        self.to(next(embeddings.parameters()).device).eval()
        return LengthHeadHook(BoundHead(self, embeddings))

    def check_pair(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None) -> None:
        """Refuse a pair the head was not trained for.

        Args:
            target: the model whose states it would read.
            draft: the model whose drafts it would decide about.
            tokenizer: the pair's; compared by its vocabulary if the head knows one.

        Raises:
            HeadError: naming each field that rules the pair out. Where only an id or a revision differs, that is a
                warning: the output stays exact, the head may merely help less.
        """
        self.config.check_fit(target, draft, tokenizer)
        doubts: list[str] = []
        for role, known, model in (("target", self.config.target, target), ("draft", self.config.draft, draft)):
            doubts += known.different_origin(ModelIdentity.of(model), role)
        if doubts:
            warnings.warn(
                f"the length head was trained for another version of this pair ({'; '.join(doubts)}): the output "
                f"stays exact, the head may help less",
                stacklevel=2,
            )

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json, model.safetensors and a model card; return the folder."""
        return save(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> LengthHead:
        """Load a head from a folder or from the Hub.

        Args:
            name_or_path: a folder, or a repository id; `org/head@revision` pins a revision.
            revision: branch, tag or commit, as an alternative to the @.
            token: for private repositories; by default the one you logged in with.
            cache_dir: where downloads are kept.
            local_files_only: do not use the network.

        Raises:
            OSError: it is not available: no such repository, no access, no connection.
            ValueError: it is damaged, or no head this version can read (`HeadError`).

        Example:
            >>> from hf_specbranch import LengthHead
            >>> head = LengthHead.from_pretrained("org/some-head@v1")  # doctest: +SKIP
        """
        return cls._from_folder(hub.locate(name_or_path, revision, token, cache_dir, local_files_only))

    @classmethod
    def _from_folder(cls, folder: Path) -> LengthHead:
        config, tensors = read(folder)
        with torch.device("meta"):  # the weights come from the file
            head = cls(config)
        head.load_state_dict(tensors, strict=True, assign=True)
        head.origin = hub.origin_of(folder)
        return head.eval()

    def push_to_hub(
        self, repo_id: str, private: bool = False, token: str | bool | None = None, revision: str | None = None
    ) -> str:
        """Upload the head with its model card; return the address of the commit."""
        return hub.push(self, repo_id, private, token, revision)


class HeadStore:
    """Heads that were loaded from a folder or found on the Hub; those used last are kept.

    Args:
        limit: how many of each are kept.
    """

    def __init__(self, limit: int) -> None:
        self._loaded: LeastRecentlyUsed[tuple[str, int], LengthHead] = LeastRecentlyUsed(limit)
        self._found: LeastRecentlyUsed[PairKey, LengthHead | None] = LeastRecentlyUsed(limit)

    def named(self, name: str) -> LengthHead:
        """Load a head by folder or repository id; load it again if its file has changed."""
        folder = hub.locate(name)
        return self._loaded.get((str(folder), _changed(folder)), lambda _: LengthHead._from_folder(folder))

    def for_pair(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> LengthHead | None:
        """Return the best head on the Hub for a pair, or None; each pair is searched and reported once."""
        vocabulary = None if tokenizer is None else tokenizer_hash(tokenizer)
        pair = (ModelIdentity.of(target), ModelIdentity.of(draft), vocabulary)
        return self._found.get(pair, lambda _: self._first_that_fits(target, draft, tokenizer))

    def _first_that_fits(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> LengthHead | None:
        """Return the first candidate that is valid and made for this pair; log why the others are skipped."""

        def attempt(name: str, load: Callable[[], LengthHead]) -> LengthHead | None:
            try:
                return load()
            except (HeadError, HeadUnavailableError) as error:
                logger.warning("length_head='auto': skipping %s: %s", name, error)
                return None

        def accept(config: LengthHeadConfig) -> None:
            config.check_fit(target, draft, tokenizer)

        def embedded(folder: Path) -> LengthHead:
            head = self.named(str(folder))
            accept(head.config)
            return head

        def published(found: hub.Found) -> LengthHead:
            return LengthHead._from_folder(hub.download(found.repo_id, found.revision, accept=accept))

        pair = (ModelIdentity.of(target).id, ModelIdentity.of(draft).id)
        if pair in DEMO_HEADS and (head := attempt("the embedded head", partial(embedded, DEMO_HEADS[pair]))):
            return head
        try:
            candidates = [found for found in hub.search(*pair) if found.for_draft]
        except OSError as error:
            logger.warning("length_head='auto': %s; going on without a head", error)
            return None
        for candidate in candidates:
            if head := attempt(candidate.repo_id, partial(published, candidate)):
                logger.warning("length_head='auto': using %s at revision %s", candidate.repo_id, candidate.revision)
                return head
        logger.warning("length_head='auto': no head for %s with %s on the Hub; going on without one", *pair)
        return None


def _changed(folder: Path) -> int:
    try:
        return (folder / WEIGHTS).stat().st_mtime_ns
    except OSError:  # loading says what is wrong
        return 0


_HEADS = HeadStore(limit=16)


def resolve_head(given: Any, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None) -> Any:
    """Turn what a user passed as `length_head` into a hook or callable, or None.

    Args:
        given: None, a callable or hook (returned as it is), a `LengthHead`, a folder, a repository id with or
            without `@revision`, or "auto".
        target: the model whose states the head reads.
        draft: the model whose drafts it judges.
        tokenizer: the pair's, if at hand.

    Raises:
        HeadUnavailableError: a named head is not available.
        HeadError: it is damaged or made for another pair.
    """
    if isinstance(given, str):
        given = _HEADS.for_pair(target, draft, tokenizer) if given == "auto" else _HEADS.named(given)
    if not isinstance(given, LengthHead):
        return given
    given.check_pair(target, draft, tokenizer)
    return given.bind(target)
