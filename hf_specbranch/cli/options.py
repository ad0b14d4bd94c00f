"""Options that several commands share, and what they mean.

Modules of commands import torch and transformers in their functions, so that `--help` need not wait for them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.plots import check_plots
from ..config import POLICIES, RUNTIMES, SpecBranchConfig
from .names import EMBEDDED, NEWEST, Loading, check_folder, check_names, draft_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

# The settings have the names of `SpecBranchConfig`.
Target = Annotated[str | None, typer.Option(help="Target model: folder or repository id. Default: the embedded one.")]
Draft = Annotated[str | None, typer.Option(help='Draft model; "good" or "weak" for the embedded target.')]
Drafts = Annotated[
    str | None,
    typer.Option(help='Draft model ("good" or "weak" for the embedded target), "lookup", or both: org/small,lookup.'),
]
Corpus = Annotated[Path | None, typer.Option(help="Texts to look drafts up in: a file of LookupCorpus.save().")]
PromptLookupNumTokens = Annotated[int | None, typer.Option(min=0, help="Most tokens looked up at once; 0: no lookup.")]
MaxMatchingNgramSize = Annotated[int | None, typer.Option(min=1, help="Most tokens that a lookup compares.")]
LengthHeadName = Annotated[
    str | None, typer.Option(help='Length head: folder, repository id, "auto", or "embedded" for the embedded pair\'s.')
]
Config = Annotated[Path | None, typer.Option(help="Settings as JSON, e.g. from `tune`; options override them.")]
Policy = Annotated[str | None, typer.Option(help=f"One of {', '.join(POLICIES)}. Default: auto.")]
MaxDraftLength = Annotated[int | None, typer.Option(min=1, help="Most tokens drafted at once (gamma).")]
ConfidenceThreshold = Annotated[
    float | None, typer.Option(min=0, max=1, help="Stop drafting below this confidence (epsilon).")
]
MaxBranches = Annotated[int | None, typer.Option(min=1, help="Most branches at a branch point (k_max).")]
MaxRejectionBranches = Annotated[int | None, typer.Option(min=0, help="Most branches at likely rejections.")]
TreeLeaves = Annotated[int | None, typer.Option(min=0, help="Second choices that the target checks per pass.")]
DraftWeights = Annotated[
    str | None, typer.Option(help="Weights of the draft: int8, float8, none (as they are) or auto.")
]
DraftShortlist = Annotated[
    str | None,
    typer.Option(help="Tokens that the draft may propose: a number, a JSON file of ids, none (all) or auto."),
]
Runtime = Annotated[str | None, typer.Option(help=f"One of {', '.join(RUNTIMES)}.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
Device = Annotated[str, typer.Option(help="e.g. cpu or cuda; auto takes a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="Of the weights; auto is bfloat16 on a GPU, float32 elsewhere.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the target's repository.")]
DraftRevision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the draft's repository.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the models' repositories.")]
MaxTime = Annotated[float | None, typer.Option(min=0, help="Stop generating after so many seconds.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads for torch; 0 keeps torch's default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that loads models.

    Raises:
        ValueError: the dtype is unknown, or a revision is given without the model that has it.
    """

    target: Target = None
    draft: Draft = None
    revision: Revision = None
    draft_revision: DraftRevision = None
    trust_remote_code: TrustRemoteCode = False
    device: Device = "auto"
    dtype: Dtype = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")
        if self.target is None and (self.revision is not None or self.draft_revision is not None):
            raise ValueError("--revision without --target: the embedded models have no revisions")

    @property
    def loading(self) -> Loading:
        """What `from_pretrained` is given besides the name."""
        return Loading(self.revision, self.draft_revision, self.trust_remote_code)

    def check(self) -> None:
        """Refuse names of models that cannot be loaded."""
        check_names(self.target, self.draft)

    def place(self) -> tuple[str, str]:
        """Return device and dtype, "auto" resolved, and set the number of torch's threads."""
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        return place(self.device, self.dtype)

    def open_pair(self) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
        """Load target, draft and tokenizer."""
        return open_pair(self.target, self.draft, self.device, self.dtype, self.threads, self.loading)


