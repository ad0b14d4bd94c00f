"""Names of models on the command line; errors in them are found before torch is imported."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = ("good", "weak")  # drafts of the embedded target


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


def check_folder(option: str, name: str) -> None:
    """Refuse what looks like a path but does not exist; anything else may be a repository."""
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"{option} {name}: no such folder")
