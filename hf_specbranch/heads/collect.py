"""Run a pair on real prompts and record how much of each draft is accepted."""

from __future__ import annotations

import copy
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..attach import specbranch
from ..bench.prompts import Prompt
from ..config import SpecBranchConfig
from ..decoding.hooks import NO_OPINION, SpeculationHook, Survivor
from .config import ModelIdentity, tokenizer_hash
from .dataset import STORED, CollectSettings, Manifest, prompts_record, write_shard
from .network import HeadInputs, head_inputs

# How often the drafts of a round are held back, left to confidence, or sent whole: later rounds then start from
# states that any head's predictions may lead to. What is sent decides no label, since drafts are never redrafted; one
# decision for the whole batch makes the rounds that hold back cheap.
HELD_BACK, LEFT_TO_CONFIDENCE, SENT_WHOLE = 0.5, 0.35, 0.15


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
    """Record the features of drafts and how many of their tokens were accepted.

    Batches of prompts are run one after the other, each at every temperature; each run is one shard. A run that was
    interrupted continues after its last complete shard when it is started again with the same settings.

    Args:
        target: the model whose states are recorded; its `generate()` is not changed.
        draft: the model whose drafts are recorded.
        tokenizer: the pair's.
        prompts: texts to continue.
        prompt_file: where they came from; its name is recorded.
        out: folder for the shards, created if missing.
        settings: how to collect.
        progress: show a progress bar.

    Returns:
        The manifest as written.

    Raises:
        ValueError: `out` holds drafts collected with other settings, or the target has too few layers.
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
    with tqdm(total=len(runs), initial=len(manifest.shards), unit="batch", disable=not progress) as bar:
        for number, (rows, temperature) in enumerate(runs):
            if manifest.complete or manifest.samples >= settings.max_samples:
                break
            if number < len(manifest.shards):
                continue
            texts = [prompts[row].prompt for row in rows]
            samples = runner.record(texts, rows, temperature, settings, seed=settings.seed + number)
            _add_shard(manifest, out, samples, temperature)
            done = len(manifest.shards)
            bar.total = min(len(runs), ceil(settings.max_samples * done / max(1, manifest.samples)))
            bar.set_postfix(drafts=manifest.samples, refresh=False)
            bar.update()
    manifest.complete = True
    manifest.write(out)
    return manifest


def _runs(prompts: int, settings: CollectSettings) -> list[tuple[list[int], float]]:
    """Return which prompts to run at which temperature, in order; every prefix of the list mixes the temperatures."""
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
        differences = "; ".join(f"{name}: there {theirs.get(name)}, here {ours[name]}" for name in differing)
        raise ValueError(
            f"{out} holds drafts collected with other settings ({differences}): choose another folder, or remove it"
        )
    return found


def _add_shard(manifest: Manifest, out: Path, samples: dict[str, Tensor], temperature: float) -> None:
    room = manifest.settings.max_samples - manifest.samples
    samples = {name: values[:room] for name, values in samples.items()}
    name = f"shard-{len(manifest.shards):05d}.safetensors"
    write_shard(out, name, samples)
    manifest.shards.append({"file": name, "samples": len(samples["accepted"]), "temperature": temperature})
    manifest.write(out)


class PairRunner:
    """Generates batches of texts with a pair under any settings.

    Args:
        target: not changed; SpecBranch is attached to a shallow copy with the same weights.
        draft: the draft model.
        tokenizer: the pair's.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any) -> None:
        self.model: Any = specbranch(copy.copy(target))
        self.draft, self.tokenizer = draft, tokenizer

    def generate(
        self, texts: list[str], temperature: float, max_new_tokens: int, seed: int, **more: Any
    ) -> tuple[Tensor, int]:
        """Continue the texts; return ids [B, T] and the column where the new tokens begin. Temperature 0 is greedy."""
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
        """Return the drafts of one batch, each with the number of its prompt."""
        last = self.model.config.get_text_config(decoder=True).num_hidden_layers
        layers = tuple(range(last - settings.num_layers + 1, last + 1))
        recorder = DraftRecorder(self.model, layers, settings.gamma, settings.drafted_tokens, seed)
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
        """Return where each text ends: after its end-of-sequence token, or at the last column."""
        eos = self.model.generation_config.eos_token_id
        stops = torch.isin(sequences[:, start:].cpu(), torch.tensor([] if eos is None else eos).long())  # [B, N]
        first = stops.long().cumsum(1).eq(0).sum(1)  # tokens before the first stop
        return [min(start + int(count) + 1, sequences.shape[1]) for count in first]


