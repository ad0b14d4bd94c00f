"""Train a length head for a pair, and generate with it.

python examples/train_and_use_head.py

This takes a minute and far too little data for a good head. `docs/heads.md` describes how to train one that pays.
"""

import tempfile
from pathlib import Path

from hf_specbranch import LengthHead, load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts
from hf_specbranch.heads.collect import collect
from hf_specbranch.heads.dataset import CollectSettings
from hf_specbranch.heads.train import TrainSettings, train


def main(prompts: int = 16, max_new_tokens: int = 48, epochs: int = 10) -> None:
    target, draft, tokenizer = load_demo_pair(draft="weak")
    *seen, unseen = python_prompts()[: prompts + 1]
    with tempfile.TemporaryDirectory() as folder:
        drafts, saved = Path(folder, "drafts"), Path(folder, "head")
        settings = CollectSettings(temperatures=(0.0,), max_new_tokens=max_new_tokens, batch_size=8)
        manifest = collect(target, draft, tokenizer, seen, Path("python40.jsonl"), drafts, settings, progress=False)
        print(f"{manifest.samples} drafts recorded")
        fitted = train(drafts, TrainSettings(epochs=epochs), progress=False)
        fitted.head.save_pretrained(saved)
        head = LengthHead.from_pretrained(saved)  # or a repository id on the Hub

    model = specbranch(target, draft=draft)
    inputs = tokenizer(unseen.prompt, return_tensors="pt")
    for name, chosen in (("confidence only", None), ("with the head", head)):
        arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "specbranch": {"policy": "specbranch"}}
        model.generate(**inputs, **arguments, length_head=chosen)
        stats = model.specbranch_stats
        print(f"{name}: {stats.rollback_rate:.0%} rolled back, {stats.mean_acceptance_length:.2f} tokens per pass")


if __name__ == "__main__":
    main()
