"""A call on a tensor parallel target: rank 0 generates, the other ranks run the target's passes with it.

Rank 0 runs the call as in one process; its `Target` sends an order before each pass (`runtime.ranks`). The other ranks
follow these orders until rank 0 has ended, and return its output. They have no draft, and call no processor or stopping
criterion. Their streamers are given the whole text at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..fallback import FallBack
from ..runtime.ranks import END, FAILED, FALL_BACK, INPUTS, PASS, PREFILL, LostRank, Order, Ranks, unpack
from ..runtime.selection import runner_for
from ..stats import SpecBranchStats
from .call import Call
from .engine import SpecBranchOutput, assembled, leave_cache
from .target import Target

Result = tuple[Any, SpecBranchStats | None]


def on_all_ranks(call: Call, run: Callable[[Call], Result]) -> Result:
    """Run a call on all ranks of its model; return the output and the statistics of rank 0 on each of them.

    Args:
        call: the call, with its ranks.
        run: what rank 0 does; it may raise `FallBack`, and then all ranks do.
    """
    ranks: Ranks = call.ranks
    config = call.config
    settings = call.rows, call.slots, config.runtime, config.kernels, config.memory_budget
    with ranks.together(), runner_for(call.model, "target", *settings):
        pass  # what is found out once per model, by passes on all ranks
    return _lead(call, ranks, run) if ranks.leads else _follow(call, ranks)


def _lead(call: Call, ranks: Ranks, run: Callable[[Call], Result]) -> Result:
    try:
        ranks.leading = True
        try:
            output, stats = run(call)
        finally:
            ranks.leading = False
    except LostRank:
        raise
    except BaseException as error:
        with suppress(LostRank):  # if the group is broken, the others know why
            ranks.send(Order(FALL_BACK if isinstance(error, FallBack) else FAILED))
            ranks.agree(str(error) if isinstance(error, FallBack) else f"{type(error).__name__}: {error}")
        raise
    with ranks.together():
        ranks.send(Order(END))
        ranks.agree((_without_cache(output), stats))
    return output, stats


def _follow(call: Call, ranks: Ranks) -> Result:
    """Run the passes that rank 0 orders; return its output."""
    config = replace(call.config, length_head=None)
    bare = replace(call, draft=None, config=config, hooks=(), observer=None, streamer=None)
    with ExitStack() as stack:
        try:
            parts = stack.enter_context(assembled(bare, SpecBranchStats())).parts()
            order, failure = _follow_orders(parts.target, ranks, call.rows)
            said: Any = ranks.agree(None)
        except BaseException as error:
            ranks.break_up(error)
            raise
        if order.kind == FALL_BACK:
            raise FallBack(said)
        if order.kind == FAILED:
            raise failure or RuntimeError(
                f"rank 0 of the tensor parallel group has failed ({said}); this is rank {ranks.rank}"
            )
        (output, stats), device = said, call.input_ids.device
        output = _on_device(output, device)
        sequences = output if isinstance(output, Tensor) else output["sequences"]
        parts.text.lengths = [sequences.shape[1]] * call.rows
        leave_cache(call, parts.target)
    if call.streamer is not None:
        for column in sequences[:, call.input_ids.shape[1] :].T.cpu():
            call.streamer.put(column)
        call.streamer.end()
    if isinstance(output, Tensor):
        return output, stats
    return SpecBranchOutput(**{**output, "past_key_values": call.past, "stats": stats}), stats


def _follow_orders(target: Target, ranks: Ranks, rows: int) -> tuple[Order, BaseException | None]:
    """Run the passes that rank 0 orders; return its last order, and the error of this rank if all ranks have failed."""
    follower, failure = None, None
    while True:
        order, inputs = ranks.receive(rows)
        if order.kind not in (PREFILL, PASS):
            return order, failure
        try:
            with ranks.together():
                if order.kind == PREFILL:
                    follower = _Follower(target, ranks, order)
                    target.prefill()
                else:
                    assert follower is not None
                    follower.run_pass(order, inputs)
        except LostRank:
            raise
        except BaseException as error:
            if ranks.broken:
                raise
            failure = error  # rank 0 has failed too, and says so


class _Follower:
    """Runs passes of the target that rank 0 orders.

    Args:
        target: the target of this rank.
        ranks: all ranks.
        order: the first one, which says how many slots a row may take.
    """

    def __init__(self, target: Target, ranks: Ranks, order: Order) -> None:
        self.target, self.ranks, runner = target, ranks, target.runner
        ranks.join(runner, order)
        self.buffers = runner.buffers(("follow", order.shown))
        seen, self.rows = target.seen, target.seen.shape[0]
        target.seen = self.buffers.tensor("follow.seen", (self.rows, order.shown), torch.bool).fill_(True)
        width = min(seen.shape[1], order.shown)
        target.seen[:, :width] = seen[:, :width]

    def run_pass(self, order: Order, inputs: Tensor | None) -> None:
        """Run a pass over inputs [B, Q, 7] that came with the order, or that rank 0 sends now."""
        target, key = self.target, ("follow", order.stage)
        target.runner.reserve(self.rows, order.shown)
        shape = self.rows, order.queries, INPUTS
        if not order.stage:
            if inputs is None:
                inputs = self.ranks.share(torch.zeros(shape, dtype=torch.long, device=target.device))
            target.run(unpack(inputs), order.shown, target.forward)
            return
        if order.fresh:
            self.buffers.forget(key)
        elif not self.buffers.has_run(key):
            raise RuntimeError(f"rank {self.ranks.rank} has not captured what rank 0 replays: start all ranks again")
        memory, forward = self.buffers.tensor(f"follow{order.queries}", shape), target.runner.forward_uncaptured

        def stage() -> None:
            target.run(unpack(self.ranks.share(memory)), order.shown, forward)

        self.buffers.run(key, stage)


def _without_cache(output: Any) -> Any:
    """Return an output in a form that can be sent: its fields on the CPU, without those that each rank has itself."""
    if isinstance(output, Tensor):
        return output.cpu()
    return {
        name: _on_device(value, "cpu") for name, value in output.items() if name not in ("past_key_values", "stats")
    }


def _on_device(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _on_device(each, device) for name, each in value.items()}
    return tuple(_on_device(each, device) for each in value) if isinstance(value, tuple) else value
