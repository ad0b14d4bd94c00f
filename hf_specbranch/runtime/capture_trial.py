"""Tries once per model whether a forward can be captured as a CUDA graph, and says what prevents it."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, get_ident
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kept_checks import load_check, save_check
from ..model_state import adapter_state, agreed, state_of
from .base import Step
from .eager import EagerRunner, MaskMaker
from .pieces import in_pieces, is_outside, pieces_of, warm_up_run
from .static_buffers import GraphMemory

logger = logging.getLogger(__name__)

_sync_mode = Lock()  # torch's mode of warning about synchronisation is the same for all threads


def why_it_syncs(model: PreTrainedModel, masks: MaskMaker) -> str:
    """Return why a forward of this model cannot be captured, such as that it waits for the device; empty if it can be.

    This is found out by trying the model's own code: passes over many tokens run it, whatever our kernels replace.
    """
    reasons, adapters = state_of(model).sync_reasons, adapter_state(model)
    if adapters not in reasons and load_check(model, "syncs") is False:
        return reasons.setdefault(adapters, "")
    if adapters not in reasons:
        tokens = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
        (runner := EagerRunner(model, masks)).reserve(1, 2)
        before = int(runner.is_recurrent)  # a recurrent state needs a token before it
        visible = tokens.new_ones((1, 1, 1 + before), dtype=torch.bool)
        pieces = pieces_of(model)

        def forward() -> Step:
            with in_pieces(pieces):
                return runner.forward(tokens, tokens + before, tokens + before, visible)

        with state_of(model).kernel_lock, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if before:
                runner.prefill(tokens, tokens, None)
            reason = _why_it_syncs(forward)
            if reason:
                with suppress(RuntimeError):
                    forward()  # initialisation on first use may wait
                reason = _why_it_syncs(forward)
            is_quantised = getattr(model, "hf_quantizer", None) is not None
            if not reason and tokens.is_cuda and (before or pieces or is_quantised):
                reason = _why_replay_differs(forward, runner.device)  # kernels of others may use streams of their own
        if reason := agreed(model, reason):
            logger.warning("%s runs eagerly: %s", type(model).__name__, reason)
        else:
            save_check(model, "syncs", False)
        reasons[adapters] = reason
    return reasons[adapters]


def _why_it_syncs(forward: Callable[[], object]) -> str:
    """Run a forward while torch warns of synchronisation. The mode holds for all threads; only this one counts."""
    this_thread, syncs = get_ident(), list[str]()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        if get_ident() == this_thread and "synchroniz" in str(message) and not is_outside():
            syncs.append(_first_line(message) + _in_module(sys._getframe(1)))

    with _sync_mode, warnings.catch_warnings():
        mode = torch.cuda.get_sync_debug_mode()
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            torch.cuda.set_sync_debug_mode("warn")
            with warm_up_run():
                forward()
        except RuntimeError as error:
            syncs.append(_error_line(error))
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return f"its forward cannot be captured ({syncs[0]})" if syncs else ""


def _why_replay_differs(forward: Callable[[], Step], device: torch.device) -> str:
    """Capture a forward, and return why that fails or what is wrong with its replay; empty if the replay is right.

    It is captured as stages are: on a stream that no other thread uses, and without garbage collection, since a model
    that is garbage may have graphs and memory whose release would end the capture.
    """
    steps = list[Step]()
    try:
        with (memory := GraphMemory(device)).capturing():
            graphs = memory.run_and_record(lambda: steps.append(forward()))
        expected, steps = steps[0].logits.clone(), steps[1:]
        steps[0].logits.zero_()
        for graph in graphs:
            graph.replay()
        alike = torch.allclose(steps[0].logits.float(), expected.float(), rtol=2e-2, atol=2e-2)
    except RuntimeError as error:
        return f"its forward cannot be captured ({_error_line(error)})"
    return "" if alike else "its captured forward computes something else when it is replayed"


def _error_line(error: BaseException) -> str:
    """Return what failed first, and in which module: an operation that fails also lets the end of a capture fail.

    A lack of memory is raised again: it says nothing about the model.
    """
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return _first_line(error) + ("" if trace is None else _in_module(trace.tb_frame))


def _first_line(message: object) -> str:
    return (str(message).splitlines() or [type(message).__name__])[0]


def _in_module(frame: FrameType | None) -> str:
    """Return " in <class>" of the innermost module whose method is running; empty if there is none."""
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            return f" in {type(module).__name__}"
        frame = frame.f_back
    return ""
