"""`hf-specbranch chat`: chat with a pair; the KV cache is kept between turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import options
from .printing import NO_STATISTICS, leaving_cleanly, note

if TYPE_CHECKING:
    from .conversation import Conversation

COMMANDS = "/stats: statistics of the last answer; /reset: start a new conversation; /quit: leave"


@options.with_generation_options()
def chat(
    given: options.GenerationOptions,
    as_json: options.Json = False,
) -> None:
    """Chat with a pair, line by line: /stats, /reset, /quit. Ctrl-C stops an answer.

    Example: hf-specbranch chat --target org/large-chat --draft org/small-chat --temperature 0.7
    """
    sampling, settings = given.sampling(), given.settings()
    arguments = sampling | given.limits() | {"specbranch": settings, "length_head": given.head()}
    with leaving_cleanly():
        import torch

        from .conversation import Conversation

        model, tokenizer = given.open_model()
        torch.manual_seed(given.seed)
        conversation = Conversation(model, tokenizer, arguments)
        if tokenizer.chat_template is None:
            note("This tokenizer has no chat template: your lines are continued as they are.")
        if sys.stdin.isatty():
            note(COMMANDS)
        for line in _lines():
            if line == "/quit":
                break
            if line.startswith("/"):
                _command(line, conversation)
            else:
                _answer(line, conversation, as_json)


def _lines() -> Iterator[str]:
    """Yield the lines that are typed or piped in; empty lines are skipped."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _command(line: str, conversation: Conversation) -> None:
    """Run one of the slash commands."""
    if line == "/reset":
        conversation.reset()
        note("new conversation")
    elif line != "/stats":
        note(f"{line}: no such command; {COMMANDS}")
    elif not conversation.stats:
        note("no answer has ended yet: there are no statistics")
    else:
        note(str(conversation.stats[-1] or NO_STATISTICS))
        note(f"{conversation.kept} tokens of the prompt were in the cache")
        turns = [stats for stats in conversation.stats if stats is not None]
        if seconds := sum(stats.total_seconds for stats in turns):
            note(f"{len(turns)} answers, {sum(stats.new_tokens for stats in turns) / seconds:.1f} tokens per second")


def _answer(line: str, conversation: Conversation, as_json: bool) -> None:
    from transformers import TextStreamer

    streamer = None if as_json else TextStreamer(conversation.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        answer = conversation.answer(line, streamer)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        if streamer is not None:
            streamer.end()  # prints the rest of what was generated
        note("(stopped; the conversation goes on from here)")
        return
    if as_json:
        stats = conversation.stats[-1]
        print(json.dumps({"answer": answer, "stats": stats and stats.to_dict()}), flush=True)
