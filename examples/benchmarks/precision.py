"""Measure the error of our logits against float32, and compare it with that of plain bfloat16.

Models have the shapes of public ones and random weights. Their logits are computed in float32, by transformers in half
precision and by us as decoding runs: for the prompt, and for a text after it with one and with eight tokens per pass,
in batches of one and of four. The error is the root mean square difference from float32 in units of the logits' spread.

    python examples/benchmarks/precision.py                        # all models, at full size
    python examples/benchmarks/precision.py command-r7b --layers 8
    python examples/benchmarks/precision.py --tiny --device cpu    # the same architectures, shrunk

It ends with status 1 if an error of ours exceeds 1.1 times that of transformers, or a model could not be measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import SHAPES, config_of
from hf_specbranch.layers import fuse, fused
from hf_specbranch.planning.sizes import size_of
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.selection import release, runner_for
from hf_specbranch.runtime.self_check import compare

PROMPT, DECODED = 64, 32  # tokens
BATCHES = (1, 4)
MOST = 1.1  # times the error of plain half precision
CHANGE_EXPERTS = 0.01  # of the tokens, at most


class Error(NamedTuple):
    """Errors of the logits, in units of their spread."""

    ours: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.ours / self.plain


class Measured(NamedTuple):
    """The result for one model."""

    errors: dict[str, Error]  # by shape of the pass
    kernels: str  # how its layers ran
    noise: float  # from the self-check: difference of the kernels over the noise floor

    @property
    def worst(self) -> float:
        return max(error.ratio for error in self.errors.values())


@torch.no_grad()
def measure(model: PreTrainedModel, seed: int = 0) -> Measured:
    """Return the errors of a model in half precision, ours and transformers' own."""
    generator = torch.Generator(model.device).manual_seed(seed)
    shape = (max(BATCHES), PROMPT + DECODED)
    ids = torch.randint(0, model.config.vocab_size, shape, device=model.device, generator=generator)
    with in_float32(model):
        exact = model(input_ids=ids, logits_to_keep=DECODED + 1).logits
    # Rounding may send a token to other experts, in our passes or in those of transformers.
    left_out = CHANGE_EXPERTS if size_of(model).experts else 0.0
    errors: dict[str, Error] = {}
    layers = ""
    for rows in BATCHES:
        for queries in (1, 8):
            plain = by_transformers(model, ids[:rows], queries)
            ours, layers = by_us(model, ids[:rows], queries)
            both = (ours, plain)
            if queries == 1:
                errors[f"prompt x{rows}"] = Error(*(distance(some[:, :1], exact[:rows, :1]) for some in both))
            errors[f"{queries} x{rows}"] = Error(*(distance(some[:, 1:], exact[:rows, 1:], left_out) for some in both))
    noise = check_noise(model)
    release(model)
    return Measured(errors, layers, noise)


def check_noise(model: PreTrainedModel) -> float:
    """Return what the self-check finds: the difference of the kernels over the noise floor."""
    masks = mask_maker_for(model, "target")
    try:
        return compare(model, masks).ratio(model.dtype)
    except ValueError:  # it cannot run by spans
        return compare(model, masks, by_spans=False).ratio(model.dtype)


def distance(logits: Tensor, exact: Tensor, left_out: float = 0.0) -> float:
    """Return the root mean square difference, in units of the spread.

    Args:
        logits: [B, N, V].
        exact: the same in float32.
        left_out: the share of the tokens that do not count, those with the largest differences.
    """
    errors = (logits.float() - exact).pow(2).mean(-1).flatten().sort().values
    return float(errors[: len(errors) - int(left_out * len(errors))].mean().sqrt() / exact.std())


