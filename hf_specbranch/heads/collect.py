"""Running a pair on real prompts to learn how its drafts fare."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..bench.prompts import Prompt
from ..config import SpecBranchConfig
from .dataset import UNBOUNDED, CollectSettings, Manifest, prompts_record, write_shard
from .identity import ModelIdentity, tokenizer_hash
from .recording import LineRecorder


def collect(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    prompts: list[Prompt],
    prompt_file: Path,
    out: Path,
    settings: CollectSettings,
    progress: bool = True,
) -> Manifest:
    """Record features and outcomes of drafted lines.

    Batches of prompts are run one after the other, each at every temperature; each run is one shard. A run that was
    stopped goes on behind its last whole shard when it is started again with the same settings.

    Args:
        target: the model to be read; its `generate()` is left as it is.
        draft: the model to be judged.
        tokenizer: theirs.
        prompts: texts to continue.
        prompt_file: where they came from; its name is recorded.
        out: folder for the shards, made if missing.
        settings: how.
        progress: show a bar.

    Returns:
        The manifest as written.

    Raises:
        ValueError: `out` holds lines collected otherwise, or the target has too few layers.
    """
    if settings.num_layers > target.config.get_text_config(decoder=True).num_hidden_layers:
        raise ValueError(f"num_layers={settings.num_layers}: the target has fewer layers")
    manifest = Manifest(
        target=ModelIdentity.of(target),
        draft=ModelIdentity.of(draft),
        tokenizer_hash=tokenizer_hash(tokenizer),
        settings=settings,
        prompts=prompts_record(prompt_file, [prompt.prompt for prompt in prompts]),
    )
    manifest = _resume(manifest, out)
    runs = _runs(len(prompts), settings)
    runner = PairRunner(target, draft, tokenizer)
    total = settings.max_samples if settings.max_samples < UNBOUNDED else None
    with tqdm(total=total, initial=manifest.samples, unit="line", disable=not progress) as bar:
        for number, (rows, temperature) in enumerate(runs):
            if manifest.complete or manifest.samples >= settings.max_samples:
                break
            if number < len(manifest.shards):
                continue
            texts = [prompts[row].prompt for row in rows]
            samples = runner.record(texts, rows, temperature, settings, seed=settings.seed + number)
            _add_shard(manifest, out, samples, temperature)
            bar.update(manifest.shards[-1]["samples"])
    manifest.complete = True
    manifest.write(out)
    return manifest


def _runs(prompts: int, settings: CollectSettings) -> list[tuple[list[int], float]]:
    """Which prompts at which temperature, in order; any beginning of it mixes the temperatures."""
    size = settings.batch_size
    batches = [list(range(first, min(first + size, prompts))) for first in range(0, prompts, size)]
    return [(batch, temperature) for batch in batches for temperature in settings.temperatures]


def _resume(wanted: Manifest, out: Path) -> Manifest:
    if not (out / "manifest.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        wanted.write(out)
        return wanted
    found = Manifest.read(out)
    theirs, ours = found.origin(), wanted.origin()
    if differing := sorted(name for name in ours if ours[name] != theirs.get(name)):
        told = "; ".join(f"{name}: there {theirs.get(name)}, asked for {ours[name]}" for name in differing)
        raise ValueError(f"{out} holds lines collected otherwise ({told}): choose another folder, or remove this one")
    return found


def _add_shard(manifest: Manifest, out: Path, samples: dict[str, Tensor], temperature: float) -> None:
    room = manifest.settings.max_samples - manifest.samples
    samples = {name: values[:room] for name, values in samples.items()}
    name = f"shard-{len(manifest.shards):05d}.safetensors"
    write_shard(out, name, samples)
    manifest.shards.append({"file": name, "samples": len(samples["accepted"]), "temperature": temperature})
    manifest.write(out)


class PairRunner:
    """A pair that generates batches of texts under any settings.

    Args:
        target: stays as it is; a shallow copy with the same weights is attached.
        draft: the draft.
        tokenizer: theirs.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> None:
        from ..mixin import specbranch

        self.model: Any = specbranch(copy.copy(target))
        self.draft, self.tokenizer = draft, tokenizer

    def generate(
        self, texts: list[str], temperature: float, max_new_tokens: int, seed: int, **more: Any
    ) -> tuple[Tensor, int]:
        """Continue the texts: [B, T] ids, and the column where the new tokens begin. Temperature 0 is greedy."""
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        batch = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        generator = torch.Generator().manual_seed(seed)
        more = {**sampling, "max_new_tokens": max_new_tokens, "generator": generator, **more}
        sequences: Tensor = self.model.generate(**batch, assistant_model=self.draft, **more)
        return sequences, batch["input_ids"].shape[1]

    def record(
        self, texts: list[str], prompt_numbers: list[int], temperature: float, settings: CollectSettings, seed: int
    ) -> dict[str, Tensor]:
        """Lines of one batch, with the number of the prompt each belongs to."""
        last = self.model.config.get_text_config(decoder=True).num_hidden_layers
        layers = tuple(range(last - settings.num_layers + 1, last + 1))
        recorder = LineRecorder(self.model, layers, settings.gamma, settings.drafted_tokens, seed)
        config = SpecBranchConfig(
            policy="specbranch",
            max_draft_length=settings.gamma,
            confidence_threshold=settings.confidence_threshold,
            max_branches=settings.max_branches,
        )
        sequences, start = self.generate(
            texts, temperature, settings.max_new_tokens, seed, specbranch=config, speculation_hooks=[recorder]
        )
        samples = recorder.samples(sequences, self.ends(sequences, start))
        if not samples:
            raise ValueError("nothing was drafted on these prompts: raise max_new_tokens or lower confidence_threshold")
        samples["prompt"] = torch.tensor(prompt_numbers)[samples.pop("row")]
        samples["temperature"] = torch.full((len(samples["accepted"]),), temperature)
        return samples

    def ends(self, sequences: Tensor, start: int) -> list[int]:
        """Where each text ends: behind its end-of-sequence token, or at the last column."""
        eos = self.model.generation_config.eos_token_id
        stops = torch.isin(sequences[:, start:].cpu(), torch.tensor([] if eos is None else eos).long())  # [B, N]
        first = stops.long().cumsum(1).eq(0).sum(1)  # tokens before the first stop
        return [min(start + int(count) + 1, sequences.shape[1]) for count in first]
