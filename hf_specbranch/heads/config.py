"""What a length head is: its inputs, its layers, its rule, and the pair it was trained for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .identity import ModelIdentity

FORMAT_VERSION = 1
FEATURES = ("hidden", "committed", "drafted", "confidence", "probability", "entropy", "margin", "kind")
DEFAULT_FEATURES = tuple(name for name in FEATURES if name != "margin")  # it added nothing, and costs a search


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
            drafted token), "entropy" and "margin" (of the draft's distribution at each position), "kind"
            (whether the line comes straight from the draft stage, and its length). Numbers that belong to
            positions come with their logarithms.
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
    features: tuple[str, ...] = DEFAULT_FEATURES
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
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"head format_version={self.format_version!r}, written by hf_specbranch {self.library_version}: "
                f"this version reads format {FORMAT_VERSION}; upgrade hf_specbranch or train the head again"
            )
        if not self.features or (unknown := sorted(set(self.features) - set(FEATURES))):
            raise ValueError(f"features={list(self.features)}: expected some of {list(FEATURES)}, not {unknown}")
        for name in ("gamma", "num_layers", "drafted_tokens"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1")
        if not self.layer_sizes or not all(isinstance(size, int) and size > 0 for size in self.layer_sizes):
            raise ValueError(f"layer_sizes={list(self.layer_sizes)}: expected one or more whole numbers above 0")
        if self.num_layers > self.target.num_layers:
            raise ValueError(
                f"num_layers={self.num_layers}: the target has {self.target.num_layers} layers; choose fewer"
            )

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
        return bool({"probability", "entropy", "margin"} & set(self.features))

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
            ValueError: it does not describe a head this version can read.
        """
        names = {entry.name for entry in fields(cls)}
        if not isinstance(record, dict) or not {"target", "draft", "gamma", "format_version"} <= set(record):
            raise ValueError(f"{where} does not describe a length head: expected target, draft, gamma, format_version")
        if record["format_version"] == FORMAT_VERSION and (unknown := sorted(set(record) - names)):
            raise ValueError(f"{where} has unknown fields {unknown}: expected some of {sorted(names)}")
        known = {name: value for name, value in record.items() if name in names}
        known["target"] = ModelIdentity.from_dict(record["target"], f"target in {where}")
        known["draft"] = ModelIdentity.from_dict(record["draft"], f"draft in {where}")
        for name in ("features", "layer_sizes"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)