@dataclass(frozen=True)
class GenerationOptions(ModelOptions):
    """The options that `generate`, `chat` and `trace` share."""

    draft: Drafts = None
    corpus: Corpus = None
    length_head: LengthHeadName = None
    config: Config = None
    policy: Policy = None
    max_draft_length: MaxDraftLength = None
    confidence_threshold: ConfidenceThreshold = None
    max_branches: MaxBranches = None
    max_rejection_branches: MaxRejectionBranches = None
    tree_leaves: TreeLeaves = None
    draft_weights: DraftWeights = None
    draft_shortlist: DraftShortlist = None
    prompt_lookup_num_tokens: PromptLookupNumTokens = None
    max_matching_ngram_size: MaxMatchingNgramSize = None
    runtime: Runtime = None
    max_new_tokens: MaxNewTokens = 128
    max_time: MaxTime = None
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    seed: Seed = 0

    def settings(self) -> SpecBranchConfig:
        """Return the settings of the file, if one is given, overridden by the options."""
        names = [field.name for field in fields(SpecBranchConfig) if field.name != "length_head"]
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        given |= draft_form(self.draft_weights, self.draft_shortlist)
        return replace(read_settings(self.config) if self.config is not None else SpecBranchConfig(), **given)

    def limits(self) -> dict[str, Any]:
        """Return the arguments of `generate()` that end a text."""
        return {"max_new_tokens": self.max_new_tokens} | ({} if self.max_time is None else {"max_time": self.max_time})

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of `generate()` that choose tokens."""
        if self.temperature == 0:
            if self.top_k is not None or self.top_p is not None:
                raise ValueError("--top-k and --top-p choose among sampled tokens: add --temperature, e.g. 1.0")
            return {"do_sample": False}
        chosen = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p}
        return {name: value for name, value in chosen.items() if value is not None}

    def head(self) -> Any:
        """Return what `generate(length_head=...)` takes."""
        return head_from(self.length_head, self.target, self.draft, self.device)

    def open_model(self) -> tuple[Any, Any]:
        """Load the target, attach what drafts for it, and return it with its tokenizer."""
        name, looks_up = draft_names(self.draft, self.target)
        if self.corpus is not None and not self.corpus.is_file():
            raise ValueError(f"--corpus {self.corpus}: no such file; LookupCorpus.save() writes one")
        if name is None and self.target is not None:
            check_folder("--target", self.target)
            target, tokenizer = open_target(self.target, self.device, self.dtype, self.threads, self.loading)
            draft = None
        else:
            target, draft, tokenizer = open_pair(self.target, name, self.device, self.dtype, self.threads, self.loading)
        from ..attach import specbranch
        from ..vocabularies import load_tokenizer

        sources = [draft] * (name is not None) + ["lookup"] * looks_up
        other = load_tokenizer(draft.name_or_path, **self.loading.draft) if draft is not None and self.target else None
        both = {} if other is None else {"tokenizer": tokenizer, "assistant_tokenizer": other}
        return specbranch(target, draft=sources, corpus=self.corpus, **both), tokenizer


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def with_generation_options(**defaults: Any) -> Decorator:
    """Add the options of `GenerationOptions` to a command, which receives them as its argument `given`.

    Args:
        defaults: other defaults of this command, by name.
    """
    return _with_options(GenerationOptions, defaults, ())


def with_model_options(leave_out: Sequence[str] = (), **defaults: Any) -> Decorator:
    """Add the options of `ModelOptions` to a command, which receives them as its argument `given`.

    Args:
        leave_out: options that this command does not have.
        defaults: other defaults of this command, by name.
    """
    return _with_options(ModelOptions, defaults, leave_out)


def _with_options(kind: type[ModelOptions], defaults: dict[str, Any], leave_out: Sequence[str]) -> Decorator:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [
            each for each in inspect.signature(kind, eval_str=True).parameters.values() if each.name not in leave_out
        ]
        parameters = [
            *(each for each in own if each.name != "given"),
            *(each.replace(default=defaults.get(each.name, each.default)) for each in shared),
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            given = kind(**{each.name: values.pop(each.name) for each in shared})
            command(given=given, **values)

        by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
        return run

    return decorate


def draft_form(weights: str | None, shortlist: str | None) -> dict[str, Any]:
    """Return the settings that `--draft-weights` and `--draft-shortlist` give; those that are not given are left out.

    Example:
        >>> draft_form("none", "4096")
        {'draft_weights': None, 'draft_shortlist': 4096}
    """
    given: dict[str, Any] = {"draft_weights": weights, "draft_shortlist": shortlist}
    values = {name: value for name, value in given.items() if value is not None}
    return {
        name: None if value == "none" else int(value) if value.isdigit() else value for name, value in values.items()
    }


def read_settings(path: Path) -> SpecBranchConfig:
    """Read a `SpecBranchConfig` from a JSON file; errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: no such file; `hf-specbranch tune --out {path}` writes one")
    return SpecBranchConfig.from_json_file(path)


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before any work. No file is made: another process may write it just now."""
    if path is None:
        return
    try:
        if path.is_dir() or not (folder := path.absolute().parent).is_dir():
            raise ValueError(f"{option} {path}: expected a file in a folder that exists")
        try:
            path.stat()
            written = path
        except FileNotFoundError:
            written = folder
        if not os.access(written, os.W_OK):
            raise ValueError(f"{option} {path}: it cannot be written (no permission for {written})")
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{option} {path}: it cannot be written ({error.strerror})") from None


def check_folder_out(option: str, path: Path) -> None:
    """Refuse a folder that cannot be written to or created, before any work."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{option} {path}: a file of that name is there; name a folder")
    above = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: it cannot be written in {above}")


