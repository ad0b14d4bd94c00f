"""Recorded lines on disk: safetensors shards, and a manifest that says what they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .identity import ModelIdentity

MANIFEST = "manifest.json"
KIND = "hf_specbranch length head data"
UNBOUNDED = 10**9  # as a number of lines: until the prompts are used up


@dataclass(frozen=True)
class CollectSettings:
    """How lines are collected.

    Args:
        gamma: longest draft.
        confidence_threshold: epsilon.
        max_branches: k_max.
        temperatures: one run over the prompts each; 0 is greedy.
        max_new_tokens: a prompt.
        batch_size: prompts at a time.
        max_samples: stop at this many lines; bounds the disk.
        num_layers: K, the target's last layers to keep.
        drafted_tokens: how many of a line's first tokens are kept with their embedding.
        seed: of the sampled runs.
    """

    gamma: int = 8
    confidence_threshold: float = 0.4
    max_branches: int = 4
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_new_tokens: int = 128
    batch_size: int = 16
    max_samples: int = 20_000
    num_layers: int = 4
    drafted_tokens: int = 3
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "temperatures": list(self.temperatures)}


@dataclass
class Manifest:
    """What a folder of shards holds."""

    target: ModelIdentity
    draft: ModelIdentity
    tokenizer_hash: str
    settings: CollectSettings
    prompts: dict[str, Any]  # file name, number, SHA-256
    shards: list[dict[str, Any]] = field(default_factory=list)  # file, samples, temperature
    complete: bool = False

    @property
    def samples(self) -> int:
        return sum(shard["samples"] for shard in self.shards)

    def origin(self) -> dict[str, Any]:
        """Everything that must agree for two runs to be one."""
        return {
            "target": self.target.to_dict(),
            "draft": self.draft.to_dict(),
            "tokenizer_hash": self.tokenizer_hash,
            "prompts": self.prompts,
            **self.settings.to_dict(),
        }

    def write(self, folder: Path) -> None:
        record = {
            "kind": KIND,
            "target": self.target.to_dict(),
            "draft": self.draft.to_dict(),
            "tokenizer_hash": self.tokenizer_hash,
            "settings": self.settings.to_dict(),
            "prompts": self.prompts,
            "samples": self.samples,
            "complete": self.complete,
            "shards": self.shards,
        }
        unfinished = folder / f".{MANIFEST}.tmp"
        unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"no {MANIFEST} in {folder}: give the folder that `head collect` wrote")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["kind"] != KIND:
                raise ValueError(f"kind is {record['kind']!r}")
            settings = {**record["settings"], "temperatures": tuple(record["settings"]["temperatures"])}
            return cls(
                target=ModelIdentity.from_dict(record["target"], f"target in {path}"),
                draft=ModelIdentity.from_dict(record["draft"], f"draft in {path}"),
                tokenizer_hash=record["tokenizer_hash"],
                settings=CollectSettings(**settings),
                prompts=record["prompts"],
                shards=record["shards"],
                complete=record["complete"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a manifest of collected lines ({error}): collect them again") from error


def write_shard(folder: Path, name: str, samples: dict[str, Tensor]) -> None:
    """Write one shard; it appears whole or not at all."""
    unfinished = folder / f".{name}.tmp"
    save_file({key: values.contiguous() for key, values in samples.items()}, unfinished)
    os.replace(unfinished, folder / name)


def read_samples(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """All lines of a folder, shards joined.

    Raises:
        FileNotFoundError: the manifest or a shard is missing.
        ValueError: a file is damaged, or there are no lines.
    """
    manifest = Manifest.read(folder)
    parts = []
    for shard in manifest.shards:
        path = folder / shard["file"]
        if not path.is_file():
            raise FileNotFoundError(f"shard {path} of the manifest is missing: collect the lines again")
        try:
            part = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"shard {path} is truncated or damaged ({error}): collect the lines again") from error
        if len(part["accepted"]) != shard["samples"]:
            raise ValueError(f"shard {path} holds {len(part['accepted'])} lines, the manifest says {shard['samples']}")
        parts.append(part)
    if not manifest.samples:
        raise ValueError(f"{folder} holds no lines: collect with more prompts or more tokens")
    return manifest, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def read_folders(folders: Sequence[Path]) -> tuple[Manifest, dict[str, Tensor]]:
    """The lines of several folders as if they were one; prompts are numbered on.

    Raises:
        FileNotFoundError, ValueError: as `read_samples`, or the folders do not belong together.
    """
    manifest, samples = read_samples(folders[0])
    parts, sets = [samples], [manifest.prompts]
    for folder in folders[1:]:
        other, more = read_samples(folder)
        alike = ("target", "draft", "tokenizer_hash", "gamma", "confidence_threshold", "num_layers", "drafted_tokens")
        ours, theirs = manifest.origin(), other.origin()
        if differing := [name for name in alike if ours[name] != theirs[name]]:
            told = "; ".join(f"{name}: {ours[name]} and {theirs[name]}" for name in differing)
            raise ValueError(f"{folders[0]} and {folder} do not belong together ({told}): train on one of them")
        more["prompt"] = more["prompt"] + int(parts[-1]["prompt"].max()) + 1
        parts.append(more)
        sets.append(other.prompts)
    if len(sets) > 1:
        manifest.prompts = {
            "file": ", ".join(each["file"] for each in sets),
            "number": sum(each["number"] for each in sets),
            "sha256": hashlib.sha256("".join(each["sha256"] for each in sets).encode()).hexdigest(),
            "sets": sets,
        }
    return manifest, {name: torch.cat([part[name] for part in parts]) for name in samples}


def labels(samples: dict[str, Tensor]) -> Tensor:
    """[N] 0 where nothing of the line was accepted, 2 where all was, 1 where some was."""
    accepted, length = samples["accepted"], samples["length"]
    return torch.where(accepted == 0, 0, torch.where(accepted == length, 2, 1))


def prompts_record(file: Path, texts: list[str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return {"file": file.name, "number": len(texts), "sha256": digest}
