"""Heads on the Hugging Face Hub: download, upload, search."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .config import LengthHeadConfig
from .files import (
    CARD,
    CONFIG,
    LARGEST_CONFIG,
    TAGS,
    WEIGHTS,
    largest_file,
    model_card,
    read_config,
    save,
    weight_shapes,
)
from .network import HeadNetwork
from .validation import HeadError, HeadUnavailableError

LONGEST_NAME = 96  # characters of a repository's name
Accept = Callable[[LengthHeadConfig], None]  # raises HeadError if a head with this config is not wanted


def locate(
    name_or_path: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the folder with a head's files: the given one, or one in the cache after a download.

    Raises:
        HeadUnavailableError: it is neither a folder nor a repository that can be read.
        HeadError: what the repository holds is no head.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise TypeError(f"length head {name_or_path!r}: expected a folder or a repository id such as org/head")
    if name_or_path != "" and (folder := _folder(name_or_path)) is not None:
        return folder
    repo_id, _, pinned = str(name_or_path).partition("@")
    if isinstance(name_or_path, Path) or repo_id.count("/") != 1 or repo_id.startswith(("/", ".", "~")):
        raise HeadUnavailableError(
            f"no length head at {name_or_path}: expected a folder written by head.save_pretrained(), or a "
            f"repository id such as org/head"
        )
    return download(repo_id, revision or pinned or None, token, cache_dir, local_files_only)


def _folder(name: str | Path) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # longer than a path may be, no such user, characters no path has
        return None


def download(
    repo_id: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    accept: Accept | None = None,
) -> Path:
    """Download a repository's head; return its folder in the cache.

    The config comes first. The weights follow if it is valid and accepted, and if their size is plausible.

    Raises:
        HeadUnavailableError: there is none, or no connection.
        HeadError: what the repository holds is no head, or it was not accepted.
    """

    def fetch(name: str, largest: int, revision: str | None) -> Path:
        settings: dict[str, Any] = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only or not reachable(),
            "endpoint": _endpoint(),
            "library_name": "hf_specbranch",
        }
        try:
            size = hf_hub_download(repo_id, name, dry_run=True, **settings).file_size
            if size is None or size <= largest:
                return Path(hf_hub_download(repo_id, name, **settings))
        except Exception as error:
            raise HeadUnavailableError(f"length head {repo_id}: {_reason(error, repo_id, revision)}") from error
        raise HeadError(f"{name} of {repo_id} has {size:,} bytes: expected at most {largest:,}")

    path = fetch(CONFIG, LARGEST_CONFIG, revision)
    config, _ = read_config(path)
    if accept is not None:
        accept(config)
    fetch(WEIGHTS, largest_file(weight_shapes(config, str(path))), path.parent.name)  # of the same commit
    return path.parent


def _endpoint() -> str | None:
    """Return the Hub's address. It is read at each call, so it need not be set before the first import."""
    return os.environ.get("HF_ENDPOINT") or None


def reachable(timeout: float = 3.0) -> bool:
    """Whether the Hub answers. The client itself tries for half a minute before it reads the cache."""
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True  # only the proxy can tell
    address = urlsplit(_endpoint() or constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout).close()
    except OSError:
        return False
    return True


def _reason(error: Exception, repo_id: str, revision: str | None) -> str:
    """Return an error of the client as one sentence, with a remedy."""
    if isinstance(error, GatedRepoError):
        return f"access to {repo_id} must be requested on its page; then log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no repository {repo_id}, or it is private: check the name, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}: choose another, or leave it out"
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        return (
            f"{repo_id} is not in the local cache, and the Hub cannot be reached: check the network or HF_HUB_OFFLINE"
        )
    if isinstance(error, EntryNotFoundError):
        return f"{repo_id} is no length head, it lacks {CONFIG} or {WEIGHTS}: check the name"
    if isinstance(error, HFValidationError):
        return f"{repo_id} is no repository id: expected one such as org/head"
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code in (401, 403):
        return f"access to {repo_id} was refused: check the token (`hf auth whoami`)"
    return f"the download of {repo_id} failed ({type(error).__name__}: {error}): try again"


def origin_of(folder: Path) -> str:
    """Return where a head came from: `org/head@commit` for a folder of the Hub's cache, else the folder.

    Example:
        >>> origin_of(Path("hub/models--org--head/snapshots/5f0c"))
        'org/head@5f0c'
    """
    kind, _, name = folder.parent.parent.name.partition("--")
    if folder.parent.name != "snapshots" or kind != "models":
        return str(folder)
    return f"{name.replace('--', '/', 1)}@{folder.name}"


def repository_name(config: LengthHeadConfig) -> str:
    """Return the name of the repository of a head, without the namespace: `<target>-with-<draft>-length-head`."""
    target, draft = (model.id.rsplit("/")[-1] for model in (config.target, config.draft))
    name = f"{target}-with-{draft}-length-head"
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{name} has {len(name)} characters: the Hub accepts {LONGEST_NAME}, choose a name")
    return name


def push(head: HeadNetwork, repo_id: str, private: bool, token: str | bool | None, revision: str | None) -> str:
    """Upload a head's files in one commit; return the commit's address."""
    if not reachable():
        raise OSError(f"could not upload the head to {repo_id}: the Hub cannot be reached; check the network")
    api = HfApi(endpoint=_endpoint(), token=token, library_name="hf_specbranch")
    with tempfile.TemporaryDirectory() as folder:
        save(head, Path(folder))
        (Path(folder) / CARD).write_text(model_card(head.config, repo_id), encoding="utf-8")
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message="Upload length head"
            )
        except Exception as error:
            raise OSError(f"could not upload the head: {_reason(error, repo_id, revision)}") from error
    return str(commit.commit_url)


@dataclass(frozen=True)
class Found:
    """A head on the Hub."""

    repo_id: str
    for_draft: bool  # tagged for the draft too, not only for the target
    downloads: int
    likes: int
    revision: str | None


def search(target_id: str, draft_id: str | None = None, token: str | bool | None = None) -> list[Found]:
    """Return the heads tagged for a target: those for this draft first, then by downloads.

    Args:
        target_id: repository id.
        draft_id: repository id.
        token: for private repositories.

    Raises:
        OSError: the Hub cannot be reached.
    """
    if not reachable():
        raise OSError("the Hub cannot be reached: check the network or HF_HUB_OFFLINE")
    api = HfApi(endpoint=_endpoint(), token=token, library_name="hf_specbranch")
    try:
        models = list(api.list_models(filter=[TAGS[0], TAGS[2], f"base_model:{target_id}"], full=True))
    except Exception as error:
        raise OSError(f"the search on the Hub failed ({type(error).__name__}: {error}): try again") from error
    found = [
        Found(
            repo_id=model.id,
            for_draft=draft_id is not None and f"base_model:{draft_id}" in (model.tags or []),
            downloads=model.downloads or 0,
            likes=model.likes or 0,
            revision=model.sha,
        )
        for model in models
    ]
    return sorted(found, key=lambda head: (not head.for_draft, -head.downloads, -head.likes, head.repo_id))
