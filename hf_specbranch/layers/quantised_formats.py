"""Formats of quantised linear layers, recognised by the tensors they hold.

Each format is compared with the layer's own forward before it is used: formats with the same tensors may differ in
what they mean. A layer whose own forward cannot run here, for lack of a package, is taken at its word.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.backend import references_only
from ..kernels.packed import WORD, Code, Packed
from ..kernels.quantised import kernel_takes, quantised_reference
from .base import untouched

Format = Callable[[Any], Packed | None]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # a wrong zero point is above 0.1


def recognise_format(layer: Any) -> Format | None:
    """Return how to read the weight of a linear layer as `Packed`: a format that agrees with the layer's own forward.

    Example:
        >>> recognise_format(nn.Linear(8, 8)) is None  # it is not quantised
        True
    """
    for read in possible_formats(layer):
        packed = read(layer)
        if packed is not None and _agrees(layer, packed):
            return read
    return None


def possible_formats(layer: Any) -> list[Format]:
    """Return the formats that the kernel reads and whose tensors a layer holds."""
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    if not isinstance(layer, nn.Module) or not untouched(layer) or not all(isinstance(size, int) for size in sizes):
        return []
    found = [(read, packed) for read in FORMATS if (packed := read(layer)) is not None]
    return [read for read, packed in found if packed.shape == (sizes[1], sizes[0]) and kernel_takes(packed)]


@torch.no_grad()
def _agrees(layer: Any, packed: Packed) -> bool:
    """Return whether the layer's own forward multiplies by this weight; true where it cannot run."""
    bias = getattr(layer, "bias", None)
    dtype = next((each.dtype for each in (bias, packed.scale) if each is not None and each.dtype in TOLERANCE), None)
    generator = torch.Generator(packed.data.device).manual_seed(0)
    noise = torch.randn((2, packed.shape[1]), generator=generator, device=packed.data.device)
    for each in dict.fromkeys((dtype or torch.bfloat16, torch.bfloat16, torch.float32)):
        x = noise.to(each)
        try:
            with references_only():  # a layer of ours would run a kernel, whose result is noise in a dry run
                own = layer(x).float()
        except (ImportError, OSError):  # kernels of other packages
            return True
        except Exception:  # it takes another dtype
            continue
        expected = quantised_reference(x.float(), packed, bias)
        return bool((own - expected).norm() <= TOLERANCE[each] * expected.norm())
    return False


