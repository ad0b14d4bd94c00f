"""Control drafting with a hook: never draft past the end of a line of code.

python examples/custom_hook.py

The draft predicts the start of the next line badly, so the hook stops there and opens branches. Hooks never change the
text, only the work.
"""

import torch

from hf_specbranch import SpeculationHook, load_demo_pair, specbranch


class StopAtLineEnd(SpeculationHook):
    """Stops drafting after a newline, and opens three branches there."""

    def __init__(self, tokenizer):
        self.newlines = torch.tensor([i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])])

    def _line_ended(self, state):
        last = state.tokens.gather(1, state.length[:, None] - 1)[:, 0]  # [B] the token before this position
        return torch.isin(last, self.newlines.to(last.device))

    def stop(self, state):
        return self._line_ended(state)

    def fork(self, state):
        return torch.where(self._line_ended(state), 3, -1)  # -1: no opinion


def main(max_new_tokens: int = 64) -> None:
    target, draft, tokenizer = load_demo_pair()
    model = specbranch(target, draft=draft)
    inputs = tokenizer("class Stack:\n    def __init__(self):\n", return_tensors="pt")
    texts = []
    for name, hooks in (("built-in rules", []), ("with the hook", [StopAtLineEnd(tokenizer)])):
        arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "specbranch": {"policy": "specbranch"}}
        out = model.generate(**inputs, **arguments, speculation_hooks=hooks)
        stats = model.specbranch_stats
        print(
            f"{name}: {stats.mean_acceptance_length:.2f} tokens per pass, {stats.rollback_tokens} rolled back, "
            f"{stats.wasted_branch_tokens} wasted, branch points hit {stats.branch_hits} of {stats.branch_points}"
        )
        texts.append(out)
    print(tokenizer.decode(texts[0][0]))
    print("the same text both times:", torch.equal(*texts))


if __name__ == "__main__":
    main()
