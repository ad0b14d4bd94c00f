"""Control drafting with a hook: stop where the draft's whole distribution is flat.

python examples/custom_hook.py

The built-in rule stops where the draft's likeliest token has a probability below epsilon. This hook looks at all of
them: a likeliest token of 0.3 is more often right before two alternatives than before two hundred. At about the same
number of tokens rolled back, more are accepted per target pass. Hooks never change the text, only the work; write one
where you know something about your text or your draft that its confidence does not say.
"""

import torch

from hf_specbranch import SpeculationHook, load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts


class EntropyStop(SpeculationHook):
    """Stops drafting where the entropy of the draft's distribution is above a limit."""

    def __init__(self, max_nats):
        self.max_nats = self.settings = max_nats  # `settings`: may be captured in CUDA graphs

    def stop(self, state):
        entropy = -(state.scores * state.scores.clamp(min=1e-9).log()).sum(-1)  # [B]
        return entropy > self.max_nats


def main(prompts: int = 8, max_new_tokens: int = 48) -> None:
    target, draft, tokenizer = load_demo_pair()
    model = specbranch(target, draft=draft)
    tokenizer.padding_side = "left"
    inputs = tokenizer([each.prompt for each in python_prompts()[-prompts:]], return_tensors="pt", padding=True)
    methods = {
        "epsilon 0.40": (0.40, []),
        "epsilon 0.35": (0.35, []),
        "entropy hook": (0.0, [EntropyStop(3.0)]),
    }
    texts = []
    for name, (epsilon, hooks) in methods.items():
        settings = {"policy": "vanilla", "confidence_threshold": epsilon}
        arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "specbranch": settings}
        texts.append(model.generate(**inputs, **arguments, speculation_hooks=hooks))
        stats = model.specbranch_stats
        print(
            f"{name}: {stats.mean_acceptance_length:.2f} tokens per target pass, "
            f"{stats.rollback_tokens} of {stats.num_draft_tokens} draft tokens rolled back"
        )
    print("the same text each time:", all(torch.equal(texts[0], text) for text in texts))


if __name__ == "__main__":
    main()
