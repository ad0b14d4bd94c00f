"""What a length head is: its inputs, its layers, its rule, and the pair it was trained for."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import PreTrainedModel

from .identity import ModelIdentity, tokenizer_hash
from .validation import HeadError, check_list, check_number, check_text, check_training, check_whole, refuse, shown

FORMAT_VERSION = 1
FEATURES = ("hidden", "committed", "drafted", "confidence", "probability", "entropy", "kind")
# The least and the most of each: far from what makes sense for a head, and from what exhausts a machine.
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


@dataclass(frozen=True)
class LengthHeadConfig:
    """Settings of a `LengthHead`, saved beside its weights.

    Args:
        target: the target it reads.
        draft: the draft it judges.
        gamma: how many drafted positions it looks at; further ones are ignored, missing ones read as 0.
        features: what it reads, some of: "hidden" (the target's last layers at the last verified position),
            "committed" (input embedding of the token just committed), "drafted" (embeddings of the first drafted
            tokens), "confidence" (the draft's largest probability at each position), "probability" (that of the
            drafted token), "entropy" (of the draft's distribution at each position), "kind" (whether the line comes
            straight from the draft stage, and its length). Numbers that belong to positions come with their logarithms.
        num_layers: K, how many of the target's last layers "hidden" means.
        drafted_tokens: how many tokens "drafted" means.
        match_size: width of the space in which the target's state ("hidden" and "committed") meets each drafted
            token; how well they match goes into the linear layers in their place. 0, as in the paper: they go in
            directly.
        query_size: hidden width of the network that turns the state into what is matched.
        layer_sizes: widths of the hidden linear layers; one of width 3 follows.
        dropout: while training.
        none_threshold: the head says 0 where it gives "nothing will be accepted" more than this probability.
        all_threshold: else it says 2 where it gives "all will be accepted" more than this; else 1.
        confidence_threshold: epsilon while the data was collected.
        tokenizer_hash: of the vocabulary, if known.
        training: where the data came from and what was measured, for the model card.
        format_version: of the files.
        library_version: that wrote them.

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
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's `hidden_states` (0 is the embedding) that the head reads."""
        if "hidden" not in self.features:
            return ()
        last = self.target.num_layers
        return tuple(range(last - self.num_layers + 1, last + 1))

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Width of each feature, in the order they are read."""
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
        """Whether the target's features are matched with the drafted tokens."""
        return self.match_size > 0 and "drafted" in self.features and bool({"hidden", "committed"} & set(self.features))

    @property
    def input_size(self) -> int:
        return sum(self.feature_sizes.values())

    @property
    def context_size(self) -> int:
        """Width of what describes the target's state."""
        return sum(self.feature_sizes.get(name, 0) for name in ("hidden", "committed"))

    @property
    def reads_scores(self) -> bool:
        """Whether it needs the draft's whole distributions."""
        return bool({"probability", "entropy"} & set(self.features))

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        record = asdict(self)
        return {**record, "features": list(self.features), "layer_sizes": list(self.layer_sizes)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_dict(cls, record: Any, where: str = "config.json") -> LengthHeadConfig:
        """The inverse of `to_dict`; unknown and missing names are errors.

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
