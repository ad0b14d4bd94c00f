"""Turns tokens into text as they come, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # tokens before the new ones that are decoded with them: some tokenizers join spaces to the next word
INCOMPLETE = "\ufffd"  # how an unfinished character is decoded


class Detokenizer:
    """The text of a growing list of tokens. Special tokens are left out.

    Args:
        tokenizer: of the target.
        stop: strings that end the text. The first of them, and what follows it, is not part of the text.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> tokenizer = load_demo_pair()[2]
        >>> text = Detokenizer(tokenizer, stop=["return"])
        >>> for token in tokenizer("def add(a, b): return a + b").input_ids:
        ...     if text.add(token):
        ...         break
        >>> text.text
        'def add(a, b): '
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.longest = max(map(len, self.stop), default=0)
        self.tokens: list[int] = []
        self.first = self.decoded = 0  # the context begins here; tokens up to here are in the text
        self.text = ""
        self.stopped = False

    def add(self, *tokens: int) -> bool:
        """Take more tokens; return whether a stop string ended the text."""
        self.tokens += tokens
        before = self._decode(self.tokens[self.first : self.decoded])
        after = self._decode(self.tokens[self.first :])
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return self.stopped
        grown = self.text + after[len(before) :]
        self.decoded = len(self.tokens)
        self.first = self._context_begin()
        # Another thread may read the text, so it changes at once, without what a stop string cuts off.
        self.text, self.stopped = self._before_stop(grown, len(after) - len(before))
        return self.stopped

    def _context_begin(self) -> int:
        """Return a token some way before the end that does not continue a character."""
        begin = max(0, len(self.tokens) - CONTEXT)
        earliest = max(0, begin - CONTEXT)
        while begin > earliest and self._decode(self.tokens[begin:]).startswith(INCOMPLETE):
            begin -= 1
        return begin

    def finish(self) -> None:
        """Take what is left of an unfinished character: there are no more tokens."""
        before = self._decode(self.tokens[self.first : self.decoded])
        rest = self._decode(self.tokens[self.first :])[len(before) :]
        self.text += "" if self.stopped else rest
        self.decoded = len(self.tokens)

    def final_text(self) -> str:
        """Return the text that will stay whatever follows: without what may be the beginning of a stop string."""
        stopped, text = self.stopped, self.text
        if stopped:
            return text
        for size in range(min(self.longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stop):
                return text[:-size]
        return text

    def _before_stop(self, text: str, new: int) -> tuple[str, bool]:
        """Return the text up to the first stop string that ends in its `new` last characters, and if there is one."""
        begin = max(0, len(text) - new - self.longest + 1)
        places = [at for stop in self.stop if (at := text.find(stop, begin)) >= 0]
        return (text[: min(places)], True) if places else (text, False)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
