"""What is kept on disk between processes: where, for which machine and model, and how it is written.

The environment variable `HF_SPECBRANCH_CACHE` names another folder than `$HF_HOME/hf_specbranch`, or is `off`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel

from .model_state import every_tensor

logger = logging.getLogger(__name__)

VARIABLE = "HF_SPECBRANCH_CACHE"
SAMPLED_WEIGHTS, SAMPLED_VALUES = 8, 64  # parameters of a model that its digest reads, and values of each


def folder(name: str) -> Path | None:
    """Return a folder for files of one kind, or None if nothing is kept."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return Path(HF_HOME) / "hf_specbranch" / name
    return None if named.lower() in ("", "0", "off") else Path(named) / name


def write_whole(path: Path, text: str) -> None:
    """Replace a file as a whole, so that it is never half written. A folder that cannot be written is not written."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            name = file.name
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        logger.debug("%s is not kept on disk: %s", path.name, error)
        if name is not None:
            Path(name).unlink(missing_ok=True)


def shapes_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return what step costs depend on: shapes and dtypes of all weights, and the attention implementation."""
    weights = [(tuple(weight.shape), str(weight.dtype)) for weight in model.parameters()]
    packed = [part for part in every_tensor(model) if part.element_size() == 1 or not part.is_floating_point()]
    weights += [(tuple(part.shape), str(part.dtype)) for part in packed]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:16]
    attention = str(getattr(model.config, "_attn_implementation", ""))
    return {"class": type(model).__name__, "weights": digest, "attention": attention}


def sample_of(model: PreTrainedModel) -> bytes:
    """Return some values of some weights. Fine-tunes differ in them; reading all weights would take too long."""
    weights = every_tensor(model)
    some = weights[:: max(1, len(weights) // SAMPLED_WEIGHTS)]
    values = [weight.detach().reshape(-1)[:SAMPLED_VALUES].to(torch.float32) for weight in some]
    return b"".join(value.cpu().numpy().tobytes() for value in values)


@lru_cache
def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except (OSError, IndexError):
        named = []
    return f"{device.type}: {named[0] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


@lru_cache
def versions() -> dict[str, str]:
    try:
        ours = metadata.version("hf_specbranch")
    except metadata.PackageNotFoundError:
        ours = "source"
    return {"hf_specbranch": ours, "torch": str(torch.__version__), "transformers": transformers.__version__}
