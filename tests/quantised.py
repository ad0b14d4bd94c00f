"""Packs weights as checkpoints do: the tests' own code, so that unpacking is not tested against itself."""

import torch

from hf_specbranch.kernels.packed import FP4_VALUES, Packed

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
    """Return a random quantised weight of a kind, and the weight [N, K] that it stands for in float32."""
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
        data = (torch.randn(rows, depth) * 100).to(torch.float8_e4m3fn)
        blocks = scale[: -(-rows // 128)].float() / 64
        dense = data.float() * spread(blocks.repeat_interleave(128, 0)[:rows])
        return _to(device, Packed(data, blocks, "float8", group, scale_rows=128)), dense
    if kind == "mxfp4":
        exponents = torch.randint(118, 124, (rows, groups), dtype=torch.uint8)
        table = torch.tensor(FP4_VALUES)
        dense = table[codes] * spread(2.0 ** (exponents.float() - 127))
        return _to(device, Packed(pack_last(codes), exponents, "table", group, table=table)), dense
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
