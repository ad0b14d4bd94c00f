"""Train a length head for a pair, and compare it with one that was trained on enough data.

python examples/train_and_use_head.py

A head predicts before each target pass how much of the draft will be accepted, so that the target reads fewer tokens in
vain. That matters where a draft is often wrong and each token of a pass costs time: with weak drafts, in batches, on a
CPU. The head trained here takes a minute and has seen far too little; that of the embedded pair has seen a hundred
times as many drafts. `docs/heads.md` describes how to train one that pays.
"""

import tempfile
from pathlib import Path

from hf_specbranch import LengthHead, load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts
from hf_specbranch.heads.collect import collect
from hf_specbranch.heads.dataset import CollectSettings
from hf_specbranch.heads.train import TrainSettings, train


def main(prompts: int = 16, max_new_tokens: int = 48, epochs: int = 10, unseen: int = 8) -> None:
    target, draft, tokenizer, embedded = load_demo_pair(draft="weak", head=True)
    seen = python_prompts()[:prompts]
    with tempfile.TemporaryDirectory() as folder:
        drafts, saved = Path(folder, "drafts"), Path(folder, "head")
        settings = CollectSettings(temperatures=(0.0,), max_new_tokens=max_new_tokens, batch_size=8)
        manifest = collect(target, draft, tokenizer, seen, Path("python40.jsonl"), drafts, settings, progress=False)
        print(f"{manifest.samples} drafts recorded")
        fitted = train(drafts, TrainSettings(epochs=epochs), progress=False)
        fitted.head.save_pretrained(saved)
        head = LengthHead.from_pretrained(saved)  # or a repository id on the Hub
    if not head.config.acts:
        print("The head trained here never decides anything: too few drafts to find thresholds that help.")

    model = specbranch(target, draft=draft)
    tokenizer.padding_side = "left"
    inputs = tokenizer([each.prompt for each in python_prompts()[-unseen:]], return_tensors="pt", padding=True)
    for name, chosen in (("no head", None), ("trained here", head), ("the embedded pair's head", embedded)):
        arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "specbranch": {"policy": "specbranch"}}
        model.generate(**inputs, **arguments, length_head=chosen)
        stats = model.specbranch_stats
        print(f"{name}: {stats.rollback_rate:.0%} rolled back, {stats.mean_acceptance_length:.2f} tokens per pass")


if __name__ == "__main__":
    main()
