"""The processes of a tensor parallel target: rank 0 decides, the others run the same passes of the target.

Rank 0 runs the whole loop: draft, verifier, planner, stopping criteria, streamer. The other ranks run nothing but
passes of the target, on inputs that rank 0 sends them before each pass: tokens, positions, slots and spans. So no
decision is made twice, and none depends on two ranks computing or timing the same. See `decoding.parallel_ranks`.

On a CPU an order and the inputs of its pass are one broadcast. On a GPU the order goes from host to host, when rank 0
launches the pass, and the inputs from device to device, inside the captured stage.

An error that one rank alone raises in a pass leaves the others waiting in a collective of that pass. So the rank that
raises it writes down the cause, closes its connections, and ends with its error; the others end with `LostRank`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.rounds import ForwardInputs
from ..kernels.spans import SPANS

PREFILL, PASS, FALL_BACK, FAILED, END = range(5)  # kinds of orders
INPUTS = 7  # integers per query: token, slot, position, spans
ROOM = 1008  # integers of the inputs that travel with an order; longer inputs are sent after it
# What torch says where the connection to another process is lost.
LOST = ("gloo", "nccl", "connection", "peer", "socket", "broken pipe", "timed out")
# How long a rank that has failed in a pass waits for all others to fail in it too.
MEETING = timedelta(seconds=5)
CAUSE = "hf_specbranch/cause"  # where the store of the group keeps why it is broken

Value = TypeVar("Value")
_names = count(1)  # of graphs that were captured together


class Order(NamedTuple):
    """What rank 0 tells the others to do next."""

    kind: int
    queries: int = 0  # tokens per row of the pass
    shown: int = 0  # slots that it reads
    stage: int = 0  # names the captured stage, or before the prompt the graphs, of rank 0; 0: nothing is captured
    fresh: bool = False  # rank 0 captures this stage now
    has_inputs: bool = False  # the inputs come with the order


class CapturingRunner(Protocol):
    """What is asked of `eager.EagerRunner` here."""

    joint_graphs: int
    captures: bool

    def drop_graphs(self) -> None: ...


class CapturingBuffers(Protocol):
    """What is asked of `static_buffers.Buffers` here."""

    serial: int

    def has_run(self, key: Hashable) -> bool: ...


class LostRank(ConnectionError):
    """Another process of the tensor parallel group has stopped, or has failed in a pass that this one waits in."""


class Ranks:
    """The processes among which a target is sharded.

    Args:
        group: the process group of its collectives.
        device: where the weights of this rank are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.first = dist.get_global_rank(group, 0)  # who decides
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Between hosts. Apart from the collectives of passes, so that ranks can meet after a pass that has failed.
        members = dist.get_process_group_ranks(group)
        self.control = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self.room = ROOM if device.type == "cpu" else 0
        self.leading = False  # the other ranks wait for orders
        self.broken = ""  # why no collective of this group can succeed any more

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    # ---- decisions outside the loop

    def agree(self, value: Value) -> Value:
        """Return the value of rank 0, on all ranks."""
        if self.leading:
            raise RuntimeError(
                "generate() of a tensor parallel model was called while it generates, by a processor, a streamer or "
                "another thread: calls must come one after the other"
            )
        box = [value]
        with self.watched():
            dist.broadcast_object_list(box, src=self.first, group=self.control)
        return box[0]

    def agree_on(self, decide: Callable[[], Value]) -> Value:
        """Let rank 0 decide; return its result, or raise its error, on all ranks."""
        result: Any = None
        error: Exception | None = None
        if self.leads:
            try:
                result = decide()
            except Exception as found:
                error = found
        result, said = self.agree((result, None if error is None else sendable(error)))
        if said is not None:
            raise error or said
        return result  # type: ignore[no-any-return]

    def all_agree(self, value: bool) -> bool:
        """Return whether the value is true on all ranks."""
        flag = torch.tensor([int(value)])
        with self.watched():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.control)
        return bool(flag)

    # ---- orders of rank 0

    def order_prefill(self, runner: CapturingRunner, capacity: int) -> None:
        """Let all ranks read the prompt, and make room for so many slots."""
        if self.leads:
            order = Order(PREFILL, next(_names), capacity, runner.joint_graphs)
            self.send(order)
            self.join(runner, order)

    def join(self, runner: CapturingRunner, order: Order) -> None:
        """Drop captured stages unless all ranks have captured them together.

        NCCL replays a collective only in graphs that all ranks captured at the same time.
        """
        if runner.captures and not self.all_agree(0 < runner.joint_graphs == order.stage):
            runner.drop_graphs()
            runner.joint_graphs = order.queries

    def order_stage(self, buffers: CapturingBuffers, key: Hashable, queries: int, shown: int) -> None:
        """Let the other ranks replay or capture the pass that this rank runs as a stage with this key."""
        stage = 1 + hash((buffers.serial, key)) % (1 << 62)
        self.send(Order(PASS, queries, shown, stage, fresh=not buffers.has_run(key)))

    def order_pass(self, inputs: ForwardInputs, shown: int) -> None:
        """Let the other ranks run a pass that is not captured."""
        self.send(Order(PASS, inputs.tokens.shape[1], shown), pack(inputs))

    def share_inputs(self, inputs: ForwardInputs) -> None:
        """Send the inputs of a pass from within its stage."""
        self.share(pack(inputs))

    # ---- messages

    def send(self, order: Order, inputs: Tensor | None = None) -> None:
        """Send an order, and the inputs of its pass [B, Q, 7] if it is not captured."""
        message = torch.zeros(len(Order._fields) + self.room, dtype=torch.long)
        fits = inputs is not None and inputs.numel() <= self.room
        order = order._replace(has_inputs=fits)
        message[: len(order)] = torch.tensor(list(map(int, order)))
        if inputs is not None and fits:
            message[len(order) : len(order) + inputs.numel()] = inputs.flatten()
        with self.watched():
            dist.broadcast(message, src=self.first, group=self.control)
        if inputs is not None and not fits:
            self.share(inputs)

    def receive(self, rows: int) -> tuple[Order, Tensor | None]:
        """Wait for the next order; return it with the inputs [B, Q, 7] if they come with it."""
        message = torch.zeros(len(Order._fields) + self.room, dtype=torch.long)
        with self.watched():
            dist.broadcast(message, src=self.first, group=self.control)
        numbers = message[: len(Order._fields)].tolist()
        order = Order(*numbers[:4], *map(bool, numbers[4:]))
        if not order.has_inputs:
            return order, None
        inputs = message[len(order) :][: rows * order.queries * INPUTS]
        return order, inputs.view(rows, order.queries, INPUTS)

    def share(self, inputs: Tensor) -> Tensor:
        """Broadcast inputs [B, Q, 7] between devices, in place; a stage that does so can be captured."""
        with self.watched():
            dist.broadcast(inputs, src=self.first, group=self.group)
        return inputs

    # ---- failures

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Say which rank has lost contact, and why, where torch reports a broken connection."""
        if self.broken:
            raise self._lost()
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            if not isinstance(error, dist.DistError) and not any(word in text for word in LOST):
                raise
            self.break_up()
            raise self._lost(str(error).splitlines()[0]) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do what all ranks do now, such as a pass.

        An error that all of them raise leaves their collectives in step. Any other breaks the group, so that no rank
        waits for one that has failed.
        """
        try:
            with self.watched():
                yield
        except LostRank:
            raise
        except BaseException as error:
            if not getattr(error, "failed_together", False) and not self._all_have_failed():
                self.break_up(error)
            error.failed_together = True  # type: ignore[attr-defined]
            raise

    def _all_have_failed(self) -> bool:
        """Wait for the other ranks to come here too, after an error of their own."""
        try:
            dist.barrier(group=self.control, async_op=True).wait(MEETING)
        except RuntimeError:
            return False
        return True

    def break_up(self, error: BaseException | None = None) -> None:
        """Close the connections of this rank, so that ranks that wait for it raise `LostRank`.

        Args:
            error: why, if it is an error of this rank.
        """
        if self.broken:
            return
        cause = "" if error is None else f"rank {self.rank} has failed ({type(error).__name__}: {error})"
        with suppress(RuntimeError):  # the store may be in the process that has stopped
            store = dist.distributed_c10d._get_process_group_store(self.group)
            if cause and not store.check([CAUSE]):
                store.set(CAUSE, cause)
            cause = store.get(CAUSE).decode() if store.check([CAUSE]) else ""
        self.broken = cause or "another process has stopped"
        _close(self.control)
        if self.device.type == "cpu":  # NCCL ends what waits for a lost rank by itself, after its own timeout
            _close(self.group)

    def _lost(self, message: str = "") -> LostRank:
        details = f" ({message})" if message else ""
        return LostRank(
            f"rank {self.rank} of {self.size} has lost contact with the tensor parallel group: {self.broken}; start "
            f"all processes again{details}"
        )


