"""A head on disk: config.json, model.safetensors and a model card. No pickle anywhere."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .card import model_card
from .config import LengthHeadConfig
from .model import LengthHead

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
HASH = "weights_sha256"


def save(head: LengthHead, folder: Path) -> Path:
    """Write the three files, each under a temporary name first, so that none is ever half there.

    Args:
        head: what to save.
        folder: made if missing; an older head in it is replaced.

    Returns:
        The folder.
    """
    from hf_specbranch import __version__

    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give a folder to save the head in")
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(head.config, library_version=__version__)
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in head.state_dict().items()}
    record = {**config.to_dict(), HASH: content_hash(tensors)}
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        save_file(tensors, Path(draft) / WEIGHTS, metadata={"format": "pt", "config": json.dumps(record)})
        (Path(draft) / CONFIG).write_text(text, encoding="utf-8")
        (Path(draft) / CARD).write_text(model_card(config), encoding="utf-8")
        os.chmod(Path(draft) / WEIGHTS, (Path(draft) / CONFIG).stat().st_mode)  # safetensors makes it private
        for name in (WEIGHTS, CONFIG, CARD):
            os.replace(Path(draft) / name, folder / name)
    return folder


def load(folder: Path) -> LengthHead:
    """Read a head, and refuse one that is not as it was written.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated, altered or of another kind.
    """
    record = _read_config(folder / CONFIG)
    expected_hash = record.pop(HASH, None)
    config = LengthHeadConfig.from_dict(record, str(folder / CONFIG))
    tensors, metadata = _read_weights(folder / WEIGHTS)
    remedy = "download it again, or save the head anew"
    try:
        repeated = json.loads(metadata.get("config", ""))
    except json.JSONDecodeError:
        repeated = None
    if repeated != {**record, HASH: expected_hash}:
        raise ValueError(f"{folder / CONFIG} and the config inside {folder / WEIGHTS} differ: {remedy}")
    if content_hash(tensors) != expected_hash:
        raise ValueError(
            f"{folder / WEIGHTS} was altered: its weights have SHA-256 {content_hash(tensors)}, "
            f"{CONFIG} says {expected_hash}; {remedy}"
        )
    head = LengthHead(config)
    try:
        head.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder / WEIGHTS} do not match {CONFIG}: {error}; {remedy}") from error
    return head.eval()


def content_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}: expected a folder written by head.save_pretrained()")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): download it again, or save the head anew") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a JSON {type(record).__name__}: expected an object")
    return record


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}: expected a folder written by head.save_pretrained()")
    try:
        with safe_open(path, framework="pt") as weights:
            return {name: weights.get_tensor(name) for name in weights.keys()}, weights.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or no safetensors file ({error}): download it again, or save the head anew"
        ) from error
