"""A head on disk: config.json, model.safetensors and a model card. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import LengthHeadConfig
from .network import HeadNetwork
from .validation import HeadError, check_depth, check_tensors, shown

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
HASH = "weights_sha256"
TAGS = ("specbranch", "speculative-decoding", "length-head")  # of a model card
LARGEST_CONFIG = 2**20  # bytes
LARGEST_HEADER = 2**22  # bytes of a safetensors header: the tensors' names, and the config once more
MOST_WEIGHTS = 2**28
REMEDY = "download it again, or save the head again"


def save(head: HeadNetwork, folder: Path) -> Path:
    """Write the three files, each under a temporary name first, so that none is ever incomplete.

    Args:
        head: what to save.
        folder: created if missing; an older head in it is replaced.

    Returns:
        The folder.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give a folder to save the head in")
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(head.config, library_version=_library_version())
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in head.state_dict().items()}
    record = {**config.to_dict(), HASH: content_hash(tensors)}
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        save_file(tensors, Path(temporary) / WEIGHTS, metadata={"format": "pt", "config": json.dumps(record)})
        (Path(temporary) / CONFIG).write_text(text, encoding="utf-8")
        (Path(temporary) / CARD).write_text(model_card(config), encoding="utf-8")
        os.chmod(
            Path(temporary) / WEIGHTS, (Path(temporary) / CONFIG).stat().st_mode
        )  # safetensors creates it readable by its owner only
        for name in (WEIGHTS, CONFIG, CARD):
            os.replace(Path(temporary) / name, folder / name)
    return folder


def _library_version() -> str:
    try:
        return version("hf_specbranch")
    except PackageNotFoundError:  # run from its source, not installed
        return ""


def read(folder: Path) -> tuple[LengthHeadConfig, dict[str, Tensor]]:
    """Read the config and the weights of a head; refuse files that are not as they were written.

    No tensor is read before the config is valid and the file has the names, types and shapes that it implies.

    Raises:
        HeadError: a file is missing, truncated, altered or of another kind.
    """
    config, record = read_config(folder / CONFIG)
    return config, _read_weights(folder / WEIGHTS, config, record)