def sendable(error: Exception) -> Exception:
    """Return an error that another process can be sent: the same, or its message if it cannot be unpickled.

    Example:
        >>> sendable(KeyError("a name")), sendable(ValueError(lambda: None)).__class__
        (KeyError('a name'), <class 'RuntimeError'>)
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error of others does there
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _close(group: dist.ProcessGroup) -> None:
    """Close the connections of this process in a gloo group.

    Gloo closes all connections of a process in which an operation has timed out. Nobody sends what is received here.
    """
    me = dist.get_rank(group)
    for other in range(dist.get_world_size(group)):
        if other != me:
            with suppress(RuntimeError):  # a connection that is closed already fails at once
                request = dist.irecv(torch.zeros(1), group=group, group_src=other)
                assert request is not None
                request.wait(timedelta(milliseconds=1))


def follows(model: PreTrainedModel) -> bool:
    """Return whether another rank decides for this one."""
    group = tensor_parallel_group(model)
    return group is not None and dist.get_rank(group) != 0


def pack(inputs: ForwardInputs) -> Tensor:
    """Return the inputs of a pass as one tensor [B, Q, 7].

    Example:
        >>> one = torch.ones((1, 2), dtype=torch.long)
        >>> inputs = ForwardInputs(one, 2 * one, 3 * one, torch.zeros((1, 2, 4), dtype=SPANS))
        >>> pack(inputs).tolist()
        [[[1, 2, 3, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0]]]
        >>> unpack(pack(inputs)).positions.tolist()
        [[3, 3]]
    """
    return torch.cat([torch.stack(inputs[:3], dim=-1), inputs.spans.long()], dim=-1)


def unpack(packed: Tensor) -> ForwardInputs:
    """Return the inputs of a pass that `pack` has packed."""
    return ForwardInputs(packed[..., 0], packed[..., 1], packed[..., 2], packed[..., 3:].to(SPANS))


def tensor_parallel_group(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """Return the process group of a model that is sharded by a `tp_plan`, and in no other way; None for others."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or getattr(model, "_tp_size", None) is None:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()  # type: ignore[no-any-return]
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape))
    others = [size for name, size in sizes.items() if name != "tp"]
    return None if "tp" not in sizes or max(others, default=1) > 1 else mesh["tp"].get_group()
