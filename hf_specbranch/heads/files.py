"""A head on disk: config.json, model.safetensors and a model card. No pickle anywhere."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .card import model_card
from .config import LengthHeadConfig
from .model import LengthHead
from .validation import HeadError, check_depth, check_tensors, shown

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
HASH = "weights_sha256"
LARGEST_CONFIG = 2**20  # bytes
LARGEST_HEADER = 2**22  # bytes of a safetensors header: the tensors' names, and the config once more
MOST_WEIGHTS = 2**28
REMEDY = "download it again, or save the head again"


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

    Nothing is built before the config is valid and the tensors in the file have the names, types and shapes it implies.

    Raises:
        HeadError: a file is missing, truncated, altered or of another kind.
    """
    config, record = read_config(folder / CONFIG)
    tensors = _read_weights(folder / WEIGHTS, config, record)
    with torch.device("meta"):  # the weights come from the file
        head = LengthHead(config)
    head.load_state_dict(tensors, strict=True, assign=True)
    return head.eval()


def read_config(path: Path) -> tuple[LengthHeadConfig, dict[str, Any]]:
    """The config of a head, and the record it was read from.

    Raises:
        HeadError: it does not describe a head this version can read.
    """
    _check_file(path, LARGEST_CONFIG)
    try:
        record = _parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path} is not JSON ({error}): {REMEDY}") from None
    except OSError as error:
        raise HeadError(f"{path} cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise HeadError(f"{path} holds a JSON {type(record).__name__}: expected an object")
    return LengthHeadConfig.from_dict({name: record[name] for name in record if name != HASH}, str(path)), record


def weight_shapes(config: LengthHeadConfig, where: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of such a head, without a single weight in memory.

    Raises:
        HeadError: they are larger than those of any head.
    """
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LengthHead(config).state_dict().items()}
    if (number := _count(shapes)) > MOST_WEIGHTS:
        raise HeadError(f"{where} describes a head of {number:,} weights: expected at most {MOST_WEIGHTS:,}")
    return shapes


def largest_file(shapes: dict[str, tuple[int, ...]]) -> int:
    """The most bytes that weights of these shapes take in a file."""
    return 4 * _count(shapes) + LARGEST_HEADER


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def content_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_weights(path: Path, config: LengthHeadConfig, record: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, after the file's header has been compared with the config."""
    shapes = weight_shapes(config, str(path.with_name(CONFIG)))
    _check_file(path, largest_file(shapes))
    try:
        with safe_open(path, framework="pt") as weights:
            if not _same_config(record, (weights.metadata() or {}).get("config", "")):
                raise HeadError(f"{path.with_name(CONFIG)} and the config inside {path} differ: {REMEDY}")
            slices = {name: weights.get_slice(name) for name in weights.keys()}
            found = {name: (str(part.get_dtype()), part.get_shape()) for name, part in slices.items()}
            check_tensors(found, {name: ("F32", shape) for name, shape in shapes.items()}, str(path))
            tensors = {name: weights.get_tensor(name).clone() for name in slices}  # not views of the file
    except (SafetensorError, OSError) as error:
        raise HeadError(f"{path} is truncated or no safetensors file ({error}): {REMEDY}") from error
    if (found_hash := content_hash(tensors)) != record.get(HASH):
        raise HeadError(
            f"{path} was altered: its weights have SHA-256 {found_hash}, {CONFIG} says {shown(record.get(HASH))}; "
            f"{REMEDY}"
        )
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise HeadError(f"{name} in {path} holds NaN or infinite numbers: expected finite ones; {REMEDY}")
    if not (tensors["std"] > 0).all():
        raise HeadError(f"std in {path} has a smallest entry of {float(tensors['std'].min())}: expected all above 0")
    return tensors


def _check_file(path: Path, largest: int) -> None:
    """Refuse what is no plain file or too large to be what it should be."""
    try:
        state = path.stat()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise HeadError(f"{path} cannot be read ({error})") from error
        where = f"no {path.name} in {path.parent}"
        raise HeadError(f"{where}: expected a folder written by head.save_pretrained()") from None
    if not stat.S_ISREG(state.st_mode):
        raise HeadError(f"{path} is {'a folder' if path.is_dir() else 'no plain file'}: expected a file")
    if state.st_size > largest:
        raise HeadError(f"{path} has {state.st_size:,} bytes: expected at most {largest:,}")


def _parse(content: bytes | str) -> Any:
    """JSON that can be compared and written again.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    record = json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    check_depth("it", record)
    return record


def _same_config(record: dict[str, Any], repeated: str) -> bool:
    """Whether the weights' metadata repeat the config; as text, since NaN is not equal to itself."""
    try:
        return json.dumps(_parse(repeated), sort_keys=True) == json.dumps(record, sort_keys=True)
    except (ValueError, RecursionError):
        return False
