"""Stream a conversation, and keep the target's KV cache between turns.

python examples/streaming_chat.py

The embedded pair writes Python and has no chat template, so turns follow each other. With a chat model, build the text
of each turn with `tokenizer.apply_chat_template`. `hf-specbranch chat` does the same, with commands.
"""

from threading import Thread

import torch
from transformers import DynamicCache, TextIteratorStreamer

from hf_specbranch import load_demo_pair, specbranch

TURNS = ('def area(width, height):\n    """', "\n\ndef volume(width, height, depth):\n", "\n\nclass Box:\n")


def main(max_new_tokens: int = 32) -> None:
    target, draft, tokenizer = load_demo_pair()
    model = specbranch(target, draft=draft)
    cache = DynamicCache(config=target.config)
    text = torch.empty((1, 0), dtype=torch.long)
    for turn in TURNS:
        text = torch.cat([text, tokenizer(turn, return_tensors="pt")["input_ids"]], dim=1)
        print(f"[{cache.get_seq_length()} of {text.shape[1]} tokens are in the cache]{turn}", end="")
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        answer = {}

        def generate(answer=answer, text=text, streamer=streamer):
            answer["text"] = model.generate(
                text,
                attention_mask=torch.ones_like(text),
                past_key_values=cache,
                streamer=streamer,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )

        thread = Thread(target=generate)
        thread.start()
        for part in streamer:  # arrives while the model still generates
            print(part, end="", flush=True)
        thread.join()
        print()
        text = answer["text"]


if __name__ == "__main__":
    main()