class DraftRecorder(SpeculationHook):
    """A hook that records every draft it is shown.

    Args:
        target: the model whose embeddings and layers are recorded.
        layers: indices into its `hidden_states`.
        gamma: positions to record.
        drafted_tokens: how many of the first tokens to embed.
        seed: seed of its random decisions.
    """

    fresh_drafts = True
    draft_scores = True

    def __init__(
        self, target: PreTrainedModel, layers: tuple[int, ...], gamma: int, drafted_tokens: int, seed: int
    ) -> None:
        self.feature_layers = layers
        self.embeddings = target.get_input_embeddings()
        self.gamma, self.drafted_tokens = gamma, drafted_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.recorded: list[dict[str, Tensor]] = []

    def keep(self, survivor: Survivor) -> Tensor | None:
        if survivor.features is None or survivor.column is None:  # the round after the prompt
            return None
        inputs = head_inputs(survivor, self.embeddings, self.gamma, self.drafted_tokens)
        rows = (survivor.length > 0).nonzero()[:, 0].cpu()
        draft = {
            "row": rows,
            "column": survivor.column.cpu()[rows],
            "length": survivor.length.cpu()[rows].clamp(max=self.gamma),
            "tokens": _padded(survivor.tokens.cpu(), self.gamma)[rows],
        }
        self.recorded.append({**draft, **_stored(inputs, rows)})
        return self._explore(survivor)

    def _explore(self, survivor: Survivor) -> Tensor:
        weights = torch.tensor([HELD_BACK, LEFT_TO_CONFIDENCE, SENT_WHOLE])
        decision = int(torch.multinomial(weights, 1, generator=self.generator))
        if decision == 2:
            return survivor.length
        return torch.full_like(survivor.length, 0 if decision == 0 else NO_OPINION)

    def samples(self, sequences: Tensor, ends: list[int]) -> dict[str, Tensor]:
        """Return all recorded drafts with the number of their tokens that were accepted.

        A drafted token was accepted exactly if the text has it. For greedy drafts that is the rule itself; a sampled
        token that is rejected is replaced by a draw from the residual, where its probability is 0.

        Args:
            sequences: [B, T] the finished texts.
            ends: where each of them ends.

        Returns:
            Tensors with one entry per draft, without the drafts that the end of a text cut off.
        """
        if not self.recorded:
            return {}
        table = {name: torch.cat([part[name] for part in self.recorded]) for name in self.recorded[0]}
        text = torch.nn.functional.pad(sequences.cpu(), (0, self.gamma), value=-1)
        columns = table["column"][:, None] + torch.arange(self.gamma)  # [N, G]
        written = torch.tensor(ends)[table["row"]][:, None]
        found = text[table["row"][:, None], columns.clamp(max=text.shape[1] - 1)]
        inside = torch.arange(self.gamma) < table["length"][:, None]
        agrees = (found == table["tokens"]) & (columns < written) & inside
        accepted = agrees.long().cumprod(1).sum(1)
        known = (accepted == table["length"]) | (table["column"] + accepted < written[:, 0])
        table["accepted"] = accepted
        return {name: values[known] for name, values in table.items() if name not in ("column", "tokens")}


def _stored(inputs: HeadInputs, rows: Tensor) -> dict[str, Tensor]:
    large = ("hidden", "committed", "drafted")
    return {
        name: values.cpu()[rows].to(STORED if name in large else torch.float32)
        for name, values in inputs._asdict().items()
    }


def _padded(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])))[:, :width]
