"""Two tokenizers: the bytes of their tokens, the tokens that they share, and texts of one in tokens of the other.

A token stands for some bytes of text, whatever its tokenizer calls it. Two tokens with the same bytes are shared. Other
tokens are read as several. Nothing here can make a text wrong: a poor translation is a poor draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .model_state import state_of

_serials = count()
SPACES = (b" ", b"\n", b"\t", b"\r")


def byte_level_alphabet() -> dict[str, int]:
    """Return the characters that byte-level tokenizers write for bytes: themselves if printable, others above 255.

    Example:
        >>> alphabet = byte_level_alphabet()
        >>> len(alphabet), alphabet["a"], alphabet["Ġ"]
        (256, 97, 32)
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class Vocabulary:
    """The tokens of a tokenizer as bytes.

    Args:
        tokenizer: any tokenizer of transformers.
        size: how many tokens its model scores; further ones are left out.

    Attributes:
        data: by id, the bytes of each token; None for special tokens and ids without a token.
        ids: the token of each sequence of bytes.
        special: the special tokens by name.
        begin: what the tokenizer puts before a text.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if index < size}
        special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        names = {index: name for name, index in tokenizer.get_vocab().items() if index < size}
        self.special = {names[index]: index for index in sorted(special) if index in names}
        to_bytes = self._reader()
        self.data: list[bytes | None] = [None] * size
        for index, name in names.items():
            if index not in special:
                self.data[index] = str(added[index]).encode() if index in added else to_bytes(name)
        self.ids: dict[bytes, int] = {}
        # A byte that stands for itself comes after tokens of text with the same bytes.
        for index in sorted(names, key=lambda index: (names[index].startswith("<0x"), index)):
            if data := self.data[index]:
                self.ids.setdefault(data, index)
        self.longest = max(map(len, self.ids), default=0)
        marked, plain = self._encoded("a", add_special_tokens=True), self._encoded("a")
        self.begin = marked[: marked.index(plain[0])] if plain and plain[0] in marked else []
        self.end: int | None = tokenizer.eos_token_id
        known = (self.end, tokenizer.bos_token_id, tokenizer.pad_token_id)
        self.filler = next((token for token in known if token is not None and token < size), 0)  # for what has no bytes
        self.adds_space = self.bytes_of(plain) == b" a"

    def _reader(self) -> Any:
        """Return the function from the name of a token to its bytes."""
        shown = "".join(self.tokenizer.convert_ids_to_tokens(self._encoded("a b")))
        alphabet = byte_level_alphabet()
        if "Ġ" in shown:
            return lambda name: (
                bytes(alphabet[char] for char in name) if alphabet.keys() >= set(name) else name.encode()
            )
        if "▁" in shown:
            return lambda name: bytes([int(name[3:-1], 16)]) if _is_byte(name) else name.replace("▁", " ").encode()
        return str.encode

    def _encoded(self, text: str, add_special_tokens: bool = False) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return [token for token in found if token < self.size]

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """Return the text of tokens; special ones have none."""
        return b"".join(self.data[token] or b"" for token in tokens)

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text that continues another: nothing is put before it.

        Example:
            >>> from hf_specbranch import load_demo_pair
            >>> tokenizer = load_demo_pair()[2]
            >>> vocabulary = Vocabulary(tokenizer, len(tokenizer))
            >>> vocabulary.bytes_of(vocabulary.encode(b" return x"))
            b' return x'
        """
        whole = text[: len(text) - incomplete_bytes(text)]
        try:
            found = self._encoded(whole.decode()) if whole else []
        except UnicodeDecodeError:  # a token of bytes that are no text
            return self.pieces(whole)
        if not self.adds_space or not self.bytes_of(found).startswith(b" " + whole[:1]):
            return found
        return [*self.pieces((self.data[found[0]] or b" ")[1:]), *found[1:]]

    def pieces(self, data: bytes) -> list[int]:
        """Return tokens with these bytes, the longest first token, the longest second, and so on."""
        found, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self.longest), start, -1)
            end = next((end for end in ends if data[start:end] in self.ids), None)
            if end is not None:
                found.append(self.ids[data[start:end]])
            start = end or start + 1
        return found


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def incomplete_bytes(text: bytes) -> int:
    """Return how many bytes at the end begin a character that is not complete.

    Example:
        >>> incomplete_bytes("é".encode()), incomplete_bytes("é".encode()[:1]), incomplete_bytes("世".encode()[:2])
        (0, 1, 2)
    """
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