def check_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, before any work."""
    check_file("--png", path)
    if path is not None:
        check_plots("--png")


def place(device: str, dtype: str) -> tuple[str, str]:
    """Return device and dtype with "auto" resolved; refuse a device that does not exist."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"--device {device}: expected cpu, cuda, cuda:1 or another device of torch") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no CUDA device; leave it out to take what is there")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {device}: {reason}; leave it out to take what is there") from error
    return device, dtype if dtype != "auto" else "bfloat16" if kind == "cuda" else "float32"


def open_pair(
    target: str | None, draft: str | None, device: str, dtype: str, threads: int = 0, loading: Loading = NEWEST
) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """Load target, draft and tokenizer."""
    check_names(target, draft)
    import torch

    from .pair import load_pair

    if threads:
        torch.set_num_threads(threads)
    device, dtype = place(device, dtype)
    return load_pair(target, draft, device, dtype, loading)


def open_target(
    target: str, device: str, dtype: str, threads: int = 0, loading: Loading = NEWEST
) -> tuple[PreTrainedModel, Any]:
    """Load a target and its tokenizer."""
    import torch

    from .pair import load_target

    if threads:
        torch.set_num_threads(threads)
    return load_target(target, *place(device, dtype), loading)


def head_from(name: str | None, target: str | None, draft: str | None, device: str) -> Any:
    """Return what `generate(length_head=...)` takes for this name."""
    if name != "embedded":
        return name
    if target is not None:
        raise ValueError(
            f"length head embedded with --target {target}: it was trained for the embedded pair, name another"
        )
    from ..demo_pair import load_demo_pair

    kind = draft if draft in EMBEDDED else "good"
    return load_demo_pair(kind, device=place(device, "auto")[0], head=True)[3]  # type: ignore[call-overload]
