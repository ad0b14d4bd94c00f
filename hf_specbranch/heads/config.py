"""The config of a length head: its inputs, layers and thresholds, and the pair it was trained for."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import LeastRecentlyUsed
from .validation import HeadError, check_list, check_number, check_text, check_training, check_whole, refuse, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT_VERSION = 1
FEATURES = ("hidden", "committed", "drafted", "confidence", "probability", "entropy", "kind")
# Smallest and largest value of each: far beyond any useful head, far below what exhausts a machine.
WHOLE_NUMBERS = {
    "gamma": (1, 1024),
    "num_layers": (1, 1024),
    "drafted_tokens": (1, 128),
    "match_size": (0, 2**14),
    "query_size": (1, 2**14),
}
LARGEST_LAYER, MOST_LAYERS = 2**14, 16
FRACTIONS = ("dropout", "none_threshold", "all_threshold", "confidence_threshold")
HASH_PATTERN = re.compile("[0-9a-f]{64}")
DEMO_PAIR = Path(__file__).parent.parent / "demo_pair"
DEMO_NAME = "hf_specbranch/demo_pair-{}".format
DEMO_HEADS = {  # heads that come with the package, by the ids of target and draft
    (DEMO_NAME("target"), DEMO_NAME("draft")): DEMO_PAIR / "head",
    (DEMO_NAME("target"), DEMO_NAME("weak")): DEMO_PAIR / "weak_head",
}
# A difference in one of these means another model; id and revision may differ for the same model.
SHAPE_FIELDS = ("architecture", "vocab_size", "hidden_size", "num_layers")
BOUNDS = {"vocab_size": (1, 2**31), "hidden_size": (1, 2**20), "num_layers": (0, 2**16)}


@dataclass(frozen=True)
class ModelIdentity:
    """What is recorded about one model of a pair."""

    id: str  # repository id, or the name of a local folder
    revision: str | None  # commit it was loaded from, if known
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelIdentity:
        """Describe a loaded model."""
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
        names = [entry.name for entry in fields(cls)]
        if not isinstance(record, dict) or sorted(record) != sorted(names):
            raise refuse(where, record, f"an object with exactly {', '.join(names)}")
        return cls(**record)

    def check(self, role: str) -> None:
        """Refuse values that no model has."""
        check_text(f"{role}.id", self.id)
        check_text(f"{role}.architecture", self.architecture)
        if self.revision is not None:
            check_text(f"{role}.revision", self.revision)
        for name, bounds in BOUNDS.items():
            check_whole(f"{role}.{name}", getattr(self, name), *bounds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def different_shape(self, other: ModelIdentity, role: str) -> list[str]:
        """Describe the fields that show that the two are different models."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in SHAPE_FIELDS)
        return [f"{role} {name}: head {ours}, given {theirs}" for name, ours, theirs in pairs if ours != theirs]

    def different_origin(self, other: ModelIdentity, role: str) -> list[str]:
        """Describe the fields that show that the two may be versions of one model."""
        differences = []
        if self.id.rsplit("/")[-1] != other.id.rsplit("/")[-1]:
            differences.append(f"{role} id: head {self.id}, given {other.id}")
        if self.revision and other.revision and self.revision != other.revision:
            differences.append(f"{role} revision: head {self.revision}, given {other.revision}")
        return differences


def model_id(name: str) -> str:
    """Return a name that is meaningful on other machines: local folders lose their path."""
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


