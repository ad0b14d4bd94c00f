"""Who a model is: what a head must know of the pair it was trained for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .cache import LeastRecentlyUsed
from .validation import check_text, check_whole, refuse

DEMO_PAIR = Path(__file__).parent.parent / "demo_pair"
DEMO_NAME = "hf_specbranch/demo_pair-{}".format
DEMO_HEADS = {  # heads that come with the package, by the ids of the pair
    (DEMO_NAME("target"), DEMO_NAME("draft")): DEMO_PAIR / "head",
    (DEMO_NAME("target"), DEMO_NAME("weak")): DEMO_PAIR / "weak_head",
}
# A difference in one of these means another model; the id and the revision may differ for one and the same.
SHAPE_FIELDS = ("architecture", "vocab_size", "hidden_size", "num_layers")
BOUNDS = {"vocab_size": (1, 2**31), "hidden_size": (1, 2**20), "num_layers": (0, 2**16)}


@dataclass(frozen=True)
class ModelIdentity:
    """What is recorded of one model of a pair."""

    id: str  # repository id, or the name of a local folder
    revision: str | None  # commit it was loaded from, if known
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelIdentity:
        """Read it off a loaded model."""
        text = model.config.get_text_config(decoder=True)
        return cls(
            id=model_id(getattr(model, "name_or_path", "") or type(model).__name__),
            revision=getattr(model.config, "_commit_hash", None),
            architecture=type(model).__name__,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
        )

    @classmethod
    def from_dict(cls, record: Any, where: str) -> ModelIdentity:
        names = [field.name for field in fields(cls)]
        if not isinstance(record, dict) or sorted(record) != sorted(names):
            raise refuse(where, record, f"an object with exactly {', '.join(names)}")
        return cls(**record)

    def check(self, role: str) -> None:
        """Refuse what no model has."""
        check_text(f"{role}.id", self.id)
        check_text(f"{role}.architecture", self.architecture)
        if self.revision is not None:
            check_text(f"{role}.revision", self.revision)
        for name, bounds in BOUNDS.items():
            check_whole(f"{role}.{name}", getattr(self, name), *bounds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def different_shape(self, other: ModelIdentity, role: str) -> list[str]:
        """Fields in which the two cannot be the same model, said in words."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in SHAPE_FIELDS)
        return [f"{role} {name}: head {ours}, given {theirs}" for name, ours, theirs in pairs if ours != theirs]

    def different_origin(self, other: ModelIdentity, role: str) -> list[str]:
        """Fields in which they may be two versions of one model, said in words."""
        differences = []
        if self.id.rsplit("/")[-1] != other.id.rsplit("/")[-1]:
            differences.append(f"{role} id: head {self.id}, given {other.id}")
        if self.revision and other.revision and self.revision != other.revision:
            differences.append(f"{role} revision: head {self.revision}, given {other.revision}")
        return differences


def model_id(name: str) -> str:
    """A name that means something elsewhere too: local folders lose their path."""
    folder = Path(name)
    if folder.parent == DEMO_PAIR:
        return DEMO_NAME(folder.name)
    return folder.resolve().name if folder.is_dir() else name


class TokenizerHashes:
    """The hashes of the vocabularies that were used last; reading a vocabulary takes long.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._cache: LeastRecentlyUsed[Any, tuple[int, str]] = LeastRecentlyUsed(limit, weak_keys=True)

    def of(self, tokenizer: Any) -> str:
        """Return the hash of a tokenizer's vocabulary; tokens that were added since change it."""
        size = len(tokenizer)
        return self._cache.get(tokenizer, _hash_vocabulary, lambda known: known[0] == size)[1]


def _hash_vocabulary(tokenizer: Any) -> tuple[int, str]:
    """Return the size of a vocabulary and its SHA-256."""
    entries = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return len(tokenizer), hashlib.sha256(entries.encode()).hexdigest()


_TOKENIZER_HASHES = TokenizerHashes(limit=16)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of the vocabulary: equal for tokenizers that give the same tokens the same numbers."""
    return _TOKENIZER_HASHES.of(tokenizer)
