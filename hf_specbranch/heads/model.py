"""The length head: a small MLP that says how a drafted line will fare."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..decoding.hooks import LengthHeadHook
from .config import LengthHeadConfig
from .expectation import Expectation
from .identity import ModelIdentity

CLASSES = ("none", "some", "all")
NONE, SOME, ALL = range(3)
LEAST_THRESHOLD = 2.0**-20  # a lower one counts as this: smaller probabilities are rounding
SCORE_RANGE, SCORE_SCALE = (-20.0, 5.0), 4.0  # of what the target is thought to expect, near a log-probability


class LengthHead(nn.Module):
    """Says of a drafted line 0 (nothing of it will be accepted), 1 (some of it) or 2 (all of it).

    It is given to `generate(length_head=head)` or `specbranch(model, head=head)`. A head cannot make the output
    wrong: it decides what is sent to the target in this round, and what is not sent is kept.

    Args:
        config: its inputs and sizes.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer, head = load_demo_pair(draft="weak", head=True)
        >>> model = specbranch(target, draft=draft, head=head)
        >>> out = model.generate(**tokenizer("def add(a, b):", return_tensors="pt"), max_new_tokens=16)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: LengthHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.input_size))
        self.register_buffer("std", torch.ones(config.input_size))
        sizes = (config.input_size, *config.layer_sizes)
        if config.matches:
            self.expectation = Expectation(
                config.context_size,
                config.target.hidden_size,
                config.drafted_tokens,
                config.query_size,
                config.match_size,
            )
            narrow = config.input_size - config.context_size - config.feature_sizes["drafted"]
            sizes = (narrow + config.drafted_tokens, *config.layer_sizes)
        layers: list[nn.Module] = []
        for width_in, width_out in zip(sizes, sizes[1:]):
            layers += [nn.Linear(width_in, width_out), nn.ReLU(), nn.Dropout(config.dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], len(CLASSES)))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [N, 3] from the features [N, F] of `HeadInputs.matrix`."""
        x = (features - self.mean) / self.std
        if self.config.matches:
            x = self._match(x, features)
        logits: Tensor = self.layers(x)
        return logits

    @property
    def token_scale(self) -> Tensor:
        """[1] by which embeddings of drafted tokens are divided: one number for all, and nothing stays at 0."""
        first = self.config.context_size
        return self.std[first : first + 1]

    def _match(self, x: Tensor, features: Tensor) -> Tensor:
        """In place of state and tokens: does the state expect this token? A number for each of the first tokens."""
        config = self.config
        context, _, narrow = torch.split(x, self._blocks(x), dim=1)
        _, drafted, _ = torch.split(features, self._blocks(x), dim=1)
        drafted = drafted.reshape(x.shape[0], config.drafted_tokens, -1)
        scores = self.expectation(self.dropout(context), drafted / self.token_scale)
        there = (drafted != 0).any(-1)  # a line may be shorter
        return torch.cat([narrow, torch.where(there, scores.clamp(*SCORE_RANGE) / SCORE_SCALE, 0.0)], dim=1)

    def _blocks(self, x: Tensor) -> list[int]:
        """Widths of the target's state, the drafted tokens, and the rest."""
        sizes = [self.config.context_size, self.config.feature_sizes["drafted"]]
        return [*sizes, x.shape[1] - sum(sizes)]

    def verdict(self, features: Tensor) -> Tensor:
        """[N] 0, 1 or 2, by the thresholds in the config."""
        return verdict_by_thresholds(self(features).softmax(-1), self.config.none_threshold, self.config.all_threshold)

    def bind(self, target: PreTrainedModel) -> LengthHeadHook:
        """The head as a hook of the engine, on the target's device, reading the target's embeddings."""
        from .folded import BoundHead

        embeddings = target.get_input_embeddings()
        self.to(next(embeddings.parameters()).device).eval()
        return LengthHeadHook(BoundHead(self, embeddings))

    def check_pair(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None) -> None:
        """Refuse a pair the head was not trained for.

        Args:
            target: the model it would read.
            draft: the model it would judge.
            tokenizer: theirs; compared by its vocabulary if the head knows one.

        Raises:
            HeadError: naming each field that rules the pair out. Where only an id or a revision differs, that is a
                warning: the output stays exact, the head may merely help less.
        """
        self.config.check_fit(target, draft, tokenizer)
        doubts: list[str] = []
        for role, known, model in (("target", self.config.target, target), ("draft", self.config.draft, draft)):
            doubts += known.different_origin(ModelIdentity.of(model), role)
        if doubts:
            warnings.warn(
                f"the length head was trained for another version of this pair ({'; '.join(doubts)}): the output "
                f"stays exact, the head may help less",
                stacklevel=2,
            )

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json, model.safetensors and a model card; see `hf_specbranch.heads.files.save`."""
        from .files import save

        return save(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> LengthHead:
        """Load a head from a folder or from the Hub.

        Args:
            name_or_path: a folder, or a repository id, with a revision behind an @ if one is to be pinned.
            revision: branch, tag or commit, as an alternative to the @.
            token: for private repositories; by default the one you logged in with.
            cache_dir: where downloads are kept.
            local_files_only: do not ask the network.

        Raises:
            OSError: it cannot be had: not there, no access, no connection.
            ValueError: it is damaged, or no head this version can read (`HeadError`).

        Example:
            >>> from hf_specbranch import LengthHead
            >>> head = LengthHead.from_pretrained("org/some-head@v1")  # doctest: +SKIP
        """
        from .files import load
        from .hub import locate

        return load(locate(name_or_path, revision, token, cache_dir, local_files_only))

    def push_to_hub(
        self, repo_id: str, private: bool = False, token: str | bool | None = None, revision: str | None = None
    ) -> str:
        """Upload the head with its model card; returns the address of the commit."""
        from .hub import push

        return push(self, repo_id, private, token, revision)


def verdict_by_thresholds(probabilities: Tensor, none_threshold: float, all_threshold: float) -> Tensor:
    """[N] 0 where P(none) is above its threshold, else 2 where P(all) is above its, else 1; from [N, 3]."""
    none, _, everything = probabilities.unbind(1)
    none_threshold, all_threshold = max(none_threshold, LEAST_THRESHOLD), max(all_threshold, LEAST_THRESHOLD)
    return (SOME + (everything > all_threshold)) * (none <= none_threshold)  # 0 is none, and 2 is some and one more
