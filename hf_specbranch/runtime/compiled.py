"""Decoder layers compiled once and used by all layers and shapes.

A layer is handed to the compiler as an argument, so its weights are inputs of the kernels, not part of them. What
would tie the kernels to one layer is its place in the cache; a cache that holds this layer alone takes that away.
Sizes stay symbols, so that one artifact serves every number of queries and slots; only a single query, or a single
row, is a case of its own, because the compiler treats a size of one apart.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..kernels.attention_override import original_attention, overriding_attention
from ..kernels.backend import serves
from ..kernels.fuse import registered_attention
from ..kernels.interface import one_pass, register
from .kv_cache import SlotCache

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # where Inductor keeps what it has built
# Layers of one size may come in a few structures (sliding and full attention, a dense first layer); more than this,
# and something ties the kernels to single layers.
MOST_STRUCTURES = 4


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: str = "inductor", our_attention: bool = False) -> Iterator[None]:
    """While open, the decoder layers of `model` run compiled; afterwards the model is as it was.

    Only forwards without gradients over a `SlotCache` that points at slots are compiled; all others run as always.
    A layer that cannot be compiled runs as always too, and one warning says why. Run each new size once before
    capturing it as a CUDA graph: compiling is not possible during a capture.

    Args:
        model: a decoder-only model; it may run in another thread than this one.
        backend: of `torch.compile`; "aot_eager" traces and checks the layers without building kernels.
        our_attention: let the layers call our split attention, where Triton runs and the model computes the same.

    Example:
        >>> with compiled_layers(model), torch.no_grad():
        ...     step = runner.forward(tokens, positions, slots, visible)
    """
    with _LOCK:
        layers = _LAYERS.get(model)
        if layers is None:
            layers = _LAYERS[model] = CompiledLayers(type(model).__name__)
        layers.open(model, backend, our_attention)
    try:
        yield
    finally:
        with _LOCK:
            layers.close()


# One compiled call at a time: settings of the compiler are process-wide in part, and so is the environment.
_LOCK = RLock()


class CompiledLayers:
    """What is compiled for one model. It holds no reference to the model while closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        # (backend, attention, several rows, several queries) -> compiled layer
        self.artifacts: dict[tuple[str, str, bool, bool], Forward] = {}
        self.backend = self.attention = ""
        self.failed = False
        self.opened = 0
        self.changed: list[nn.Module] = []
        self.attentions: dict[str, str] = {}  # what to ask for in place of an implementation
        self.undo = ExitStack()

    def open(self, model: PreTrainedModel, backend: str, our_attention: bool) -> None:
        self.opened += 1
        self.backend = backend
        if self.opened == 1 and not self.failed:
            try:
                self._replace_forwards(model, our_attention)
            except BaseException:
                self.close()
                raise

    def _replace_forwards(self, model: PreTrainedModel, our_attention: bool) -> None:
        layers = decoder_layers(model)
        if collects(vars(model.config.get_text_config(decoder=True))):
            return
        if not layers:
            self.give_up("no decoder layers with one `layer_idx` each were found")
        elif any("forward" in module.__dict__ for layer in layers for module in layer.modules()):
            self.give_up("another library has replaced the forward of its layers")
        else:
            self._choose_attention(model, our_attention)
            for layer, index in layers.items():
                layer.__dict__["forward"] = self.forward_of(layer, index)
                self.changed.append(layer)

    def close(self) -> None:
        self.opened -= 1
        if not self.opened:
            for layer in self.changed:
                del layer.__dict__["forward"]
            self.changed.clear()
            self.undo.close()  # it can be used again

    def _choose_attention(self, model: PreTrainedModel, ours: bool) -> None:
        config = model.config.get_text_config(decoder=True)
        self.attention = own = original_attention(config)
        if ours and serves(model.device):
            register()
            if own not in self.attentions:
                self.attentions[own] = registered_attention(model, own)
            self.attention = self.attentions[own]
            self.undo.enter_context(overriding_attention(config, self.attention))
            one_pass.begin()
            self.undo.callback(one_pass.end)
            self.undo.callback(model.register_forward_pre_hook(lambda *_: one_pass.forget()).remove)

    def give_up(self, reason: str) -> None:
        self.failed = True
        logger.warning("%s runs without torch.compile: %s", self.name, reason)

    def forward_of(self, layer: nn.Module, index: int) -> Forward:
        """What stands in for the layer's `forward`."""
        ordinary: Forward = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            past = next((value for value in (*args, *kwargs.values()) if isinstance(value, SlotCache)), None)
            if self.failed or past is None or not can_compile(past, kwargs):
                return ordinary(*args, **kwargs)
            if len(past.layers) <= index or not past.layers[index].is_initialized:
                ordinary(*args, **kwargs)  # makes room in the cache; what it writes is written again below
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]  # [B, Q, H]
            past.address.rows_on(hidden.device)  # made here with the slots, not by the first layer that asks
            single = SingleLayerCache(past.layers[index])
            own_args = [single if value is past else value for value in args]
            own_kwargs = {name: single if value is past else value for name, value in kwargs.items()}
            own_kwargs.pop("output_hidden_states", None)  # collected outside the layer
            try:
                with _LOCK, compiler_settings(), without_collecting_hooks(layer):
                    return self.artifact(hidden)(layer, *own_args, **own_kwargs)
            except compile_errors() as error:
                self.give_up(first_line(error))
                return ordinary(*args, **kwargs)

        return forward

    def artifact(self, hidden: Tensor) -> Forward:
        """The compiled layer for hidden states of this shape, [B, Q, H]."""
        kind = self.backend, self.attention, hidden.shape[0] > 1, hidden.shape[1] > 1
        if kind not in self.artifacts:
            import_compiler()
            # The compiler files what it builds under the code object: a copy for each model and kind.
            own = FunctionType(run_layer.__code__.replace(), run_layer.__globals__, f"run_{self.name}_layer")
            # Graphs are captured around the layers, not inside them.
            options: Any = {"triton.cudagraphs": False} if self.backend == "inductor" else None
            self.artifacts[kind] = torch.compile(
                own, fullgraph=True, dynamic=True, backend=self.backend, options=options
            )
        return self.artifacts[kind]


