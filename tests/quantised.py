"""Packs weights as checkpoints do: the tests' own code, so that unpacking is not tested against itself."""

import copy

import torch
from torch import nn
from torch.nn import functional

from hf_specbranch.kernels.packed import FP4_VALUES, Packed, dense

from .models import llama

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this column of eight


def pack_last(codes):
    """Pack codes 0 to 15 into int32 words along the last dimension, the first in the lowest bits."""
    words = torch.zeros((*codes.shape[:-1], codes.shape[-1] // 8), dtype=torch.int64)
    for index in range(8):
        words |= codes[..., index::8].long() << 4 * index
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def swap_nibbles(words):
    """Exchange the two elements in each byte."""
    return (words >> 4 & 0x0F0F0F0F) | (words & 0x0F0F0F0F) << 4


def random_packed(kind, rows, depth, group, dtype=torch.float32, device="cpu"):
    """Return a random quantised or dense weight, and the weight [N, K] that it stands for in float32."""
    if kind == "dense":
        weight = (torch.randn(rows, depth) / depth**0.5).to(dtype)
        return _to(device, dense(weight)), weight.float()
    groups = depth // group
    scale = (torch.rand(rows, groups) + 0.5) / depth**0.5 / 4
    codes = torch.randint(0, 16, (rows, depth))

    def spread(values):
        return values.float().repeat_interleave(group, 1)

    if kind == "int8":
        data = torch.randint(-128, 128, (rows, depth), dtype=torch.int8)
        scale = (scale / 16).to(dtype)
        return _to(device, Packed(data, scale, "int8", group)), data.float() * spread(scale)
    if kind == "float8":
        data = (torch.randn(rows, depth) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)  # larger ones become NaN
        blocks = scale[: -(-rows // 128)].float() / 64
        weight = data.float() * spread(blocks.repeat_interleave(128, 0)[:rows])
        return _to(device, Packed(data, blocks, "float8", group, scale_rows=128)), weight
    if kind == "mxfp4":
        exponents = torch.randint(118, 124, (rows, groups), dtype=torch.uint8)
        table = torch.tensor(FP4_VALUES)
        weight = table[codes] * spread(2.0 ** (exponents.float() - 127))
        return _to(device, Packed(pack_last(codes), exponents, "table", group, table=table)), weight
    if kind == "nf4":
        table = torch.linspace(-1, 1, 16) ** 3
        words = swap_nibbles(pack_last(codes))
        packed = Packed(words, 8 * scale, "table", group, table=table, high_first=True)
        return _to(device, packed), table[codes] * spread(8 * scale)
    scale = scale.to(dtype)
    if kind == "gptq":
        points = torch.randint(0, 16, (rows, groups))
        packed = Packed(
            pack_last(codes).T.contiguous().T, scale.T.contiguous().T, "offset", group,
            zero=pack_last(points.T).contiguous().T, zeros="words", zero_offset=1,
        )  # fmt: skip
        return _to(device, packed), (codes - spread(points) - 1) * spread(scale)
    if kind == "asymmetric":
        points = torch.randint(0, 16, (rows, groups))
        packed = Packed(
            pack_last(codes), scale, "offset", group, zero=pack_last(points.T).T.contiguous(), zeros="words"
        )
        return _to(device, packed), (codes - spread(points)) * spread(scale)
    if kind == "shift":
        shift = (torch.randn(rows, groups) / depth**0.5).to(dtype)
        packed = Packed(pack_last(codes ^ 8), scale, "signed", group, zero=shift, zeros="shift")
        return _to(device, packed), (codes - 8) * spread(scale) + spread(shift)
    assert kind == "symmetric"
    return _to(device, Packed(pack_last(codes), scale, "offset", group)), (codes - 8) * spread(scale)


KINDS = ("int8", "float8", "symmetric", "asymmetric", "gptq", "shift", "mxfp4", "nf4")


def groups_of(kind, depth):
    """Return the sizes of groups that the kernel takes."""
    large = (128, depth)
    return (128,) if kind == "float8" else large if kind == "int8" else (32, 64, *large)


def _to(device, packed):
    moved = {name: value.to(device) for name, value in packed._asdict().items() if torch.is_tensor(value)}
    return packed._replace(**moved)


# ---- linear layers as the packages build them: the same tensors under the same names


def dense_on(layer, x):
    """Return the dequantised weight of a stand-in, moved once to where the input is."""
    moved = layer.__dict__.setdefault("moved", {})
    key = x.device, x.dtype
    if key not in moved:
        moved[key] = layer.dense().to(x)
    return moved[key]


class Float8Linear(nn.Linear):
    """Block-scaled FP8, as transformers' FP8Linear stores it."""

    def __init__(self, weight):
        rows, depth = weight.shape
        super().__init__(depth, rows, bias=False)
        blocks = weight.float().view(rows // 128, 128, depth // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        data = (blocks / scale[:, None, :, None]).reshape(rows, depth).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale)
        self.block_size = (128, 128)

    def dense(self):
        return self.weight.float() * self.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)

    def forward(self, x):
        return functional.linear(x, self.dense().to(x.dtype))


class WordsLinear(nn.Module):
    """4 bits with zero points, as compressed-tensors stores them."""

    def __init__(self, weight, group=64):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        codes, points, scale = quantise(weight, group)
        self.weight_packed = nn.Parameter(pack_last(codes), requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.weight_zero_point = nn.Parameter(pack_last(points.T).T.contiguous(), requires_grad=False)
        self.kept = ((codes - points.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1),)

    def dense(self):
        return self.kept[0]

    def forward(self, x):
        return functional.linear(x, dense_on(self, x))


class GptqLinear(nn.Module):
    """4 bits as GPTQ stores them, in buffers. The first version of the format stores zero points minus one."""

    def __init__(self, weight, group=128, version=1):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        codes, points, scale = quantise(weight, group)
        points = points.clamp(1, 15)
        stored = points - 1 if version == 1 else points
        self.register_buffer("qweight", pack_last(codes).T.contiguous())
        self.register_buffer("qzeros", pack_last(stored.T))
        self.register_buffer("scales", scale.T.contiguous())
        self.register_buffer("g_idx", torch.arange(self.in_features, dtype=torch.int32) // group)
        self.kept = ((codes - points.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1),)
        self.bias = None

    def dense(self):
        return self.kept[0]

    def forward(self, x):
        return functional.linear(x, dense_on(self, x))


class AwqLinear(nn.Module):
    """4 bits packed along the outputs, as AWQ stores them: no kernel of ours reads this layout."""

    def __init__(self, weight, group=128):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        codes, points, scale = quantise(weight, group)

        def order(values):
            return values.T.reshape(-1, self.out_features // 8, 8)[..., list(AWQ_ORDER)].flatten(1)

        self.register_buffer("qweight", pack_last(order(codes)))
        self.register_buffer("qzeros", pack_last(order(points)))
        self.register_buffer("scales", scale.T.contiguous())
        self.kept = ((codes - points.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1),)

    def dense(self):
        return self.kept[0]

    def forward(self, x):
        return functional.linear(x, dense_on(self, x))


def quantise(weight, group):
    """Return codes 0 to 15 [N, K], zero points and scales [N, K / group]."""
    groups = weight.detach().float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-8)
    points = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale[..., None] + points[..., None]).round().clamp(0, 15)
    return codes.flatten(1).long(), points.long(), scale


def quantised_model(kind, **changes):
    """Return a tiny model whose projections are quantised, and the model with the dequantised weights."""
    dense = llama(seed=3, hidden=128, layers=2, intermediate_size=256, num_key_value_heads=4, **changes)
    model = copy.deepcopy(dense)
    for inner, outer in zip(dense.model.layers, model.model.layers):
        for block in ("self_attn", "mlp"):
            for name, linear in list(getattr(inner, block).named_children()):
                if isinstance(linear, nn.Linear):
                    layer = kind(linear.weight.data)
                    setattr(getattr(outer, block), name, layer)
                    linear.weight.data = layer.dense().clone()
    return model, dense