def _float8_blocks(layer: Any) -> Packed | None:
    """Block-scaled FP8: `weight` of float8_e4m3fn and `weight_scale_inv`, one scale for 128 x 128 elements."""
    weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale_inv", None)
    if not _is(weight, torch.float8_e4m3fn) or not isinstance(scale, Tensor):
        return None
    if scale.dtype == getattr(torch, "float8_e8m0fnu", None):
        scale = scale.view(torch.uint8)
    if scale.numel() == 1:  # one for the whole weight
        return Packed(weight.detach(), scale.detach().reshape(1, 1), "float8", weight.shape[1], weight.shape[0])
    rows, group = getattr(layer, "block_size", None) or (128, 128)
    if scale.shape != (-(-weight.shape[0] // rows), -(-weight.shape[1] // group)):
        return None
    return Packed(weight.detach(), scale.detach(), "float8", group, rows)


def _rows_of_bytes(layer: Any) -> Packed | None:
    """int8 and FP8 as in compressed-tensors: `weight` and `weight_scale` per row or group."""
    weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale", None)
    code: Code = "int8" if _is(weight, torch.int8) else "float8"
    if not _is(weight, torch.int8 if code == "int8" else torch.float8_e4m3fn) or not isinstance(scale, Tensor):
        return None
    if scale.numel() % weight.shape[0] or weight.shape[1] % (scale.numel() // weight.shape[0]):
        return None
    scale = scale.detach().reshape(weight.shape[0], -1)
    return Packed(weight.detach(), scale, code, weight.shape[1] // scale.shape[1])


def _words(layer: Any) -> Packed | None:
    """4 bits as in compressed-tensors: `weight_packed`, `weight_scale` and perhaps `weight_zero_point`."""
    words, scale = getattr(layer, "weight_packed", None), getattr(layer, "weight_scale", None)
    zero = getattr(layer, "weight_zero_point", None)
    if not _is(words, torch.int32) or not isinstance(scale, Tensor) or scale.dim() != 2:
        return None
    if getattr(layer, "weight_g_idx", None) is not None or scale.shape[0] != words.shape[0]:
        return None
    group = words.shape[1] * WORD // scale.shape[1]
    if zero is None:
        return Packed(words.detach(), scale.detach(), "offset", group)
    if not _is(zero, torch.int32) or zero.shape != (-(-words.shape[0] // WORD), scale.shape[1]):
        return None
    return Packed(words.detach(), scale.detach(), "offset", group, zero=zero.detach(), zeros="words")


def _gptq(layer: Any, zero_offset: int) -> Packed | None:
    """GPTQ's 4 bits: `qweight` [K / 8, N], `scales` [G, N], `qzeros` [G, N / 8], groups in order."""
    words, scale, zero = (getattr(layer, name, None) for name in ("qweight", "scales", "qzeros"))
    if not _is(words, torch.int32) or not isinstance(scale, Tensor) or scale.dim() != 2 or not _is(zero, torch.int32):
        return None
    depth, groups = words.shape[0] * WORD, scale.shape[0]
    if scale.shape[1] != words.shape[1] or zero.shape != (groups, words.shape[1] // WORD) or depth % groups:
        return None
    order = getattr(layer, "g_idx", None)
    if order is not None and order.numel() and not _in_order(order, depth // groups):
        return None
    return Packed(
        words.detach().T, scale.detach().T, "offset", depth // groups,
        zero=zero.detach().T, zeros="words", zero_offset=zero_offset,
    )  # fmt: skip


def _gptq_first(layer: Any) -> Packed | None:
    """GPTQ's first version stores zero points minus one."""
    return _gptq(layer, 1)


def _gptq_second(layer: Any) -> Packed | None:
    return _gptq(layer, 0)


def _torchao(layer: Any) -> Packed | None:
    """Weight-only int8 and plain int4 of torchao: a tensor subclass that holds `qdata`, `scale` and `zero_point`."""
    weight = getattr(layer, "weight", None)
    data, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if weight is None or not isinstance(data, Tensor) or not isinstance(scale, Tensor) or data.dim() != 2:
        return None
    if getattr(weight, "act_quant_kwargs", None) is not None or getattr(weight, "act_pre_scale", None) is not None:
        return None
    rows, depth = weight.shape
    zero = getattr(weight, "zero_point", None)
    if data.dtype == torch.int8 and data.shape == weight.shape:
        if scale.numel() % rows or (zero is not None and _answer(zero, torch.any)):
            return None
        scale = scale.reshape(rows, -1)
        return Packed(data, scale, "int8", depth // scale.shape[1])
    if data.dtype in (torch.uint8, torch.int8) and data.shape == (rows, depth // 2) and zero is not None:
        if scale.shape != zero.shape or scale.dim() != 2 or scale.shape[1] != rows or not data.is_contiguous():
            return None
        group = depth // scale.shape[0]
        return Packed(data.view(torch.int32), scale.T, "signed", group, zero=zero.T, zeros="shift")
    return None


def _bitsandbytes(layer: Any) -> Packed | None:
    """4 bits of bitsandbytes: bytes in row order, `quant_state` with 16 values and one scale per block."""
    weight = getattr(layer, "weight", None)
    state = getattr(weight, "quant_state", None)
    if weight is None or state is None or getattr(state, "nested", False) or not isinstance(state.absmax, Tensor):
        return None
    rows, depth = state.shape
    data, block = weight.data, state.blocksize
    if (
        data.dtype != torch.uint8
        or data.numel() != rows * depth // 2
        or depth % block
        or state.absmax.dtype != torch.float32
    ):
        return None
    words = data.reshape(rows, depth // 2).view(torch.int32)
    table = state.code.float()
    return Packed(words, state.absmax.view(rows, -1), "table", block, table=table, high_first=True)


def _is(tensor: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Return whether this is a plain contiguous matrix of a dtype."""
    plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return plain and tensor.dtype == dtype and tensor.dim() == 2 and tensor.is_contiguous()


class _Answers:
    """Remembers what was found about the values of tensors, until they are written or replaced.

    A weight is read in every pass, and to look at values waits for the device, which a capture must not do.
    """

    def __init__(self) -> None:
        # memory, version and answer
        self._known: MutableMapping[Tensor, tuple[int, int, bool]] = WeakIdKeyDictionary()

    def __call__(self, tensor: Tensor, ask: Callable[[Tensor], Tensor]) -> bool:
        """Return what `ask` says of a tensor; one question per tensor."""
        now, known = (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version), self._known.get(tensor)
        if known is None or known[:2] != now:
            known = self._known[tensor] = (*now, bool(ask(tensor)))
        return known[2]


_answer = _Answers()


def _in_order(order: Tensor, group: int) -> bool:
    return _answer(order, lambda order: (order == torch.arange(order.numel(), device=order.device) // group).all())


FORMATS: tuple[Format, ...] = (
    _float8_blocks, _rows_of_bytes, _words, _gptq_first, _gptq_second, _torchao, _bitsandbytes,
)  # fmt: skip
