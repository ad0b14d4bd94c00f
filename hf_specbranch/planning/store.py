"""Keeps what the planner knows of a pair on disk, so that a new process plans its first text as the last one did.

One JSON file per machine, versions and shapes of the pair, in `$HF_HOME/hf_specbranch/plans`. Step costs belong to the
shapes: two fine-tunes of one model share them. How well the draft agrees, and so the chosen plans, belong to the
weights: they are kept per digest of some of them. The environment variable `HF_SPECBRANCH_CACHE` names another folder,
or is `off`.

A file is replaced as a whole, so that it is never half written. Of two processes that write at the same time the last
one wins; what it does not know itself it takes over from the file. A file that is damaged, of another version or with
numbers that make no sense is ignored, and a folder that cannot be written is not written.
"""

from __future__ import annotations

import hashlib
import json
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

logger = logging.getLogger(__name__)

FORMAT = 1
VARIABLE = "HF_SPECBRANCH_CACHE"
MOST_PAIRS = 8  # digests of weights that are kept per file
SAMPLED_WEIGHTS, SAMPLED_VALUES = 8, 64  # parameters of a model that its digest reads, and values of each

Entries = dict[str, Any]  # ready for JSON


def folder() -> Path | None:
    """Return the folder of all files, or None if nothing is kept."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return Path(HF_HOME) / "hf_specbranch" / "plans"
    return None if named.lower() in ("", "0", "off") else Path(named)


class PairFile:
    """The file of one pair.

    Args:
        directory: where files are kept.
        machine: everything that costs depend on: device, versions, shapes.
        weights: stands for the weights of both models.

    Example:
        >>> file = PairFile(Path(tempfile.mkdtemp()), {"device": "a CPU"}, "some weights")
        >>> file.save({"costs": {"1 row": 1}, "plans": [1]})
        >>> file.load()
        {'costs': {'1 row': 1}, 'plans': [1]}
        >>> PairFile(file.directory, {"device": "a CPU"}, "others").load()  # the same shapes
        {'costs': {'1 row': 1}}
    """

    def __init__(self, directory: Path, machine: dict[str, Any], weights: str) -> None:
        self.directory, self.machine, self.weights = directory, {"format": FORMAT, **machine}, weights
        digest = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()
        self.path = directory / f"{digest[:24]}.json"

    def load(self) -> Entries:
        """Return what is kept for these weights, and `costs` for these shapes; empty if there is nothing of use."""
        content = self._read()
        costs = {"costs": content["costs"]} if content.get("costs") else {}
        return {**costs, **content.get("pairs", {}).get(self.weights, {})}

    def save(self, entries: Entries) -> None:
        """Keep these entries. Costs of other situations, and what is kept for other weights, stay."""
        content = self._read()
        entries = dict(entries)
        costs = {**content.get("costs", {}), **entries.pop("costs", {})}
        pairs = content.get("pairs", {})
        pairs.pop(self.weights, None)
        pairs[self.weights] = entries
        for oldest in list(pairs)[:-MOST_PAIRS]:
            del pairs[oldest]
        name = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".tmp", delete=False) as file:
                name = file.name
                file.write(json.dumps({"machine": self.machine, "costs": costs, "pairs": pairs}))
            os.replace(name, self.path)
        except OSError as error:
            logger.debug("what the planner learned is not kept on disk: %s", error)
            if name is not None:
                Path(name).unlink(missing_ok=True)

    def _read(self) -> Entries:
        """Return the content of the file, if it is what this version writes."""
        try:
            content = json.loads(self.path.read_text())
            if content["machine"] != self.machine or not isinstance(content["costs"], dict):
                return {}
            if not all(isinstance(entries, dict) for entries in content["pairs"].values()):
                return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        return dict(content)


def file_of(target: PreTrainedModel, draft: PreTrainedModel) -> PairFile | None:
    """Return the file of a pair; None if nothing is kept, or for weights that cannot be read."""
    directory = folder()
    if directory is None:
        return None
    try:
        weights = hashlib.sha256(_sample(target) + _sample(draft)).hexdigest()[:24]
        machine = {
            "devices": [_device_name(model.device) for model in (target, draft)],
            "versions": _versions(),
            "target": _shapes(target),
            "draft": _shapes(draft),
        }
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # quantised or meta weights, say
        logger.debug("what the planner learns of this pair is not kept on disk: %s", error)
        return None
    return PairFile(directory, machine, weights)


def _shapes(model: PreTrainedModel) -> dict[str, Any]:
    """Return what step costs depend on: shapes and dtypes of all weights, and the attention implementation."""
    weights = [(tuple(weight.shape), str(weight.dtype)) for weight in model.parameters()]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:16]
    attention = str(getattr(model.config, "_attn_implementation", ""))
    return {"class": type(model).__name__, "weights": digest, "attention": attention}


def _sample(model: PreTrainedModel) -> bytes:
    """Return some values of some weights. Fine-tunes differ in them; reading all weights would take too long."""
    weights = list(model.parameters())
    some = weights[:: max(1, len(weights) // SAMPLED_WEIGHTS)]
    values = [weight.detach().reshape(-1)[:SAMPLED_VALUES].to(torch.float32) for weight in some]
    return b"".join(value.cpu().numpy().tobytes() for value in values)


@lru_cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except (OSError, IndexError):
        named = []
    return f"{device.type}: {named[0] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


@lru_cache
def _versions() -> dict[str, str]:
    try:
        ours = metadata.version("hf_specbranch")
    except metadata.PackageNotFoundError:
        ours = "source"
    return {"hf_specbranch": ours, "torch": str(torch.__version__), "transformers": transformers.__version__}
