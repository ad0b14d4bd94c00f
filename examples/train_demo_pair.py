"""Train the embedded demo pair: a tokenizer, a target, a good draft and a weak draft.

    python examples/train_demo_pair.py --work runs/pair                        # one GPU
    python examples/train_demo_pair.py --work runs/pair --resume               # continue where it stopped
    python examples/train_demo_pair.py --work runs/tiny --tiny                 # CPU, half a minute, no quality

Stages, each skipped by --resume if its result exists: corpus, target_base (next token), target (the same
model, trained to leave loops), draft and weak (distilled from the target), report. The results are
`target/`, `draft/` and `weak/` in bfloat16, `report.json`, `losses.json` and `loss.png`.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from demo_pair import corpus, evaluation, training
from demo_pair.training import Stage
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Recipe:
    """Everything that differs between the real run and the tiny one."""

    vocab_size: int
    context: int
    own_prompts: int  # rows of target text the drafts are distilled on
    new_tokens: int  # length of each such row after its prompt
    shapes: dict[str, dict[str, int]]
    stages: dict[str, Stage]
    max_megabytes: float = 10_000
    per_package: float = 2.2  # megabytes


def shape(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


def by_name(*stages: Stage) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages}


# Head size 32 throughout and at most 4 key-value heads, so that `hf_specbranch.bench.grow` can reach every named shape.
REAL = Recipe(
    vocab_size=4096,
    context=1024,
    own_prompts=3072,
    new_tokens=256,
    shapes={"target": shape(256, 10, 8, 4, 896), "draft": shape(128, 2, 4, 4, 384), "weak": shape(64, 1, 2, 2, 128)},
    stages=by_name(
        Stage("target_base", steps=5500, batch=64, learning_rate=3e-3),
        Stage("target", steps=1200, batch=64, learning_rate=6e-4, extra=32),
        Stage("draft", steps=2500, batch=16, learning_rate=4e-3, extra=16),
        Stage("weak", steps=900, batch=16, learning_rate=3e-3),
    ),
)
TINY = Recipe(
    vocab_size=512,
    context=64,
    own_prompts=4,
    new_tokens=16,
    shapes={"target": shape(64, 2, 2, 1, 96), "draft": shape(32, 1, 1, 1, 48), "weak": shape(32, 1, 1, 1, 32)},
    stages=by_name(
        Stage("target_base", steps=40, batch=8, learning_rate=3e-3),
        Stage("target", steps=4, batch=4, learning_rate=3e-4, extra=2),
        Stage("draft", steps=20, batch=4, learning_rate=3e-3, extra=2),
        Stage("weak", steps=5, batch=4, learning_rate=3e-3),
    ),
    max_megabytes=1.5,
)


class Run:
    """One training run: its folder, its recipe, and the data on the device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.recipe = TINY if args.tiny else REAL
        self.work, self.resume, self.seed = Path(args.work), args.resume, args.seed
        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.prompts = [json.loads(line)["prompt"] for line in Path(args.prompts).read_text().splitlines()]
        self.packages = args.packages
        self.work.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}

    def corpus(self) -> None:
        if not (self.resume and (self.work / "sources.json").exists()):
            r = self.recipe
            corpus.prepare(self.work, self.packages, r.vocab_size, r.max_megabytes, r.per_package, self.prompts)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.work / "tokenizer")
        self.tokens = self._read("train")

    def _read(self, name: str) -> Tensor:
        ids = np.fromfile(self.work / f"{name}.bin", dtype=np.uint16).astype(np.int32)  # [N]
        return torch.from_numpy(ids).to(self.device)

    def load(self, name: str) -> LlamaForCausalLM:
        """Load the model of a finished stage, its bfloat16 weights as float32."""
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(self.work / name, dtype=torch.float32)
        return model.to(self.device)

    def new_model(self, shape_name: str) -> LlamaForCausalLM:
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            **self.recipe.shapes[shape_name],
            vocab_size=self.recipe.vocab_size,
            head_dim=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return LlamaForCausalLM(config).to(self.device)

    def stage(
        self,
        name: str,
        make: Callable[[], LlamaForCausalLM],
        loss_for: Callable[[LlamaForCausalLM, Stage], training.Loss],
    ) -> LlamaForCausalLM:
        """Train one model unless its result exists, store it in bfloat16, and return what was stored."""
        if not (self.resume and (self.work / name / "config.json").exists()):
            start = time.perf_counter()
            model, stage = make(), self.recipe.stages[name]
            training.fit(stage, model, loss_for(model, stage), self.work, self.resume, save_every=1000)
            config = model.config
            model.generation_config = GenerationConfig(
                bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
            )
            model.to(torch.bfloat16).save_pretrained(self.work / name)
            shutil.copytree(self.work / "tokenizer", self.work / name, dirs_exist_ok=True)
            self.seconds[name] = round(time.perf_counter() - start, 1)
        return self.load(name)

    def next_token(self, model: LlamaForCausalLM, stage: Stage) -> training.Loss:
        loss = stage.compile(training.next_token_loss, self.device)
        length = self.recipe.context + 1
        return lambda step: loss(model, training.windows(self.tokens, stage.batch, length, self.seed + step))

    def loop_breaking(self, model: LlamaForCausalLM, stage: Stage) -> training.Loss:
        loss = stage.compile(training.loop_breaking_loss, self.device)
        newline = self.tokenizer("\n")["input_ids"][0]
        line_ends = (self.tokens == newline).nonzero().flatten().cpu()

        def loss_of(step: int) -> Tensor:
            seed = self.seed + 1_000_000 + step  # not the stretches that the base was trained on
            ids = training.windows(self.tokens, stage.batch, self.recipe.context + 1, seed)
            loops, period = training.looping_rows(self.tokens, line_ends, stage.extra, 384, seed)
            return loss(model, ids, loops, period)

        return loss_of

    def distillation(self, target: LlamaForCausalLM, own_text: Tensor) -> Callable[..., training.Loss]:
        def loss_for(model: LlamaForCausalLM, stage: Stage) -> training.Loss:
            loss = stage.compile(training.distillation_loss, self.device)

            def loss_of(step: int) -> Tensor:
                rows = [training.windows(self.tokens, stage.batch, self.recipe.context, self.seed + step)]
                if stage.extra:
                    rows.append(training.windows(own_text, stage.extra, self.recipe.context, self.seed + step))
                return loss(model, target, torch.cat(rows))

            return loss_of

        return loss_for

    def own_text(self, target: LlamaForCausalLM) -> Tensor:
        """Return greedy text of the target after parts of the corpus, concatenated. -> [N]"""
        prompts = training.windows(self.tokens, self.recipe.own_prompts, 128, self.seed + 2_000_000)
        rows = [training.continuations(target, part, self.recipe.new_tokens) for part in prompts.split(1024)]
        text = torch.cat(rows).flatten()
        return text[text != target.config.pad_token_id]

    def models(self) -> None:
        self.stage("target_base", lambda: self.new_model("target"), self.next_token)
        target = self.stage("target", lambda: self.load("target_base"), self.loop_breaking)
        distill = self.distillation(target, self.own_text(target))
        self.stage("draft", lambda: self.new_model("draft"), distill)
        self.stage("weak", lambda: self.new_model("weak"), distill)

    def report(self) -> dict[str, object]:
        """Measure the stored models and write `report.json`, `outputs.json` and `loss.png`."""
        num_bytes = json.loads((self.work / "sources.json").read_text())["heldout_bytes"]
        held_out = self._read("heldout")
        target = self.load("target")
        new_tokens = self.recipe.new_tokens
        outputs = evaluation.continuations(target, self.tokenizer, self.prompts, new_tokens)
        result: dict[str, object] = {"seconds": self.seconds, "train_tokens_in_corpus": len(self.tokens)}
        for name in ("target", "draft", "weak"):
            model = self.load(name)
            bits = evaluation.bits_per_byte(model, held_out, num_bytes, self.recipe.context)
            result[name] = {"parameters": model.num_parameters(), "bits_per_byte": round(bits, 4)}
            if name != "target":
                result[name] |= {"agreement": round(evaluation.agreement(model, outputs), 4)}
        eos = target.config.eos_token_id
        result["target_outputs"] = evaluation.describe(self.tokenizer, outputs, eos)
        texts = self.tokenizer.batch_decode(outputs.ids[:, outputs.prompt_length :], skip_special_tokens=True)
        (self.work / "outputs.json").write_text(json.dumps(texts, indent=1))
        (self.work / "report.json").write_text(json.dumps(result, indent=1))
        draw_losses(self.work)
        return result


