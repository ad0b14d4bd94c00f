"""Times decoding of models with random weights, and compares it with the limit: reading the weights once per token.

For each model: build it on the device, generate until everything is captured, time some generations, count the kernels
of a token, and free it. A model that fails does not end the run, unless it breaks the CUDA context of the process.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig, PreTrainedModel

from ..attach import specbranch
from ..config import SpecBranchConfig
from ..layers import fused
from ..model_state import adapter_state, every_module, state_of
from ..progress import Progress
from ..runtime.fingerprint import fingerprint
from ..runtime.selection import release
from ..stats import SpecBranchStats
from .limit import copy_bandwidth, token_cost
from .random_model import random_model
from .timing import TimingStreamer, wait
from .traffic_run import never_ending

TRIES = 4  # of a measured generation that captures graphs
PROFILED = (4, 12)  # new tokens of two generations; the kernels of a token are the difference
SPARE_MEMORY = 1.03  # weights need this much of the device at least: joining some of them needs a copy of one group


@dataclass(frozen=True)
class FamiliesPlan:
    """How every model is measured.

    Args:
        device: where models are built.
        dtype: of their weights.
        settings: ours.
        context: tokens of the prompt.
        max_new_tokens: tokens that are timed.
        repeat: measured generations; the median counts.
        plain: also time plain `generate()`.
        bandwidth: bytes per second; None measures it.
        seed: of weights and prompts.
    """

    device: torch.device
    dtype: torch.dtype
    settings: SpecBranchConfig = SpecBranchConfig(policy="autoregressive")
    context: int = 512
    max_new_tokens: int = 128
    repeat: int = 1
    plain: bool = False
    bandwidth: float | None = None
    seed: int = 0


@dataclass
class ModelResult:
    """What was found out about one model; None where it is not known.

    Attributes:
        parameters: of the whole model.
        active_parameters: without the experts that a token does not choose.
        read_bytes: weights that one token reads, in bytes.
        limit_ms: the time to read them.
        ours_ms: milliseconds per token of our decoding.
        kernels_per_token: kernels that the device runs per token.
        runtime: "graph" if it ran captured, else "eager".
        fused_modules: how many modules ran through our kernels, by kind.
        reason: why it did not run captured, or not with our kernels.
        plain_ms: milliseconds per token of plain `generate()`.
        failed: the error that ended its measurement.
    """

    parameters: int | None = None
    active_parameters: int | None = None
    read_bytes: int | None = None
    limit_ms: float | None = None
    ours_ms: float | None = None
    kernels_per_token: float | None = None
    runtime: str | None = None
    fused_modules: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    plain_ms: float | None = None
    failed: str = ""

    @property
    def ratio(self) -> float | None:
        """Our time over the limit."""
        return self.ours_ms / self.limit_ms if self.ours_ms and self.limit_ms else None


class FamiliesBenchmark:
    """Measures models one after another, and fills `results`.

    Args:
        configs: the models' configurations by name.
        plan: how each is measured.
        progress: receives each finished model.
    """

    def __init__(
        self, configs: dict[str, PreTrainedConfig], plan: FamiliesPlan, progress: Progress | None = None
    ) -> None:
        self.configs, self.plan, self.progress = configs, plan, progress or Progress()
        self.bandwidth = plan.bandwidth
        self.results: dict[str, ModelResult] = {}

    def run(self) -> None:
        """Measure every model."""
        if self.bandwidth is None:
            self.progress.doing("bandwidth")
            self.bandwidth = copy_bandwidth(self.plan.device)
        for name, config in self.configs.items():
            result = self.results[name] = ModelResult()
            try:
                self.measure(name, config, result)
            except Exception as error:  # the others go on
                result.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
            alive = free_memory(self.plan.device)  # not in the handler, where the exception keeps the model alive
            self.progress.say(f"{name}: {result_line(result)}")
            self.progress.advance()
            if not alive:
                self.progress.say(f"{name} has broken the CUDA context: measure the models after it in a new process")
                return

    def measure(self, name: str, config: PreTrainedConfig, result: ModelResult) -> None:
        """Measure one model."""
        plan = self.plan
        assert self.bandwidth is not None
        self.progress.doing(f"{name}: build")
        shapes = random_model(config, "meta", plan.dtype)
        result.parameters, result.active_parameters, result.read_bytes = token_cost(shapes)
        result.limit_ms = 1000 * result.read_bytes / self.bandwidth
        check_context(shapes, plan)
        check_memory(shapes, plan.device)
        model = specbranch(random_model(config, plan.device, plan.dtype, plan.seed))
        try:
            with never_ending(model, plan.settings):
                self.measure_ours(name, model, result)
                if plan.plain:
                    self.progress.doing(f"{name}: plain generate()")
                    result.plain_ms = 1000 * median(self.plain_seconds(model) for _ in range(plan.repeat))
        finally:
            release(model)

    def measure_ours(self, name: str, model: PreTrainedModel, result: ModelResult) -> None:
        """Time our decoding, and find out how it ran."""
        self.progress.doing(f"{name}: warm-up")
        stats = self.steady(model)
        self.progress.doing(f"{name}: measure")
        runs = [self.steady(model) for _ in range(self.plan.repeat)]
        result.ours_ms = 1000 * median(seconds_per_token(stats) for stats in runs)
        result.runtime, result.reason = stats.runtime, why_slow(model, stats)
        result.fused_modules = fused_modules(model) if stats.runtime == "graph" else {}
        if self.plan.device.type == "cuda":
            self.progress.doing(f"{name}: count kernels")
            result.kernels_per_token = self.kernels_per_token(model)

    def steady(self, model: PreTrainedModel) -> SpecBranchStats:
        """Generate until nothing is captured any more, and return the statistics of the last generation."""
        for _ in range(TRIES):
            stats = self.generate(model, self.plan.max_new_tokens)
            if not stats.graphs_captured:
                break
        return stats

    def generate(self, model: Any, new_tokens: int) -> SpecBranchStats:
        """Generate a text and return its statistics."""
        model.specbranch_stats = None
        model.generate(**prompt(model, self.plan), max_new_tokens=new_tokens, do_sample=False)
        wait(model)
        stats: SpecBranchStats | None = model.specbranch_stats
        if stats is None:
            raise RuntimeError("it was left to transformers' own decoding, with a warning that says why")
        return stats

    def kernels_per_token(self, model: PreTrainedModel) -> float | None:
        """Return how many kernels the device runs per token; None if torch's profiler cannot say."""
        counts = []
        for count in PROFILED:
            self.generate(model, count)  # what is captured or built for this length is not counted
            counts.append(kernels_of(partial(self.generate, model, count)))
        return (counts[1] - counts[0]) / (PROFILED[1] - PROFILED[0]) if min(counts) else None

    def plain_seconds(self, model: Any) -> float:
        """Return the seconds per token of plain `generate()`."""
        streamer = TimingStreamer()
        arguments = {"max_new_tokens": self.plan.max_new_tokens, "do_sample": False, "streamer": streamer}
        model.generate(**prompt(model, self.plan), **arguments, specbranch=False)
        return sum(streamer.gaps()) / len(streamer.gaps())


