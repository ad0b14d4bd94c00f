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
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..machine import device_name, folder, sample_of, shapes_of, versions, write_whole

logger = logging.getLogger(__name__)

FORMAT = 4
MOST_PAIRS = 8  # digests of weights that are kept per file

Entries = dict[str, Any]  # ready for JSON


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
        write_whole(self.path, json.dumps({"machine": self.machine, "costs": costs, "pairs": pairs}))

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
    directory = folder("plans")
    if directory is None:
        return None
    try:
        weights = hashlib.sha256(sample_of(target) + sample_of(draft)).hexdigest()[:24]
        machine = {
            "devices": [device_name(model.device) for model in (target, draft)],
            "versions": versions(),
            "target": shapes_of(target),
            "draft": shapes_of(draft),
        }
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # quantised or meta weights, say
        logger.debug("what the planner learns of this pair is not kept on disk: %s", error)
        return None
    return PairFile(directory, machine, weights)
