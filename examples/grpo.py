"""Train the embedded target for a few steps with GRPO, and show the time of its rollouts with and without SpecBranch.

python examples/grpo.py

The loop is that of TRL in a few lines: sample a group of answers per prompt with `generate()`, score them, and make the
better ones of a group likelier. The weights change in place between calls; SpecBranch notices that by itself.

Speculation pays where a pass over several tokens takes about the time of a pass over one: on a GPU. On a CPU, passes
over the drafts of a whole group take longer, and these rollouts are not faster.
"""

import time

import torch

from hf_specbranch import load_demo_pair, specbranch

PROMPTS = ("def add(a, b):", "def is_even(n):", "class Stack:")
GROUP = 4  # answers per prompt
LEARNING_RATE = 2e-5


def reward(answer: str) -> float:
    """Prefer answers that return something and have a docstring."""
    return float("return" in answer) + float('"""' in answer)


def log_probabilities(model, sequences, mask, prompt_length):
    """Return [rows, new tokens]: the log probability of each token after the prompt."""
    logits = model(input_ids=sequences, attention_mask=mask).logits[:, prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, sequences[:, prompt_length:, None])[..., 0]


def train(model, tokenizer, steps, new_tokens, **generate_arguments):
    """Train a model in place; return the mean reward of each step and the seconds spent in `generate()`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left").to(model.device)
    prompt_length, rewards, seconds = inputs["input_ids"].shape[1], [], 0.0
    for _ in range(steps):
        began = time.perf_counter()
        model.eval()
        sequences = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new_tokens, num_return_sequences=GROUP,
            **generate_arguments,
        )  # fmt: skip
        seconds += time.perf_counter() - began

        new = sequences[:, prompt_length:]
        answers = tokenizer.batch_decode(new, skip_special_tokens=True)
        scores = torch.tensor([reward(answer) for answer in answers], device=model.device)
        groups = scores.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

        # One update per group of rollouts, so the policy that is trained is the one that has sampled: the ratio of both
        # is 1, and its gradient is that of the log probability.
        ends = (new == tokenizer.eos_token_id).long()
        is_text = (ends.cumsum(1) - ends) == 0  # up to the first end-of-sequence token
        mask = torch.cat([inputs["attention_mask"].repeat_interleave(GROUP, 0), is_text.long()], dim=1)
        model.train()
        chosen = log_probabilities(model, sequences, mask, prompt_length)
        ratio = (chosen - chosen.detach()).exp()
        loss = -(ratio * advantages.view(-1, 1) * is_text).sum() / is_text.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(scores.mean()))
    return rewards, seconds


def main(steps: int = 4, new_tokens: int = 48) -> None:
    taken = {}
    for name in ("plain generate()", "SpecBranch"):
        target, draft, tokenizer = load_demo_pair(device="cuda" if torch.cuda.is_available() else "cpu")
        model = specbranch(target, draft=draft)
        arguments = {"specbranch": False} if name.startswith("plain") else {}
        torch.manual_seed(0)
        began = time.perf_counter()
        rewards, taken[name] = train(model, tokenizer, steps, new_tokens, **arguments)
        total = time.perf_counter() - began
        shown = ", ".join(f"{value:.2f}" for value in rewards)
        print(f"{name}: rewards {shown}; {taken[name]:.1f} s of {total:.1f} s in generate()")
    stats = model.specbranch_stats
    print(f"the last rollouts took {stats.target_forwards} target passes for {stats.new_tokens} tokens")
    print(f"plain over SpecBranch: {taken['plain generate()'] / taken['SpecBranch']:.2f}")


if __name__ == "__main__":
    main()
