"""Use pipeline() with a draft model, in two ways.

python examples/pipeline.py
"""

from transformers import pipeline

from hf_specbranch import load_demo_pair, specbranch


def main(max_new_tokens: int = 32) -> None:
    target, draft, tokenizer = load_demo_pair()
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False}

    # 1. Any pipeline takes a model that remembers its draft.
    pipe = pipeline("text-generation", model=specbranch(target, draft=draft), tokenizer=tokenizer)
    print(pipe("def add(a, b):", **arguments)[0]["generated_text"])

    # 2. Importing hf_specbranch registers a task that takes the draft: a model, a folder or a repository id.
    pipe = pipeline("specbranch-text-generation", model=target, draft=draft, tokenizer=tokenizer)
    for texts in pipe(["class Stack:", "import os\n"], batch_size=2, **arguments):
        print("-" * 40)
        print(texts[0]["generated_text"])
    print("\ntokens per target pass:", round(pipe.model.specbranch_stats.mean_acceptance_length, 2))


if __name__ == "__main__":
    main()
