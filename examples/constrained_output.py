"""Constrain the output with your own logits processor: it allows only a list of whole numbers.

python examples/constrained_output.py

The processor has state (how many numbers so far), so it must see every prefix once and in order, and it does. With
`fork` and `rollback` it also guides the draft. Without them the output is the same, but slower.
"""

import torch
from transformers import LogitsProcessor

from hf_specbranch import load_demo_pair, specbranch


class NumberList(LogitsProcessor):
    """Allows digits and commas in turn: `count` numbers of one digit, then the closing bracket and the end."""

    def __init__(self, tokenizer, count, step=0):
        self.tokenizer, self.count, self.step = tokenizer, count, step
        self.digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
        self.comma, self.bracket = (tokenizer.convert_tokens_to_ids(mark) for mark in ",]")

    def allowed(self):
        if self.step >= 2 * self.count:
            return [self.tokenizer.eos_token_id]
        if self.step == 2 * self.count - 1:
            return [self.bracket]
        return self.digits if self.step % 2 == 0 else [self.comma]

    def __call__(self, input_ids, scores):
        mask = torch.full_like(scores, float("-inf"))
        mask[:, self.allowed()] = 0
        self.step += 1
        return scores + mask

    def fork(self):
        return NumberList(self.tokenizer, self.count, self.step)

    def rollback(self, n):
        self.step -= n


def main(count: int = 12) -> None:
    target, draft, tokenizer = load_demo_pair()
    model = specbranch(target)
    inputs = tokenizer("primes = [", return_tensors="pt")
    arguments = {"max_new_tokens": 4 * count, "do_sample": False}
    out = model.generate(**inputs, **arguments, assistant_model=draft, logits_processor=[NumberList(tokenizer, count)])
    stats = model.specbranch_stats
    print(tokenizer.decode(out[0], skip_special_tokens=True))
    plain = target.generate(**inputs, **arguments, logits_processor=[NumberList(tokenizer, count)], specbranch=False)
    print("the same as plain generate():", torch.equal(out, plain))
    print(f"{stats.new_tokens} tokens in {stats.target_forwards} target passes")


if __name__ == "__main__":
    main()
