"""Step costs predicted from the sizes of the models: what a plan starts from before anything is measured.

A pass takes the time to read the weights once, to read the keys and values of every row once, and a constant per layer.
So the same prediction says how costs grow with the context and with the rows of a batch, and a measurement in one
situation gives the costs in another (`calibrate`).

In a mixture of experts a token reads k of E experts, and a pass over n tokens reads about E (1 - (1 - k/E)^n) of them:
each further token in a pass costs more than in a dense model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..model_state import every_module, weight_bytes
from .costs import StepCosts, interpolate

# Captured stages on an H200: bytes per second, seconds per layer, the cost of each further token in a pass.
GPU_BANDWIDTH, GPU_LAYER, GPU_TOKEN = 4.3e12, 1.6e-5, 0.005
GPU_TILE = 64  # tokens; up to twice as many, further ones cost nothing: products still wait for the weights
CPU_BANDWIDTH, CPU_LAYER, CPU_FORWARD = 1.5e10, 4e-4, 5e-4
# How many times the pass over one token a pass over several takes, on a CPU. Products of more than eight rows may
# run other code: on an Arm machine such passes took 2.5 times as long.
CPU_PASSES = ((1, 1.0), (2, 1.4), (8, 1.6), (9, 2.5), (64, 8.0))
EAGER_TOKEN = 0.02  # on a GPU without captured stages
WIDTHS = (0, 1, 3, 7, 8, 15, 31, 63)  # further tokens of the passes that are predicted; between them it is interpolated


class ModelSize(NamedTuple):
    """What the time of a forward depends on."""

    weights: int  # bytes
    layers: int
    kv_token: int  # bytes of keys and values per token
    on_cpu: bool = False
    experts: int = 0  # bytes of the weights that belong to routed experts
    share: float = 1.0  # of the experts that one token reads

    def read_by(self, tokens: int) -> float:
        """Return the bytes of weights that a pass over so many tokens reads, if each chooses its own experts.

        Example:
            >>> size = ModelSize(weights=1000, layers=1, kv_token=0, experts=900, share=0.25)
            >>> size.read_by(1), size.read_by(2)
            (325.0, 493.75)
        """
        return self.weights - self.experts * (1 - self.share) ** tokens


def size_of(model: PreTrainedModel) -> ModelSize:
    """Return the size of a model. Every call without a draft asks for it, so it must be quick."""
    config = model.config.get_text_config(decoder=True)
    layers: int = config.num_hidden_layers
    key_bytes = model.dtype.itemsize * _kv_width(config)
    routed = _routed_weights(model)
    return ModelSize(
        weight_bytes(model) - _unread_bytes(model),
        layers,
        2 * layers * key_bytes,
        model.device.type == "cpu",
        sum(weight.nbytes for weight in routed.values()),
        _share(config, routed),
    )


def _unread_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of an embedding table that is not the output layer too: a pass reads a row per token."""
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    return 0 if output is None or getattr(output, "weight", None) is table else int(table.nbytes)


def sizes_of(target: PreTrainedModel, draft: PreTrainedModel) -> tuple[ModelSize, ModelSize]:
    """Return the sizes of a pair."""
    return size_of(target), size_of(draft)


def _routed_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of routed experts by their innermost name with an `.experts.` in it, each once."""
    holders = [module for module in every_module(model) if "experts" in module._modules]
    named = {
        id(weight): (f"{at}.experts.{name}", weight)
        for at, module in enumerate(holders)
        for name, weight in module.get_submodule("experts").named_parameters()
    }
    return dict(named.values())


def _share(config: Any, routed: dict[str, Tensor]) -> float:
    """Return the share of the experts that one token chooses; 1 for a config that does not say."""
    stacked = {weight.shape[0] for weight in routed.values() if weight.dim() > 2}  # one tensor for all experts
    separate = {name.split(".experts.")[1].split(".")[0] for name in routed}
    number = max(stacked, default=len(separate))
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    chosen = next((value for name in names if isinstance(value := getattr(config, name, None), int)), number)
    return min(1.0, chosen / number) if number else 1.0


def _kv_width(config: Any) -> int:
    """Return the elements of one key in one layer; 0 for a config that does not say."""
    heads: int | None = getattr(config, "num_attention_heads", None)
    hidden: int | None = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return 0
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(kv_heads) * int(head_dim) if isinstance(kv_heads, int) and isinstance(head_dim, int) else 0


def predicted_costs(
    target: ModelSize, draft: ModelSize, captured: bool, rows: int = 1, context: int = 0, devices: int = 1
) -> StepCosts:
    """Predict step costs from the sizes of the models alone.

    In captured stages this gives 3.5, 0.05, 0.98 and 16.1 ms for 7B, 68M, 1.3B and 33B in half precision; 3.6, 0.05,
    0.97 and 16.0 ms were measured on an H200. For 16 and 64 rows of 240 tokens it gives 4.3 and 6.6 ms for 7B; 4.4 and
    7.3 ms were measured. For passes over 7 and 16 tokens in 8 rows after 350, it gives 5.0 and 5.1 ms; measured rounds
    without their draft steps took 5.0 and 5.2 ms. For FP8 copies of Qwen2.5-0.5B and Llama-3.2-1B it gives 0.47 and
    0.50 ms; 0.43 and 0.51 ms were measured. The constants for a CPU were measured with the embedded pair
    (docs/benchmarks.md).

    Both models on one GPU are bound by its memory bandwidth, so little of the overlapped drafting is hidden: a pass of
    the 7B target took 4.20 ms alone and 4.51 ms while the 68M draft ran for 0.5 ms. A round that drafts ahead waited
    0.3 ms for the host. On one CPU nothing is hidden.

    Args:
        target: the size of the target.
        draft: the size of the draft.
        captured: stages are captured as CUDA graphs.
        rows: the batch size.
        context: tokens per row.
        devices: 2 if the draft has a device of its own.
    """
    points = tuple((float(sent), _pass(target, captured, rows, sent, context)) for sent in WIDTHS)
    first, token = points[0][1], (points[-1][1] - points[-2][1]) / (WIDTHS[-1] - WIDTHS[-2])
    draft_step = _pass(draft, captured, rows, 0, context)
    further = draft.read_by(2 * rows) - draft.read_by(rows)  # bytes of the experts that only the next branch touches
    if captured:
        branch = 0.03 * rows * _pass(draft, captured, rows, 0, 0) + further / GPU_BANDWIDTH
        return StepCosts(first, token, draft_step, branch, 0.4 if devices == 1 else 1.0, points, waiting=3e-4)
    branch = 0.05 * rows * draft_step + further / CPU_BANDWIDTH
    return StepCosts(first, token, draft_step, branch, 0.0 if devices == 1 else 0.7, points)


def _pass(size: ModelSize, captured: bool, rows: int, sent: int, context: int) -> float:
    """Return the seconds of a pass over `1 + sent` tokens in each row."""
    tokens = rows * (1 + sent)
    if captured:
        once = size.read_by(tokens) / GPU_BANDWIDTH + size.layers * GPU_LAYER
        counted = min(tokens, GPU_TILE) + max(0, tokens - 2 * GPU_TILE)
        return once * (1 + GPU_TOKEN * (counted - 1)) + rows * context * size.kv_token / GPU_BANDWIDTH
    once = size.read_by(tokens) / CPU_BANDWIDTH + size.layers * CPU_LAYER + CPU_FORWARD
    factor = interpolate(CPU_PASSES, tokens) if size.on_cpu else 1 + EAGER_TOKEN * (tokens - 1)
    return once * factor + rows * context * size.kv_token / CPU_BANDWIDTH