def read_config(path: Path) -> tuple[LengthHeadConfig, dict[str, Any]]:
    """Read the config of a head; return it with the JSON record.

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
    """Return the shape of each tensor of a head with this config, without allocating weights.

    Raises:
        HeadError: the head would be larger than any real one.
    """
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in HeadNetwork(config).state_dict().items()}
    if (number := _count(shapes)) > MOST_WEIGHTS:
        raise HeadError(f"{where} describes a head of {number:,} weights: expected at most {MOST_WEIGHTS:,}")
    return shapes


def largest_file(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the largest file size, in bytes, for weights of these shapes."""
    return 4 * _count(shapes) + LARGEST_HEADER


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def content_hash(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 over the names, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_weights(path: Path, config: LengthHeadConfig, record: dict[str, Any]) -> dict[str, Tensor]:
    """Read the tensors after comparing the file's header with the config."""
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
    """Refuse what is no plain file, or too large."""
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
    """Parse JSON that is flat enough to be compared and written again.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    record = json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    check_depth("it", record)
    return record


def _same_config(record: dict[str, Any], repeated: str) -> bool:
    """Whether the weights' metadata repeat the config. They are compared as text: NaN is not equal to itself."""
    try:
        return json.dumps(_parse(repeated), sort_keys=True) == json.dumps(record, sort_keys=True)
    except (ValueError, RecursionError):
        return False


def model_card(config: LengthHeadConfig, repo_id: str | None = None) -> str:
    """Return a model card: Markdown with the metadata by which the Hub finds the head.

    Args:
        config: the head's.
        repo_id: the repository it is uploaded to, for the code example.
    """
    target, draft = config.target, config.draft
    header = ["---", "library_name: hf_specbranch", "tags:", *(f"- {tag}" for tag in TAGS)]
    header += ["base_model:", f"- {target.id}", f"- {draft.id}", "base_model_relation: adapter", "---"]
    body = [
        f"# Length head for {target.id} with {draft.id}",
        "Predicts, before the target verifies a draft, whether none, some or all of it will be accepted (H-RAD), so "
        "that [SpecBranch](https://arxiv.org/abs/2506.01979) decoding rolls back less. It never changes the output: "
        "what it holds back is kept and verified later.",
        "## Use",
        _snippet(config, repo_id),
        "## The pair",
        _pair_table(config),
        f"Tokenizer vocabulary, SHA-256: `{config.tokenizer_hash or 'unknown'}`.",
        "## The head",
        f"Reads {', '.join(config.features)} ({config.input_size} numbers: the target's last {config.num_layers} "
        f"layers, the first {config.drafted_tokens} drafted tokens, {config.gamma} positions); linear layers of "
        f"{', '.join(map(str, config.layer_sizes))} and 3 with ReLU. Predicts *none* where its probability exceeds "
        f"{config.none_threshold}, else *all* above {config.all_threshold}, else *some*."
        + ("" if config.acts else " No probability exceeds these thresholds: this head never decides anything."),
        *_training(config.training),
        *_measured(config.training.get("measured")),
    ]
    return "\n".join(header) + "\n\n" + "\n\n".join(body) + "\n"


def _snippet(config: LengthHeadConfig, repo_id: str | None) -> str:
    name = repo_id or "path/to/this/head"
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM\n"
        "from hf_specbranch import specbranch\n\n"
        f'target = AutoModelForCausalLM.from_pretrained("{config.target.id}")\n'
        f'draft = AutoModelForCausalLM.from_pretrained("{config.draft.id}")\n'
        f'model = specbranch(target, draft=draft, head="{name}")\n'
        "out = model.generate(**inputs)\n"
        "```"
    )


def _pair_table(config: LengthHeadConfig) -> str:
    rows = ["| | target | draft |", "|---|---|---|"]
    for name in config.target.to_dict():
        ours, theirs = getattr(config.target, name), getattr(config.draft, name)
        rows.append(f"| {name} | {ours or 'unknown'} | {theirs or 'unknown'} |")
    return "\n".join(rows)


def _training(record: dict[str, Any]) -> list[str]:
    if "macro_f1" not in record:
        return []
    prompts, f1, accuracy = record["prompts"], record["macro_f1"], record["accuracy"]
    rows = ["| on held-out prompts | macro-F1 | accuracy |", "|---|---|---|"]
    names = {"head": "the head", "confidence": "best threshold on confidence", "majority": "majority class"}
    rows += [f"| {words} | {f1[name]:.3f} | {accuracy[name]:.3f} |" for name, words in names.items()]
    none, some, everything = record["classes"]
    return [
        "## Training",
        f"{record['lines']:,} drafts ({none:,} none, {some:,} some, {everything:,} all accepted) from "
        f"{prompts['number']} prompts (`{prompts['file']}`, SHA-256 `{prompts['sha256'][:16]}`) at temperatures "
        f"{', '.join(map(str, record['temperatures']))}; {record['held_out_lines']:,} drafts held out by prompt.",
        "\n".join(rows),
    ]


def _measured(record: dict[str, Any] | None) -> list[str]:
    """Return the table of `head eval`, if it was run."""
    if not record:
        return []
    rows = ["| temperature | method | rollback rate | tokens per target pass |", "|---|---|---|---|"]
    for entry in record["runs"]:
        rollback, tokens = entry["rollback_rate"], entry["tokens_per_pass"]
        rows.append(f"| {entry['temperature']} | {entry['method']} | {rollback:.3f} | {tokens:.3f} |")
    return [
        "## Measured",
        f"{record['prompts']['number']} prompts (`{record['prompts']['file']}`) not used in training, "
        f"{record['max_new_tokens']} new tokens each.",
        "\n".join(rows),
    ]
