"""`hf-specbranch shortlist`: count the tokens of a corpus, for the shortlist of a draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .names import check_folder
from .printing import leaving_cleanly

SHARE_TESTED = 10  # every so manieth file or line is not counted, but used to say how much of a text is covered


def shortlist(
    corpus: Annotated[list[Path], typer.Argument(help="Text files, or JSON lines with a text or a prompt each.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or repository id of the target or the draft.")],
    out: Annotated[Path, typer.Option(help="The file to write: a JSON list of token ids.")],
    size: Annotated[int, typer.Option(min=1, help="How many tokens to keep.")] = 32768,
) -> None:
    """Write the most frequent tokens of a corpus to a file for the setting draft_shortlist.

    A draft with a shortlist reads only the rows of its output layer that belong to these tokens, to those of the
    prompt, and to the ends of a text. Use texts like those that will be generated. One text in ten is left out of the
    count, to say how many of its tokens are in the list.

    Example: hf-specbranch shortlist corpus/*.txt --tokenizer org/small --size 32768 --out tokens.json
    """
    with leaving_cleanly():
        check_folder("--tokenizer", tokenizer)
        options.check_file("--out", out)
        for path in corpus:
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file")
        from transformers import AutoTokenizer

        from ..layers.shortlist import most_frequent
        from .pair import naming_option

        with naming_option("--tokenizer", tokenizer):
            encode: Any = AutoTokenizer.from_pretrained(tokenizer)
        texts = [encode(text).input_ids for path in corpus for text in read_texts(path)]
        tested = texts[SHARE_TESTED - 1 :: SHARE_TESTED] or texts
        counted = [text for place, text in enumerate(texts) if (place + 1) % SHARE_TESTED]
        tokens = most_frequent(counted, size)
        out.write_text(json.dumps(tokens) + "\n")
        known = set(tokens)
        covered = sum(token in known for text in tested for token in text) / max(1, sum(map(len, tested)))
        print(f"{len(tokens)} tokens of {len(texts)} texts in {out}: {covered:.1%} of texts that were not counted.")


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file: that of each line of a .jsonl file, else the whole."""
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            record = json.loads(line)
            found = record.get("text", record.get("prompt")) if isinstance(record, dict) else None
            if not isinstance(found, str):
                raise ValueError(f"{path}, line {number}: expected an object with a text or a prompt")
            yield found
