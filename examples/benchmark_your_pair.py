"""Find out from Python whether a pair is worth it, and with which settings.

python examples/benchmark_your_pair.py
python examples/benchmark_your_pair.py --target org/large --draft org/small

The commands `hf-specbranch doctor`, `tune` and `bench` do this and more.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts
from hf_specbranch.planning.measure import measure_costs
from hf_specbranch.planning.simulate import predict, record_agreement


def load(target: str | None, draft: str | None):
    if target is None or draft is None:
        return load_demo_pair()
    models = [AutoModelForCausalLM.from_pretrained(name, device_map="auto") for name in (target, draft)]
    return (*models, AutoTokenizer.from_pretrained(target))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target model; default: the embedded pair")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48, help="per prompt")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the embedded models are too small for more

    target, draft, tokenizer = load(args.target, args.draft)
    model = specbranch(target)
    texts = [each.prompt for each in python_prompts()[: args.num_prompts]]
    inputs = [tokenizer(text, return_tensors="pt").to(target.device) for text in texts]
    agreements = [record_agreement(model, draft, each, args.max_new_tokens) for each in inputs]
    found = measure_costs(model, draft, inputs, agreements, repeats=1)

    print(f"plain generate()              {found.plain:8.1f} tokens/s")
    for name, speed in found.measured.items():
        print(f"{name:<36}{speed:8.1f} tokens/s, {found.predicted[name]:8.1f} predicted")
    print("\nspecbranch on other machines, predicted, relative to decoding without a draft there:")
    branching = SpecBranchConfig(policy="specbranch")
    for ratio in (5, 20, 40):
        costs = found.costs.at_ratio(ratio)
        one, two = (predict(agreements, branching, costs.on_gpus(count)).speedup for count in (1, 2))
        print(f"a draft {ratio:>2} times as fast as the target: {one:.2f}x on one device, {two:.2f}x on two")


if __name__ == "__main__":
    main()