def by_transformers(model: PreTrainedModel, ids: Tensor, queries: int) -> Tensor:
    """Return the logits [B, 1 + DECODED, V] of plain decoding."""
    output = model(input_ids=ids[:, :PROMPT], use_cache=True, logits_to_keep=1)
    logits = [output.logits]
    for first in range(PROMPT, PROMPT + DECODED, queries):
        tokens = ids[:, first : first + queries]
        output = model(input_ids=tokens, past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def by_us(model: PreTrainedModel, ids: Tensor, queries: int) -> tuple[Tensor, str]:
    """Return the same logits of our decoding, and how the layers ran."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).expand(rows, -1)
    sees = torch.ones((length, length), dtype=torch.bool, device=ids.device).tril().expand(rows, -1, -1)
    on_gpu = ids.device.type == "cuda"
    if not on_gpu:
        fuse(model)  # without graphs the torch references of the kernels are fused
    with runner_for(model, "target", rows, length, "auto") as runner:
        logits = [runner.prefill(ids[:, :PROMPT], positions[:, :PROMPT], None)[:, None].clone()]
        with nullcontext() if on_gpu else fused(model):
            for first in range(PROMPT, length, queries):
                now = slice(first, first + queries)
                step = runner.forward(ids[:, now], positions[:, now], positions[:, now], sees[:, now])
                logits.append(step.logits.clone())  # the next pass overwrites them
        return torch.cat(logits, dim=1), str(getattr(runner, "layers", "eager"))


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Run the model in float32. Layers are converted one at a time, so that large models fit."""
    layers = list(model.base_model.layers)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(parameters: Any) -> None:
        for parameter in parameters:
            if parameter not in kept:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = kept.pop(parameter)

    hooks = []
    experts = getattr(model.config, "_experts_implementation", None)
    try:
        if experts is not None:
            model.set_experts_implementation("eager")  # others may not support float32
        widen(parameter for parameter in model.parameters() if parameter not in inside)
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(lambda layer, _: widen(layer.parameters())))
            hooks.append(layer.register_forward_hook(lambda layer, *_: restore(layer.parameters())))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(list(kept))
        if experts is not None:
            model.set_experts_implementation(experts)


def line(name: str, measured: Measured, seconds: float) -> str:
    errors = "  ".join(f"{what}: {error.ours:.4f}/{error.plain:.4f}" for what, error in measured.errors.items())
    return (
        f"{name:20} {measured.kernels:6} worst {measured.worst:.3f}  self-check {measured.noise:.2f}  "
        f"{seconds:.0f} s  {errors}"
    )


def table(found: dict[str, Measured | str]) -> str:
    """Return the ratios of our errors to those of plain half precision, in Markdown."""
    whats = next((list(some.errors) for some in found.values() if isinstance(some, Measured)), [])
    lines = [f"| model | {' | '.join(whats)} | error of plain | worst |", "|---" * (len(whats) + 3) + "|"]
    for name, some in found.items():
        if isinstance(some, str):
            lines.append(f"| {name} | {some} |")
            continue
        ratios = " | ".join(f"{some.errors[what].ratio:.2f}" for what in whats)
        plain = some.errors[whats[-1]].plain
        lines.append(f"| {name} | {ratios} | {plain:.4f} | {some.worst:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--layers", type=int, help="use only this many layers")
    parser.add_argument("--tiny", action="store_true", help="shrink every size")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    options = parser.parse_args()
    if unknown := set(options.models) - set(SHAPES):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    transformers_logging.set_verbosity_error()
    found: dict[str, Measured | str] = {}
    for name in options.models or SHAPES:
        begun = time.perf_counter()
        try:
            dtype = getattr(torch, options.dtype)
            model = random_model(config_of(name, options.layers, options.tiny), options.device, dtype)
            measured = found[name] = measure(model)
            print(line(name, measured, time.perf_counter() - begun), flush=True)
        except Exception as error:
            traceback.print_exc(limit=-3)
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"{name:20} {found[name]}", flush=True)
        model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(f"\nErrors of our logits over those of plain {options.dtype}, both against float32:\n\n{table(found)}")
    return int(any(isinstance(some, str) or not some.worst <= MOST for some in found.values()))


if __name__ == "__main__":
    sys.exit(main())
