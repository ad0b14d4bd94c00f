"""Train a small EAGLE-3 draft for the embedded target, and compare it with the embedded draft.

    python examples/train_eagle3.py --out runs/eagle3

This takes some minutes on a CPU. The folder has the layout of the speculators project: `specbranch(model,
draft="runs/eagle3")` loads it, and so do servers that know the layout.

The texts are pieces of Python's standard library; the target continues some of them. The draft learns to give the
target's distribution at every position of these texts, and at two further ones from its own states, as it drafts
(training-time test of the EAGLE-3 paper). It starts from the target's last layer and output layer.
"""

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

from hf_specbranch import load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts
from hf_specbranch.layers.shortlist import most_frequent
from hf_specbranch.target_heads.eagle3 import Eagle3Draft
from hf_specbranch.target_heads.loading import eagle3_from

PROMPT, LENGTH, DEPTH, BATCH = 32, 128, 3, 4  # tokens of a row that are given, tokens of a row, drafting steps, rows
DRAFT_VOCABULARY, LAYERS = 2048, [2, 5, 9]
FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias",
)  # fmt: skip


def texts_for(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: int, seed: int) -> Tensor:
    """Return texts [rows, LENGTH] from the standard library; in an eighth of them most is written by the target."""
    generator, files = random.Random(seed), sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    pieces: list[list[int]] = []
    while len(pieces) < rows:
        text = generator.choice(files).read_text(errors="ignore")
        begin = text.find("\n", generator.randrange(max(1, len(text) - 1000))) + 1
        ids = tokenizer(text[begin : begin + 1000])["input_ids"]
        if len(ids) >= LENGTH:
            pieces.append(ids[:LENGTH])
    texts = torch.tensor(pieces)
    new, written = LENGTH - PROMPT, texts[::8, :PROMPT]
    asked = dict(attention_mask=torch.ones_like(written), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    texts[::8] = target.generate(written, **asked)
    return texts


def new_draft(target: LlamaForCausalLM, texts: Tensor) -> tuple[Eagle3Draft, dict[str, object], dict[str, Tensor]]:
    """Return a draft that starts from the target's last layer, its config, and its vocabulary mappings."""
    ours = target.config.to_dict()
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "transformer_layer_config": {**{name: ours[name] for name in FIELDS if name in ours}, "num_hidden_layers": 1},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": None, "architectures": target.config.architectures},
        },
    }
    kept = sorted(most_frequent(texts.tolist(), DRAFT_VOCABULARY))
    kept = sorted({*kept, *range(DRAFT_VOCABULARY)}, key=lambda token: (token not in kept, token))[:DRAFT_VOCABULARY]
    ids = torch.tensor(sorted(kept))
    mappings = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(ours["vocab_size"], dtype=torch.bool)}
    mappings["t2d"][ids] = True

    last, width = target.model.layers[-1].state_dict(), target.config.hidden_size
    weights = {f"layers.0.{name}": value.clone() for name, value in last.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        own = weights[f"layers.0.self_attn.{name}.weight"]
        weights[f"layers.0.self_attn.{name}.weight"] = torch.cat([0.1 * torch.randn_like(own) * own.std(), own], dim=1)
    weights["layers.0.hidden_norm.weight"] = weights["layers.0.input_layernorm.weight"].clone()
    weights["layers.0.input_layernorm.weight"] = torch.ones(width)
    weights["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], dim=1)
    weights["norm.weight"] = target.model.norm.weight.detach().clone()
    return eagle3_from(target, config, weights | mappings), config, mappings


def loss_of(draft: Eagle3Draft, target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return KL(target || draft) within the draft's vocabulary, the mean over positions and steps. ids: [B, L]"""
    assert draft.token_ids is not None
    with torch.no_grad():
        out = target(ids, output_hidden_states=True)
        log_p = F.log_softmax(out.logits[..., draft.token_ids], dim=-1)  # [B, L, V']
        hidden = torch.cat([out.hidden_states[layer] for layer in draft.state_layers], dim=-1)
    count = ids.shape[1] - DEPTH  # positions that have all steps
    order, states, cache = torch.arange(count), draft.encode(hidden[:, :count]), DynamicCache()
    mask, total = order[:, None] >= order, torch.zeros(())
    for step in range(DEPTH):
        # The first step sees the target's states up to its own position; each later one also its own way from there.
        given = dict(attention_mask=mask[None, None], position_ids=order[None] + step + 1, past_key_values=cache)
        drafted = draft(ids[:, 1 + step : 1 + step + count], states=states, use_cache=True, **given)
        wanted = log_p[:, 1 + step : 1 + step + count]
        kl = (wanted.exp() * (wanted - F.log_softmax(drafted.logits, dim=-1))).sum(-1).mean()
        total = total + 0.8**step * kl
        states, mask = drafted.hidden_states[0], torch.cat([mask, torch.eye(count, dtype=torch.bool)], dim=1)
    return total


def trained(draft: Eagle3Draft, target: LlamaForCausalLM, texts: Tensor, steps: int, rate: float = 2e-3) -> None:
    """Train the draft in place; its embeddings stay those of the target."""
    weights = [each for name, each in draft.named_parameters() if name != "embed_tokens.weight"]
    for each in weights:
        each.requires_grad_(True)
    optimiser, began = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.01), time.perf_counter()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min((step + 1) / 20, 1 - step / steps)
        loss = loss_of(draft, target, texts[torch.arange(step * BATCH, (step + 1) * BATCH) % len(texts)])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    draft.requires_grad_(False)


def main(
    out: str = "runs/eagle3", rows: int = 1600, steps: int = 400, seed: int = 0, prompts: int = 20, tokens: int = 96
) -> None:
    torch.manual_seed(seed)
    target, model_draft, tokenizer = load_demo_pair()
    texts = texts_for(target, tokenizer, rows, seed)
    draft, config, mappings = new_draft(target, texts)
    trained(draft, target, texts, steps)

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    stored = {name: each.bfloat16() for name, each in draft.state_dict().items() if name != "embed_tokens.weight"}
    save_file(stored | mappings, folder / "model.safetensors")

    model = specbranch(target)
    settings = {"policy": "vanilla", "max_draft_length": 4, "confidence_threshold": 0.0}
    for name, used in (("embedded draft", model_draft), ("EAGLE-3", out)):
        specbranch(model, draft=used)
        drafted = accepted = passes = new = 0
        for prompt in python_prompts()[:prompts]:
            inputs = tokenizer(prompt.prompt, return_tensors="pt")
            model.generate(**inputs, max_new_tokens=tokens, do_sample=False, specbranch=settings)
            stats = model.specbranch_stats
            drafted, accepted = drafted + stats.num_draft_tokens, accepted + stats.num_accepted_tokens
            passes, new = passes + stats.target_forwards, new + stats.new_tokens
        print(f"{name}: {accepted / drafted:.1%} of the draft tokens accepted, {new / passes:.2f} tokens per pass")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/eagle3", help="folder for the draft")
    parser.add_argument("--rows", type=int, default=1600, help="texts of 128 tokens to train on")
    parser.add_argument("--steps", type=int, default=400, help="steps of 4 texts")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