def draw_losses(work: Path) -> None:
    """Draw the loss of every stage as `loss.png`; without matplotlib there is only `losses.json`."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed: run again with --resume where it is, to draw loss.png from losses.json")
        return
    curves = json.loads((work / "losses.json").read_text())
    figure, axes = plt.subplots(1, len(curves), figsize=(3 * len(curves), 2.6), constrained_layout=True)
    for axis, (name, points) in zip(np.atleast_1d(axes), curves.items(), strict=True):
        axis.plot(*zip(*points, strict=True), linewidth=0.8)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(work / "loss.png", dpi=80)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own_prompts = Path(__file__).parent.parent / "hf_specbranch" / "bench" / "python40.jsonl"
    parser.add_argument("--work", required=True, help="folder for data, checkpoints and results")
    parser.add_argument("--packages", nargs="*", help="folders of installed packages to read (default: this Python's)")
    parser.add_argument("--prompts", default=own_prompts, help="JSON lines to measure on; kept out of the corpus")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to check that every stage works")
    parser.add_argument("--resume", action="store_true", help="keep finished stages, continue from checkpoints")
    parser.add_argument("--corpus-only", action="store_true", help="stop when the tokens are written")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    run = Run(args)
    run.corpus()
    if args.corpus_only:
        return
    run.models()
    torch.set_float32_matmul_precision("highest")  # measure in true float32
    print(json.dumps(run.report(), indent=1))


if __name__ == "__main__":
    main()
