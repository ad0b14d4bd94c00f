"""How much longer a CPU takes for a pass over several tokens, measured on a product before anything is drafted.

Products take most of a pass of a large model. One of five rows takes about as long as one of a single row on some
processors, and six times as long on others. Without this the planner would find that out by drafting.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model_state import every_module, weight_bytes
from .calibrate import CostFactors
from .costs import StepCosts
from .sizes import size_of

LARGE = 512 << 20  # bytes of weights from which on products take most of a pass
WIDTHS = (1, 2, 3, 5, 9)  # tokens of the passes that are measured
REPEATS = 3  # of each product, in turns; the fastest counts
WEIGHTS = 3  # that are multiplied in turns, so that none stays in a cache


@torch.no_grad()
def first_factors(model: PreTrainedModel, predicted: StepCosts, rows: int) -> CostFactors:
    """Return what is known of step costs before the first text: on a CPU, how passes of a large model grow.

    In a mixture of experts nothing is: most of what wider passes take longer is for further experts.

    Args:
        model: the target.
        predicted: the costs that the sizes of the models predict.
        rows: the batch size.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> first_factors(target, StepCosts(0.01), rows=1).passes  # a small model
        {}
    """
    if model.device.type != "cpu" or weight_bytes(model) < LARGE or size_of(model).experts:
        return CostFactors()
    weights = _typical_weights(model)
    if not weights:
        return CostFactors()
    for weight in weights:  # the first product with one may read it from disk
        nn.functional.linear(weight.new_ones((1, weight.shape[1])), weight)
    seconds = dict.fromkeys(WIDTHS, float("inf"))
    for turn in range(REPEATS):
        weight = weights[turn % len(weights)]
        for width in WIDTHS:
            x = weight.new_ones((rows * width, weight.shape[1]))
            began = time.perf_counter()
            nn.functional.linear(x, weight)
            seconds[width] = min(seconds[width], time.perf_counter() - began)
    grown = {width: seconds[width] / seconds[1] for width in WIDTHS}
    expected = {width: predicted.pass_seconds(width - 1) / predicted.pass_seconds(0) for width in WIDTHS}
    return CostFactors(passes={width: [grown[width] / expected[width]] for width in WIDTHS})


def _typical_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return some of the largest weights of linear layers, all of one shape, but not those of the output layer.

    Only plain ones: a product with a part of a weight that other processes share would wait for them.
    """
    output = model.get_output_embeddings()
    layers = [each for each in every_module(model) if type(each) is nn.Linear and each is not output]
    layers = [each for each in layers if type(each.weight) is nn.Parameter and each.weight.dtype == model.dtype]
    layers = [each for each in layers if each.weight.device == model.device]
    largest = max((each.weight.numel() for each in layers), default=0)
    weights = [each.weight for each in layers if each.weight.numel() == largest]
    return [weight for weight in weights if weight.shape == weights[0].shape][:WEIGHTS]