def prompt(model: PreTrainedModel, plan: FamiliesPlan) -> dict[str, Tensor]:
    """Return a prompt of random tokens, `input_ids` and `attention_mask` [1, context]."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (1, plan.context), generator=torch.Generator().manual_seed(plan.seed))
    return {"input_ids": ids.to(plan.device), "attention_mask": torch.ones_like(ids, device=plan.device)}


def seconds_per_token(stats: SpecBranchStats) -> float:
    """Return the seconds per token after the first one."""
    return (stats.total_seconds - stats.time_to_first_token) / (stats.new_tokens - 1)


def why_slow(model: PreTrainedModel, stats: SpecBranchStats) -> str:
    """Return why a model on a GPU ran without graphs or kernels; empty if it did not."""
    state = state_of(model)
    if stats.runtime != "graph":
        return state.warned_eager or state.sync_reasons.get(adapter_state(model), "")
    without_kernels = state.kernel_checks.get(fingerprint(model)) == "none"
    return stats.slowed_by or ("a pass through our kernels differs from its own" if without_kernels else "")


@torch.no_grad()
def fused_modules(model: PreTrainedModel) -> dict[str, int]:
    """Return how many modules of a model run through our kernels, by kind of replacement."""
    if state_of(model).kernel_checks.get(fingerprint(model), "none") == "none":
        return {}
    with fused(model):
        replacements = [getattr(vars(module).get("forward"), "ours", None) for module in every_module(model)]
    kinds = Counter(type(each).__name__.removesuffix("Forward") for each in replacements if each is not None)
    return dict(kinds.most_common())


def kernels_of(work: Callable[[], object]) -> int:
    """Return how many kernels the GPU runs for some work; copies and fills of memory are not kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)


def check_context(model: PreTrainedModel, plan: FamiliesPlan) -> None:
    """Refuse a text that is longer than the model's context."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and plan.context + plan.max_new_tokens > limit:
        raise ValueError(
            f"{plan.context} tokens of context and {plan.max_new_tokens} new ones do not fit its context of {limit}"
        )


def check_memory(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose weights do not fit the free memory of a GPU."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    needed = SPARE_MEMORY * sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if needed > free:
        raise ValueError(f"it needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def free_memory(device: torch.device) -> bool:
    """Return the memory of models that are gone to the device; return False if the device cannot be used any more."""
    gc.collect()
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:  # after an illegal memory access every call of CUDA fails
        return False
    return True


def result_line(result: ModelResult) -> str:
    """Return a result as one line."""
    if result.failed:
        return f"failed: {result.failed}"
    return f"{result.ours_ms:.3g} ms per token, {result.ratio:.2f} times the limit of {result.limit_ms:.3g} ms"