_LAYERS: WeakKeyDictionary[PreTrainedModel, CompiledLayers] = WeakKeyDictionary()


def run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


class SingleLayerCache(Cache):
    """One layer of a cache, given to whoever asks for any: so every decoder layer runs the same program."""

    def __init__(self, layer: CacheLayerMixin) -> None:
        super().__init__(layers=[layer])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[0].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.layers[0].get_seq_length())


def decoder_layers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """The layers of the model's decoder and the index under which each uses the cache."""
    expected = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == expected:
            indices = [
                {index for module in layer.modules() if (index := layer_index(module)) is not None} for layer in stack
            ]
            if all(len(found) == 1 for found in indices):
                return {layer: found.pop() for layer, found in zip(stack, indices)}
    return {}


def layer_index(module: nn.Module) -> int | None:
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def can_compile(past: SlotCache, kwargs: dict[str, Any]) -> bool:
    """Whether this forward is of the kind that repeats: tokens into given slots, nothing collected inside layers."""
    return past.address.slots is not None and not torch.is_grad_enabled() and not collects(kwargs)


def collects(flags: dict[str, Any]) -> bool:
    """Whether something inside the layers is asked for; hidden states lie between them."""
    return any(flags.get(name) for name in ("output_attentions", "output_router_logits"))


@contextmanager
def without_collecting_hooks(layer: nn.Module) -> Iterator[None]:
    """Set aside, inside the layer, the hooks with which transformers collects outputs: the compiler cannot read them.

    They stay in a model once hidden states were asked for, and do nothing as long as nothing else is.
    """
    hooked = {}
    for module in layer.modules():
        if module is not layer and any(is_collecting(hook) for hook in module._forward_hooks.values()):
            hooked[module] = module._forward_hooks
            kept = {key: hook for key, hook in module._forward_hooks.items() if not is_collecting(hook)}
            module._forward_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        for module, hooks in hooked.items():
            module._forward_hooks = hooks


def is_collecting(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


@contextmanager
def compiler_settings() -> Iterator[None]:
    """What the compiler is told while it works, and where it keeps the results."""
    from torch._dynamo import config as dynamo  # seconds to import
    from torch.fx.experimental import _config as shapes

    before = {name: os.environ.get(name) for name in (FOLDER, "TRITON_CACHE_DIR")}
    with ExitStack() as settings:
        # Sizes that happen to agree in the first forward need not agree in the next.
        settings.enter_context(shapes.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        # Constants such as the norms' epsilon belong into the kernels; as inputs they would be read from the host.
        settings.enter_context(dynamo.patch(specialize_float=True, recompile_limit=MOST_STRUCTURES))
        if (folder := lasting_folder()) is not None:
            os.environ[FOLDER] = str(folder)
        try:
            yield
        finally:
            for name, value in before.items():  # the compiler sets them too
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def lasting_folder() -> Path | None:
    """A folder for compiled kernels that outlives the process and the machine's next start; None: the user's own.

    Inductor notes its default, a temporary folder, in the environment as soon as it is used: that is no choice.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = os.environ.get(FOLDER)
    if chosen is not None and Path(chosen) != Path(default_cache_dir()):
        return None
    folder = Path(HF_HOME) / "hf_specbranch" / "inductor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def import_compiler() -> None:
    """Import Inductor ahead of its first use: torch warns of its own old code there, and users can do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")


def compile_errors() -> tuple[type[Exception], ...]:
    """What the compiler raises; errors of the kernels themselves are not among them."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def first_line(error: BaseException) -> str:
    error = getattr(error, "inner_exception", error)  # what a backend raised
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