@dataclass(frozen=True)
class LengthHeadConfig:
    """Settings of a `LengthHead`, saved with its weights.

    Args:
        target: the target whose states it reads.
        draft: the draft model whose drafts it judges.
        gamma: how many drafted positions it reads; further ones are ignored, missing ones are 0.
        features: what it reads, some of: "hidden" (the target's last layers at the last verified position),
            "committed" (input embedding of the token just committed), "drafted" (embeddings of the first drafted
            tokens), "confidence" (the draft model's largest probability at each position), "probability" (its
            probability of the drafted token), "entropy" (of its distribution at each position), "kind" (whether the
            draft is fresh from the draft stage, and its length). Features per position come with their logarithms.
        num_layers: K, how many of the target's last layers "hidden" means.
        drafted_tokens: how many tokens "drafted" means.
        match_size: width of the space in which the target's state ("hidden" and "committed") is compared with each
            drafted token; the scores replace both as input of the linear layers. 0, as in the paper: state and tokens
            are inputs themselves.
        query_size: hidden width of the network that turns the state into queries.
        layer_sizes: widths of the hidden linear layers; one of width 3 follows.
        dropout: dropout rate during training.
        none_threshold: the head predicts 0 (none) where P(none) exceeds this.
        all_threshold: otherwise it predicts 2 (all) where P(all) exceeds this, and 1 (some) elsewhere.
        confidence_threshold: epsilon while the data was collected.
        tokenizer_hash: SHA-256 of the vocabulary, if known.
        training: where the data came from and what was measured, for the model card.
        format_version: version of the file format.
        library_version: version of hf_specbranch that wrote the files.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> *_, head = load_demo_pair(head=True)
        >>> head.config.gamma
        8
    """

    target: ModelIdentity
    draft: ModelIdentity
    gamma: int
    features: tuple[str, ...] = FEATURES
    num_layers: int = 4
    drafted_tokens: int = 3
    match_size: int = 48
    query_size: int = 256
    layer_sizes: tuple[int, ...] = (256, 64)
    dropout: float = 0.1
    none_threshold: float = 0.5
    all_threshold: float = 0.5
    confidence_threshold: float = 0.4
    tokenizer_hash: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    library_version: str = ""

    def __post_init__(self) -> None:
        _check_version(self.format_version, self.library_version)
        check_list("features", self.features, 1, len(FEATURES), f"of {list(FEATURES)}")
        if unknown := [name for name in self.features if name not in FEATURES]:
            raise HeadError(f"features={shown(unknown)}: expected some of {list(FEATURES)}")
        if len(set(self.features)) < len(self.features):
            raise refuse("features", self.features, "each of them once")
        for name, bounds in WHOLE_NUMBERS.items():
            check_whole(name, getattr(self, name), *bounds)
        for name in FRACTIONS:
            check_number(name, getattr(self, name), 0, 1)
        check_list("layer_sizes", self.layer_sizes, 1, MOST_LAYERS, "whole numbers")
        for number, size in enumerate(self.layer_sizes):
            check_whole(f"layer_sizes[{number}]", size, 1, LARGEST_LAYER)
        self.target.check("target")
        self.draft.check("draft")
        if self.num_layers > self.target.num_layers:
            raise HeadError(
                f"num_layers={self.num_layers}: the target has {self.target.num_layers} layers; choose fewer"
            )
        if self.tokenizer_hash is not None and not (
            isinstance(self.tokenizer_hash, str) and HASH_PATTERN.fullmatch(self.tokenizer_hash)
        ):
            raise refuse("tokenizer_hash", self.tokenizer_hash, "64 hexadecimal digits or nothing")
        check_text("library_version", self.library_version)
        check_training(self.training)
        object.__setattr__(self, "features", tuple(self.features))
        object.__setattr__(self, "layer_sizes", tuple(self.layer_sizes))

    @property
    def acts(self) -> bool:
        """Whether the head can decide anything: no probability exceeds a threshold of 1."""
        return min(self.none_threshold, self.all_threshold) < 1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The indices into the target's `hidden_states` that the head reads; 0 is the embedding."""
        if "hidden" not in self.features:
            return ()
        last = self.target.num_layers
        return tuple(range(last - self.num_layers + 1, last + 1))

    @property
    def feature_sizes(self) -> dict[str, int]:
        """The width of each feature, in the order of the input."""
        hidden = self.target.hidden_size
        widths = {
            "hidden": self.num_layers * hidden,
            "committed": hidden,
            "drafted": self.drafted_tokens * hidden,
            "kind": 2,
        }
        return {name: widths.get(name, 2 * self.gamma) for name in FEATURES if name in self.features}

    @property
    def matches(self) -> bool:
        """Whether the target's state is compared with the drafted tokens (`match_size`)."""
        return self.match_size > 0 and "drafted" in self.features and bool({"hidden", "committed"} & set(self.features))

    @property
    def input_size(self) -> int:
        return sum(self.feature_sizes.values())

    @property
    def context_size(self) -> int:
        """The width of what describes the target's state."""
        return sum(self.feature_sizes.get(name, 0) for name in ("hidden", "committed"))

    @property
    def reads_scores(self) -> bool:
        """Whether it needs the draft model's whole distributions."""
        return bool({"probability", "entropy"} & set(self.features))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        record = asdict(self)
        return {**record, "features": list(self.features), "layer_sizes": list(self.layer_sizes)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_dict(cls, record: Any, where: str = "config.json") -> LengthHeadConfig:
        """Build a config from the output of `to_dict`; unknown and missing names are errors.

        Raises:
            HeadError: it does not describe a head this version can read.
        """
        names = {entry.name for entry in fields(cls)}
        required = ("target", "draft", "gamma", "format_version")
        if not isinstance(record, dict) or not set(required) <= set(record):
            raise HeadError(
                f"{where} does not describe a length head: expected {', '.join(required)}, found {shown(record)}"
            )
        try:
            _check_version(record["format_version"], record.get("library_version", ""))
            if unknown := sorted(set(record) - names):
                raise HeadError(f"unknown fields {shown(unknown)}: expected some of {sorted(names)}")
            target = ModelIdentity.from_dict(record["target"], "target")
            draft = ModelIdentity.from_dict(record["draft"], "draft")
            return cls(**{**record, "target": target, "draft": draft})
        except HeadError as error:
            raise HeadError(f"{where}: {error}") from None

    def check_fit(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None) -> None:
        """Refuse a pair with other shapes or another vocabulary; see `LengthHead.check_pair`."""
        differences: list[str] = []
        for role, known, model in (("target", self.target, target), ("draft", self.draft, draft)):
            differences += known.different_shape(ModelIdentity.of(model), role)
        if not differences and {"committed", "drafted"} & set(self.features):
            width = next(target.get_input_embeddings().parameters()).shape[-1]
            if width != self.target.hidden_size:
                differences.append(f"target embedding size: head {self.target.hidden_size}, given {width}")
        if tokenizer is not None and self.tokenizer_hash not in (None, found := tokenizer_hash(tokenizer)):
            differences.append(f"tokenizer hash: head {self.tokenizer_hash}, given {found}")
        if differences:
            raise HeadError(
                f"the length head does not fit this pair ({'; '.join(differences)}): choose a head for it "
                f"(hf-specbranch head search), or train one (hf-specbranch head collect, then head train)"
            )


def _check_version(version: Any, library: Any) -> None:
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise HeadError(
            f"head format_version={shown(version)}, written by hf_specbranch {shown(library)}: this version reads "
            f"format {FORMAT_VERSION}; upgrade hf_specbranch or train the head again"
        )
