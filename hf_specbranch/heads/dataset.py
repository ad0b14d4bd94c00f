"""What a head is trained on: recorded drafts in safetensors shards with a manifest, and texts the target has read."""

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
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .config import ModelIdentity
from .network import Reading

MANIFEST = "manifest.json"
KIND = "hf_specbranch length head data"
UNBOUNDED = 10**9  # as a number of drafts: until the prompts are used up
CANDIDATES = 16  # tokens kept of each of the target's distributions
STORED = torch.bfloat16  # hidden states and embeddings; their range matters more than their last digits


@dataclass(frozen=True)
class CollectSettings:
    """How drafts are collected.

    Args:
        gamma: the maximum draft length.
        confidence_threshold: epsilon.
        max_branches: k_max.
        temperatures: one run over the prompts each; 0 is greedy.
        max_new_tokens: tokens per prompt.
        batch_size: prompts at a time.
        max_samples: stop at this many drafts; bounds the disk space.
        num_layers: K, the target's last layers to keep.
        drafted_tokens: how many of a draft's first tokens are kept with their embeddings.
        seed: seed of the sampled runs.
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
    """Describes a folder of shards."""

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
        """Return everything that must agree for one run to continue another."""
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
            raise ValueError(f"{path} is not a manifest of collected drafts ({error}): collect them again") from error


def write_shard(folder: Path, name: str, samples: dict[str, Tensor]) -> None:
    """Write one shard under a temporary name first, so that it is never incomplete."""
    unfinished = folder / f".{name}.tmp"
    save_file({key: values.contiguous() for key, values in samples.items()}, unfinished)
    os.replace(unfinished, folder / name)


def read_samples(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Read all drafts of a folder.

    Raises:
        FileNotFoundError: the manifest or a shard is missing.
        ValueError: a file is damaged, or there are no drafts.
    """
    manifest = Manifest.read(folder)
    parts = []
    for shard in manifest.shards:
        path = folder / shard["file"]
        if not path.is_file():
            raise FileNotFoundError(f"shard {path} of the manifest is missing: collect the drafts again")
        try:
            part = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"shard {path} is truncated or damaged ({error}): collect the drafts again") from error
        if len(part["accepted"]) != shard["samples"]:
            raise ValueError(f"shard {path} holds {len(part['accepted'])} drafts, the manifest says {shard['samples']}")
        parts.append(part)
    if not manifest.samples:
        raise ValueError(f"{folder} holds no drafts: collect with more prompts or more tokens")
    return manifest, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def read_folders(folders: Sequence[Path]) -> tuple[Manifest, dict[str, Tensor]]:
    """Read the drafts of several folders as one set; the prompts are numbered consecutively.

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
            found = "; ".join(f"{name}: {ours[name]} and {theirs[name]}" for name in differing)
            raise ValueError(f"{folders[0]} and {folder} do not belong together ({found}): train on one of them")
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
    """Return [N] 0 where none of a draft was accepted, 2 where all of it was, 1 elsewhere."""
    accepted, length = samples["accepted"], samples["length"]
    return torch.where(accepted == 0, 0, torch.where(accepted == length, 2, 1))


def prompts_record(file: Path, texts: list[str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return {"file": file.name, "number": len(texts), "sha256": digest}


@torch.no_grad()
def read_texts(
    target: PreTrainedModel,
    tokenizer: Any,
    texts: list[str],
    num_layers: int,
    places: int,
    new_tokens: int = 48,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> Reading:
    """Let the target continue texts, greedily and at temperature 0.8 in turn; record its state at each position.

    Args:
        target: the model a head will read.
        tokenizer: the target's.
        texts: prompts.
        num_layers: K, how many of its last layers.
        places: D, how many tokens ahead.
        new_tokens: tokens to generate after each text.
        batch_size: texts at a time.
        seed: seed of the sampling.
        progress: show a bar.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    parts: list[tuple[Tensor, ...]] = []
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for number, first in enumerate(tqdm(range(0, len(texts), batch_size), desc="reading", disable=not progress)):
            batch = tokenizer(
                texts[first : first + batch_size], return_tensors="pt", padding=True, padding_side="left"
            ).to(target.device)
            mask = batch["attention_mask"]
            sampling: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=0, top_p=1.0)
            sequences = target.generate(
                batch["input_ids"],
                attention_mask=mask,
                max_new_tokens=new_tokens,
                **(sampling if number % 2 else dict(do_sample=False)),
            )
            mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1)
            mask = mask * (sequences != tokenizer.pad_token_id)
            parts += [_read(target, row[kept > 0], num_layers, places) for row, kept in zip(sequences, mask)]
    hidden, tokens, likely, chance = (torch.cat(part) for part in zip(*parts))
    return Reading(hidden, tokens, likely, chance, target.get_input_embeddings().weight.detach().float().cpu())


def _read(target: PreTrainedModel, tokens: Tensor, num_layers: int, places: int) -> tuple[Tensor, ...]:
    """Return one text's positions, as the first four fields of a `Reading`."""
    seen = target(tokens[None], output_hidden_states=True)
    count = max(0, len(tokens) - 1 - places)  # positions with a token and all places after it
    hidden = torch.stack(seen.hidden_states[-num_layers:], dim=2)[0, :count]  # [M, K, H]
    offsets = torch.arange(count, device=tokens.device)[:, None] + torch.arange(places + 1, device=tokens.device)
    best = seen.logits[0].float().softmax(-1).topk(CANDIDATES, dim=-1)
    ahead = offsets[:, 1:]  # the distribution after the chosen token is that of the first place
    return (
        hidden.to(STORED).cpu(),
        tokens[offsets + 1].cpu(),
        best.indices[ahead].cpu(),
        best.values[ahead].cpu(),
    )
