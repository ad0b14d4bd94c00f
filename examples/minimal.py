"""The shortest start: attach, generate, read the statistics.

python examples/minimal.py
"""

import torch

from hf_specbranch import load_demo_pair, specbranch


def main(max_new_tokens: int = 64) -> None:
    target, draft, tokenizer = load_demo_pair()  # or any two models with the same tokenizer
    model = specbranch(target)  # same object, same weights
    inputs = tokenizer("def add(a, b):", return_tensors="pt")

    out = model.generate(**inputs, assistant_model=draft, max_new_tokens=max_new_tokens, do_sample=False)
    print(tokenizer.decode(out[0]))

    stats = model.specbranch_stats
    print(f"\n{stats.new_tokens} tokens in {stats.target_forwards} target passes")

    plain = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    print("the same tokens as plain generate():", torch.equal(out, plain))


if __name__ == "__main__":
    main()
