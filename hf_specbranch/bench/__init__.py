"""Measuring: prompt sets, and full-size twins of small models."""

from hf_specbranch.bench.grow import grow
from hf_specbranch.bench.prompts import Prompt, python_prompts, read_prompts
from hf_specbranch.bench.shapes import NAMED_SHAPES, Shape

__all__ = ["NAMED_SHAPES", "Prompt", "Shape", "grow", "python_prompts", "read_prompts"]
