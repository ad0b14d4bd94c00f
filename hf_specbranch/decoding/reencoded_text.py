"""One row's text in the tokens of a draft with another tokenizer, and the draft's tokens in those of the target.

Both sides are compared byte by byte. The draft's tokens stay as long as their bytes are those of the text. What the
target has added is encoded again from the last word on, so that the draft reads words as it knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabularies import SPACES, Translation, incomplete_bytes


class ReencodedText:
    """Follows the text of one row.

    Args:
        translation: between the two vocabularies.
        prompt: the target's tokens before the first that it generates.
        lookbehind: the most tokens of the draft that are encoded again with what follows them.
        longest: the most tokens of the draft to keep of the prompt, the last ones.

    Attributes:
        tokens: the text in the draft's tokens. Those that were drafted remain until the text contradicts them.
    """

    def __init__(self, translation: Translation, prompt: Sequence[int], lookbehind: int, longest: int) -> None:
        self.translation, self.lookbehind = translation, lookbehind
        self.tokens = translation.prompt(prompt)[-longest:]
        self.base = len(self.tokens)  # tokens that are not encoded again
        self.text = b""  # of the target since then
        self.ends: list[int] = []  # for each token from `base` on, the bytes of the text that it ends after
        self.right = 0  # of these tokens, how many are known to be the text

    def follow(self, new: Sequence[int]) -> int:
        """Take over tokens that the target has added; return how many of the draft's tokens have not changed."""
        before = list(self.tokens)
        for token in new:
            data = self.translation.target.data[token] if token < self.translation.target.size else None
            if data is not None:
                self.text += data
                continue
            self._encode_rest()  # a special token ends a text
            self.tokens += self.translation.pieces(token)
            self.base, self.text, self.ends, self.right = len(self.tokens), b"", [], 0
        self._encode_rest()
        same = (ours == theirs for ours, theirs in zip(self.tokens, before))
        return next((index for index, is_same in enumerate(same) if not is_same), min(len(self.tokens), len(before)))

    def _encode_rest(self) -> None:
        """Drop drafted tokens that are not the text, and encode what is missing."""
        draft, text = self.translation.draft, self.text
        begin = self.ends[self.right - 1] if self.right else 0
        while self.right < len(self.ends):
            end = self.ends[self.right]
            if end > len(text) or text[begin:end] != draft.data[self.tokens[self.base + self.right]]:
                break
            begin, self.right = end, self.right + 1
        keep, found = self.right, list[int]()
        if begin < len(text):
            keep = self._last_word()
            begin = self.ends[keep - 1] if keep else 0
            found = draft.encode(text[begin:])
        self.tokens[self.base + keep :], self.ends[keep:] = found, []
        for token in found:
            begin = min(len(text), begin + len(draft.data[token] or b""))
            self.ends.append(begin)
        if found:  # whatever the tokenizer has changed or left out, this is what it makes of the text
            self.ends[-1] = len(text) - incomplete_bytes(text)
        self.right = len(self.ends)

    def _last_word(self) -> int:
        """Return how many tokens come before the one that the last word begins with, if it is near."""
        for keep in range(self.right - 1, max(-1, self.right - 1 - self.lookbehind), -1):
            if (self.translation.draft.data[self.tokens[self.base + keep]] or b"")[:1] in SPACES:
                return keep
        return self.right

    def propose(self, drafted: Sequence[int]) -> list[int]:
        """Append tokens that the draft has drafted; return them as tokens of the target, as far as they go."""
        covered, data, end = self.ends[-1] if self.ends else 0, b"", list[int]()
        for token in drafted:
            piece = self.translation.draft.data[token] if token < self.translation.draft.size else None
            if piece is None:
                end = [self.translation.to_target[token]] if token in self.translation.to_target else []
                break
            data += piece
            self.tokens.append(token)
            self.ends.append(covered + len(data))
        missing = self.text[covered:]  # bytes of a character that was not complete
        if not data.startswith(missing):
            return []
        new = data[len(missing) :]
        return self.translation.target.encode(new) + (end if not incomplete_bytes(new) else [])
