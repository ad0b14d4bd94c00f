"""Put target and draft on a device each, so that drafting during a target pass costs nothing.

python examples/two_devices.py
"""

import torch

from hf_specbranch import load_demo_pair, specbranch


def devices() -> tuple[str, str]:
    """Return two GPUs, or what this machine has."""
    if torch.cuda.device_count() >= 2:
        return "cuda:0", "cuda:1"
    if torch.cuda.is_available():
        print("One GPU only: both models share it.")
        return "cuda:0", "cuda:0"
    print("No GPU: both models run on the CPU.")
    return "cpu", "cpu"


def main(max_new_tokens: int = 64) -> None:
    for_target, for_draft = devices()
    target, draft, tokenizer = load_demo_pair()
    model = specbranch(target.to(for_target), draft=draft.to(for_draft))
    inputs = tokenizer("def add(a, b):", return_tensors="pt").to(for_target)
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    print(tokenizer.decode(out[0]))
    stats = model.specbranch_stats
    print(f"\ntarget on {for_target}, draft on {for_draft}: {stats.hidden_fraction:.0%} of the drafting was hidden")


if __name__ == "__main__":
    main()