@dataclass(frozen=True)
class Sharing:
    """How much of two vocabularies is shared."""

    tokens: int  # that both have
    of_target: float  # their fraction of the target's tokens
    of_draft: float  # their fraction of the draft's tokens


class Translation:
    """Texts and tokens of a target in those of a draft, and back.

    Args:
        target: the target's tokens.
        draft: the draft's.

    Attributes:
        to_draft: the draft's token for each shared token of the target.
        to_target: the target's token for each shared token of the draft.
        serial: names this object in keys of captured stages; never reused.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft, self.serial = target, draft, next(_serials)
        pairs = [(ours, draft.ids[data]) for data, ours in target.ids.items() if data in draft.ids]
        pairs += [(ours, draft.special[name]) for name, ours in target.special.items() if name in draft.special]
        self.to_draft = dict(pairs)
        self.to_target = {theirs: ours for ours, theirs in pairs}
        ours, theirs = target.end, draft.end
        if ours is not None and theirs is not None and ours not in self.to_draft and theirs not in self.to_target:
            self.to_draft[ours], self.to_target[theirs] = theirs, ours
        self.tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def sharing(self) -> Sharing:
        """How much is shared."""
        tokens = len(self.to_draft)
        sizes = (len(each.ids) + len(each.special) for each in (self.target, self.draft))
        return Sharing(tokens, *(tokens / max(1, size) for size in sizes))

    @cached_property
    def last_pieces(self) -> list[int]:
        """For each token of the target, the draft's token for it, or for the end of it."""
        found = [self.draft.filler] * self.target.size
        for token, data in enumerate(self.target.data):
            if token in self.to_draft:
                found[token] = self.to_draft[token]
            elif data and (pieces := self.draft.pieces(data)):
                found[token] = pieces[-1]
        return found

    def pieces(self, token: int) -> list[int]:
        """Return the draft's tokens for one of the target, at least one."""
        if token in self.to_draft:
            return [self.to_draft[token]]
        data = self.target.data[token] if token < self.target.size else None
        return self.draft.pieces(data or b"") or [self.draft.filler]

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's tokens for the beginning of a text: its text is encoded again, between special tokens."""
        found, text = list(self.draft.begin), b""
        for token in [*tokens, None]:
            data = None if token is None or token >= self.target.size else self.target.data[token]
            if data is not None:
                text += data
                continue
            if text:
                at_start, text = len(found) == len(self.draft.begin), text.decode(errors="replace").encode()
                found += self.draft._encoded(text.decode()) if at_start else self.draft.encode(text)
                text = b""
            special = self.to_draft.get(token) if token is not None else None
            if special is not None and found != [special]:
                found.append(special)
        return found or [self.draft.filler]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return `last_pieces`, and the shared tokens of the target and of the draft in one order, on a device."""
        if device not in self.tables:
            ours, theirs = zip(*sorted(self.to_draft.items())) if self.to_draft else ((), ())
            made = (torch.tensor(each, dtype=torch.long) for each in (self.last_pieces, ours, theirs))
            self.tables[device] = tuple(each.to(device) for each in made)  # type: ignore[assignment]
        return self.tables[device]


def translation_for(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any
) -> Translation | None:
    """Return how to translate between the tokenizers of two models; None if they have the same tokens.

    The last one is kept with the target, since to read two vocabularies takes a second.
    """
    state = state_of(target)
    sizes = tuple(usable_tokens(model) for model in (target, draft))
    key = (len(tokenizer), len(draft_tokenizer), *sizes)
    if state.translation is not None:
        *given, known, found = state.translation
        if given[0] is tokenizer and given[1] is draft_tokenizer and known == key:
            return found  # type: ignore[no-any-return]
    made = None
    if tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        made = Translation(Vocabulary(tokenizer, sizes[0]), Vocabulary(draft_tokenizer, sizes[1]))
        if not made.to_draft:
            raise ValueError("the tokenizers of target and draft have no token in common: choose another draft")
    state.translation = tokenizer, draft_tokenizer, key, made
    return made


def load_tokenizer(name: str, **how: Any) -> Any:
    """Return the tokenizer of a folder or repository; None if it has none. `how`: as `from_pretrained` takes it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **how) if name else None
    except (OSError, ValueError, TypeError, KeyError, ImportError):  # nothing there, or nothing that can be read
        return None


def usable_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens a model reads and scores."""
    output = getattr(model.get_output_embeddings(), "weight", None)
    scored = model.config.get_text_config(decoder=True).vocab_size if output is None else output.shape[0]
    return int(min(scored, model.get_input_embeddings().weight.shape[0]))
