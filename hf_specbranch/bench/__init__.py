"""Measuring: prompt sets, full-size twins of small models, and the comparison of methods."""

from hf_specbranch.bench.grow import NAMED_SHAPES, Shape, grow
from hf_specbranch.bench.prompts import Prompt, python_prompts, read_prompts

__all__ = ["NAMED_SHAPES", "Prompt", "Shape", "grow", "python_prompts", "read_prompts"]
