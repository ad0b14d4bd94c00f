"""Shapes of well-known models, for twins that cost what those models cost."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes that decide what a Llama-type model costs. The vocabulary stays that of the grown model.

    Args:
        hidden_size: width of the residual stream.
        num_hidden_layers: number of decoder layers.
        num_attention_heads: query heads a layer.
        num_key_value_heads: key and value heads a layer; must divide `num_attention_heads`.
        intermediate_size: width of the MLP.
        head_dim: width of one head; 0 means `hidden_size / num_attention_heads`.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads ({kv_heads}) does not divide num_attention_heads ({heads}): "
                f"choose a divisor of {heads}"
            )
        if not self.head_dim:
            if self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads ({heads}) does not divide hidden_size ({self.hidden_size}): "
                    "choose sizes that divide, or pass head_dim="
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since rotary embeddings turn pairs, got {self.head_dim}")


NAMED_SHAPES: dict[str, Shape] = {
    "68m": Shape(768, 2, 12, 12, 3072),  # JackFram/llama-68m
    "160m": Shape(768, 12, 12, 12, 3072),  # JackFram/llama-160m
    "1b": Shape(2048, 22, 32, 4, 5632),  # TinyLlama 1.1B
    "1.3b": Shape(2048, 24, 16, 16, 5504),  # DeepSeek-Coder 1.3B
    "7b": Shape(4096, 32, 32, 32, 11008),  # LLaMA, Vicuna 7B
    "13b": Shape(5120, 40, 40, 40, 13824),  # LLaMA, Vicuna 13B
    "33b": Shape(7168, 62, 56, 8, 19200),  # DeepSeek-Coder 33B
}


def resolve_shape(shape: Shape | str) -> Shape:
    """The shape itself, or the named one.

    Example:
        >>> resolve_shape("7b").num_hidden_layers
        32
    """
    if isinstance(shape, Shape):
        return shape
    if not isinstance(shape, str):
        raise TypeError(f"shape must be a Shape or one of {', '.join(NAMED_SHAPES)}, got {type(shape).__name__}")
    if shape not in NAMED_SHAPES:
        raise ValueError(f"unknown shape {shape!r}: use one of {', '.join(NAMED_SHAPES)}, or pass a Shape(...)")
    return NAMED_SHAPES[shape]
