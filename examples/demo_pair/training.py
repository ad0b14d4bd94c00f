"""One training loop and three losses: next token, breaking loops, and distillation."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

Loss = Callable[[int], Tensor]  # step -> scalar
LOOP_CONTEXT = 96  # tokens of ordinary text before a loop's second copy


@dataclass(frozen=True)
class Stage:
    """How long and how fast one model is trained, on `batch` rows of corpus.

    `extra` counts rows of a second kind: loops to unlearn for the target, the target's own text for the drafts.
    """

    name: str
    steps: int
    batch: int
    learning_rate: float
    extra: int = 0

    def compile(self, loss: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
        """Return the loss, compiled where the stage is long enough to make up for the half minute this takes."""
        worth_it = device.type == "cuda" and self.steps >= 1000
        return torch.compile(loss, dynamic=False) if worth_it else loss


def learning_rate(stage: Stage, step: int) -> float:
    """Warm up over the first 2%, then decay linearly to zero; a small model repeats less after a full decay."""
    warmup = max(1, stage.steps // 50)
    return stage.learning_rate * min((step + 1) / warmup, 1 - step / stage.steps)


def windows(tokens: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """Return random windows of the corpus, the same for the same seed. [N] -> [rows, length]"""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)  # [rows, 1]
    index = (starts + torch.arange(length)).to(tokens.device)
    return tokens[index].long()


def fit(stage: Stage, model: LlamaForCausalLM, loss_of: Loss, work: Path, resume: bool, save_every: int) -> None:
    """Train `model` in place. Saves checkpoints, and appends to `losses.json` at the end.

    Batches are drawn from a seed and the step number alone, so a resumed run sees the same ones.
    """
    device = model.device
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
    checkpoint = work / f"{stage.name}.checkpoint.pt"
    start, losses = 0, []
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, losses = state["step"], state["losses"]
    bar = tqdm(range(start, stage.steps), desc=stage.name, initial=start, total=stage.steps, mininterval=1.0)
    for step in bar:
        if step > start and step % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "losses": losses}
            torch.save(state, checkpoint)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, step)
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == stage.steps - 1:
            losses.append((step, loss.item()))  # waits for the device
            bar.set_postfix(loss=f"{losses[-1][1]:.3f}")
    log = work / "losses.json"
    curves = json.loads(log.read_text()) if log.exists() else {}
    log.write_text(json.dumps(curves | {stage.name: losses}))
    checkpoint.unlink(missing_ok=True)


def forward(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return logits in float32; on a GPU the products are in bfloat16. [B, T] -> [B, T, V]"""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each token given those before it. ids: [B, T+1]"""
    logits = forward(model, ids[:, :-1])  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def looping_rows(tokens: Tensor, line_ends: Tensor, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return text that falls into a loop: corpus text whose last one to four lines repeat.

    In a quarter of the rows the last 2 to 12 tokens repeat instead.
    tokens: [N]; line_ends: [L] positions of newlines, on the CPU -> ids [rows, length], periods [rows, 1]
    """
    generator = torch.Generator().manual_seed(seed)
    last = torch.randint(4, len(line_ends), (4 * rows,), generator=generator)
    lines = torch.randint(1, 5, (4 * rows,), generator=generator)
    end, start = line_ends[last], line_ends[last - lines]
    usable = ((end - start >= 6) & (end - start <= 64) & (end >= LOOP_CONTEXT)).nonzero().flatten()
    usable = usable[torch.arange(rows) % len(usable)]
    end, start = end[usable, None], start[usable, None]  # [rows, 1]
    short = (rows // 4, 1)
    end[: short[0]] = torch.randint(LOOP_CONTEXT, len(tokens), short, generator=generator)
    start[: short[0]] = end[: short[0]] - torch.randint(2, 13, short, generator=generator)
    position, period = torch.arange(length), end - start
    first = end - LOOP_CONTEXT + 1 + position
    again = start + 1 + (position - LOOP_CONTEXT) % period
    index = torch.where(position < LOOP_CONTEXT, first, again).to(tokens.device)
    return tokens[index].long(), period.to(tokens.device)


def repetition_loss(model: LlamaForCausalLM, ids: Tensor, period: Tensor) -> Tensor:
    """Penalise loops: each copy should be half as likely as the copy before it.

    Without this loss a model becomes more certain with every copy, so greedy decoding never leaves a loop. With p the
    probability of a token and p' that of the same token one period earlier, the loss is -log(1 - |p - p'/2|)
    (Xu et al. 2022, "Learning to Break the Loop"). ids: [B, T]; period: [B, 1]
    """
    log_p = F.log_softmax(forward(model, ids[:, :-1]), dim=-1)  # [B, T-1, V]
    p = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1).exp()  # [B, T-1], entry t - 1 is that of token t
    copies = torch.arange(LOOP_CONTEXT, ids.shape[1], device=ids.device)
    before = p.gather(1, copies - period - 1).detach()
    gap = (p[:, LOOP_CONTEXT - 1 :] - 0.5 * before).abs()
    return -torch.log1p(-gap.clamp(max=1 - 1e-4)).mean()


def loop_breaking_loss(model: LlamaForCausalLM, ids: Tensor, loops: Tensor, period: Tensor) -> Tensor:
    """Return the next-token loss plus the repetition loss. ids: [B, T+1]; loops: [R, S]; period: [R, 1]"""
    return next_token_loss(model, ids) + 0.3 * repetition_loss(model, loops, period)


def distillation_loss(student: LlamaForCausalLM, teacher: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return KL(teacher || student), the mean over positions. ids: [B, T]"""
    with torch.no_grad():
        log_p = F.log_softmax(forward(teacher, ids), dim=-1)  # [B, T, V]
    log_q = F.log_softmax(forward(student, ids), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


@torch.no_grad()
def continuations(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """Return the model's greedy continuations, padded to one length. [B, P] -> [B, P + new_tokens]"""
    with torch.autocast(prompts.device.type, torch.bfloat16, enabled=prompts.device.type == "cuda"):
        ids: Tensor = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=new_tokens
        )
    return F.pad(ids, (0, prompts.shape[1] + new_tokens - ids.shape[1]), value=model.config.pad_token_id)
