"""Time a model as it is, with LoRA adapters and with quantised weights, each against the time to read its weights.

python examples/benchmarks/variants.py --model llama3.1-8b --device cuda --dtype bfloat16
python examples/benchmarks/variants.py --model llama3.1-8b --tiny --variants dense,int4

The weights are random, in the layouts of public checkpoints: block-scaled FP8, and 4 bits with group scales as in
compressed-tensors. `limit` is the time to read all weights that a token needs, adapters and scales included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hf_specbranch import specbranch
from hf_specbranch.bench.families import FamiliesBenchmark, FamiliesPlan, ModelResult, free_memory
from hf_specbranch.bench.limit import copy_bandwidth, token_cost
from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import config_of
from hf_specbranch.bench.traffic_run import never_ending
from hf_specbranch.runtime.selection import release

sys.path.insert(0, str(Path(__file__).parent))
from lab import finish  # noqa: E402

BLOCK, GROUP, WORD = 128, 128, 8  # of FP8 scales, of 4-bit scales, weights per 32-bit word


class Float8Linear(nn.Linear):
    """Holds FP8 weights with a scale for each block of 128 x 128, as DeepSeek-V3 and Qwen3 publish them."""

    def __init__(self, linear: nn.Linear) -> None:
        rows, depth = linear.weight.shape
        super().__init__(depth, rows, bias=False, device="meta")
        weight = torch.randn_like(linear.weight).mul_(64).to(torch.float8_e4m3fn)
        scale = torch.full((-(-rows // BLOCK), -(-depth // BLOCK)), 0.02 / 64, device=linear.weight.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.block_size = (BLOCK, BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        rows, depth = self.weight.shape
        scale = self.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :depth]
        return functional.linear(x, (self.weight.float() * scale).to(x.dtype))


class Int4Linear(nn.Module):
    """Holds symmetric 4-bit weights with a scale for each group of 128, as compressed-tensors packs them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight
        self.out_features, self.in_features = weight.shape
        words = torch.randint(-(1 << 31), 1 << 31, (len(weight), weight.shape[1] // WORD), device=weight.device)
        self.group = min(GROUP, weight.shape[1])
        scale = weight.new_full((len(weight), weight.shape[1] // self.group), 0.02 / 4)
        self.weight_packed = nn.Parameter(words.to(torch.int32), requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        shifts = 4 * torch.arange(WORD, dtype=torch.int32, device=x.device)
        codes = (self.weight_packed[..., None] >> shifts & 15).flatten(1) - 8
        return functional.linear(x, (codes * self.weight_scale.repeat_interleave(self.group, 1)).to(x.dtype))


def with_lora(model: PreTrainedModel, rank: int = 16) -> PreTrainedModel:
    """Return the model with an adapter around every projection, whose terms are not zero."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted.base_model.model.eval()


def with_layers(kind: Callable[[nn.Linear], nn.Module]) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """Return a function that replaces the projections of a model by quantised ones."""

    def replace(model: PreTrainedModel) -> PreTrainedModel:
        output = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child is not output:
                    setattr(module, name, kind(child))
        return model

    return replace


VARIANTS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "dense": lambda model: model,
    "lora": with_lora,
    "float8": with_layers(Float8Linear),
    "int4": with_layers(Int4Linear),
}


def measure(name: str, args: argparse.Namespace, bandwidth: float) -> ModelResult:
    """Return what a variant takes per token."""
    device = torch.device(args.device)
    plan = FamiliesPlan(
        device, getattr(torch, args.dtype), context=args.context_length, max_new_tokens=args.new_tokens, repeat=3
    )
    model = VARIANTS[name](random_model(config_of(args.model, tiny=args.tiny), device, plan.dtype))
    result = ModelResult()
    result.parameters, result.active_parameters, result.read_bytes = token_cost(model)
    result.limit_ms = 1000 * result.read_bytes / bandwidth
    model = specbranch(model)
    try:
        with never_ending(model, plan.settings):
            FamiliesBenchmark({}, plan).measure_ours(name, model, result)
    finally:
        release(model)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", help="a shape of `bench --families` (default: %(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="shrink the model, to try the command")
    parser.add_argument("--device", default="cpu", help="e.g. cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--context-length", type=int, default=512, help="tokens in front (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per generation (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    names = args.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variants {', '.join(unknown)}: choose from {', '.join(VARIANTS)}")
    bandwidth, results = copy_bandwidth(torch.device(args.device)), {}
    lines = [f"{'variant':10}{'limit ms':>10}{'ours ms':>10}{'ratio':>8}{'of dense':>10}  runtime, fused modules"]
    for name in names:
        result = results[name] = measure(name, args, bandwidth)
        free_memory(torch.device(args.device))
        dense = results["dense"].ours_ms if "dense" in results else None
        share = f"{result.ours_ms / dense:>10.3f}" if result.ours_ms and dense else f"{'':>10}"
        how = f"{result.runtime}, {sum(result.fused_modules.values())} {result.reason}".strip()
        lines.append(f"{name:10}{result.limit_ms:>10.3f}{result.ours_ms:>10.3f}{result.ratio:>8.2f}{share}  {how}")
    finish(args, {name: vars(result) for name, result in results.items()}, lines)


if __name__ == "__main__":
    main()
