"""Names of models on the command line; errors in them are found before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

EMBEDDED = ("good", "weak")  # drafts of the embedded target
LOOKUP = "lookup"


class Loading(NamedTuple):
    """How models are loaded from their repositories."""

    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False

    @property
    def target(self) -> dict[str, Any]:
        """Arguments of the target's `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @property
    def draft(self) -> dict[str, Any]:
        """Arguments of the draft's `from_pretrained`."""
        return {"revision": self.draft_revision, "trust_remote_code": self.trust_remote_code}


NEWEST = Loading()


def draft_names(given: str | None, target: str | None) -> tuple[str | None, bool]:
    """Return the draft model of `--draft`, if it names one, and whether it names lookup: `good,lookup` names both.

    The embedded target has a draft of its own; any other target without a draft takes lookup.
    """
    if given is None:
        return (None, True) if target is not None else ("good", False)
    names = [name.strip() for name in given.split(",")]
    models = [name for name in names if name != LOOKUP]
    if len(models) > 1 or not all(names):
        raise ValueError(f"--draft {given}: expected a draft model, {LOOKUP}, or both with a comma between them")
    return models[0] if models else None, LOOKUP in names


def check_names(target: str | None, draft: str | None) -> None:
    """Refuse names of models that cannot be loaded."""
    if target is None:
        if draft is not None and draft not in EMBEDDED:
            raise ValueError(f"--draft {draft} without --target: name both, or leave both out for the embedded pair")
        return
    if draft is None:
        raise ValueError(f"--target {target} without --draft: name both, or leave both out for the embedded pair")
    check_folder("--target", target)
    check_folder("--draft", draft)


def check_sources(target: str | None, draft: str | None) -> None:
    """Refuse names of a target and of what drafts for it, which may be lookup, that cannot be loaded."""
    name, _ = draft_names(draft, target)
    if target is None or name is not None:
        check_names(target, name)
    else:
        check_folder("--target", target)


def check_folder(option: str, name: str) -> None:
    """Refuse what looks like a path but does not exist; anything else may be a repository."""
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"{option} {name}: no such folder")
