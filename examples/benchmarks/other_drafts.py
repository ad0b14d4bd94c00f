"""Time drafts that are not a model with the target's tokenizer: transformers' own decoding with them, and ours.

    python examples/benchmarks/other_drafts.py --grow 7b:68m --device cuda --dtype bfloat16

Both generate the same prompts with the same models: prompt lookup, a draft with another tokenizer, a
multi-token-prediction layer (MTP) and a DFlash block draft. The draft with another tokenizer is the pair's own, with
all its tokens renumbered. The layer and the block draft have random weights, so both accept hardly any of their tokens:
what is compared is the time of a round. "vanilla" is ours with drafts of the same length, "auto" our default. A way
that this release of transformers cannot run is shown with its error.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lab import finish, inputs_of, load, parser_for
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import MtpModel

from hf_specbranch import SpecBranchConfig
from hf_specbranch.bench.methods import Pair

WAYS = ("lookup", "tokenizer", "mtp", "dflash")
DRAFTED = 4  # tokens per round, in transformers and here; for a block draft its block size less 1


class Result(NamedTuple):
    """How fast one way to draft is."""

    way: str
    transformers: float | str  # tokens per second, or why it cannot run
    vanilla: float  # ours, with drafts of the same length
    auto: float


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="per prompt (default: %(default)s)")
    args = parser.parse_args(arguments)
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"unknown ways {', '.join(sorted(unknown))}: expected some of {', '.join(WAYS)}")
    pair = load(args)
    prompts = [inputs for _, inputs in inputs_of(args, pair)]
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for way in ways:
            results.append(measure(way, pair, prompts, args.new_tokens, Path(folder)))
            print(f"{way}: {results[-1]}", flush=True)
    finish(args, [each._asdict() for each in results], table(results))


def measure(way: str, pair: Pair, prompts: list[dict[str, Tensor]], new_tokens: int, folder: Path) -> Result:
    """Generate all prompts with transformers, then with ours."""
    own, settings = drafts_for(way, pair, folder)
    asked = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, **own}

    def speed(specbranch: Any, warm_ups: int) -> float:
        def generate(inputs: dict[str, Tensor]) -> None:
            pair.target.generate(**inputs, **asked, specbranch=specbranch)

        for inputs in prompts[:1] * warm_ups:
            generate(inputs)
        return tokens_per_second(generate, prompts, new_tokens)

    try:
        plain: float | str = speed(False, 1)
    except Exception as error:  # whatever this release of transformers fails with
        plain = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    vanilla = speed(SpecBranchConfig(confidence_threshold=0.0, **settings), 2)
    return Result(way, plain, vanilla, speed(SpecBranchConfig(), 4))


def tokens_per_second(generate: Callable[[dict[str, Tensor]], None], prompts: list[Any], new_tokens: int) -> float:
    """Generate every prompt, and return the speed over all of them."""
    synchronize = torch.cuda.synchronize if prompts[0]["input_ids"].is_cuda else lambda: None
    synchronize()
    began = time.perf_counter()
    for inputs in prompts:
        generate(inputs)
    synchronize()
    return len(prompts) * new_tokens / (time.perf_counter() - began)


def drafts_for(way: str, pair: Pair, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `generate()` is asked for, and settings of ours that draft as many tokens."""
    if way == "lookup":
        settings = {"policy": "autoregressive", "prompt_lookup_num_tokens": 10}
        return {"prompt_lookup_num_tokens": 10}, settings
    drafting = {"policy": "vanilla", "max_draft_length": DRAFTED}
    if way == "tokenizer":
        draft, tokenizer = renumbered(pair)
        draft.generation_config.update(
            num_assistant_tokens=DRAFTED, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        return {"assistant_model": draft, "tokenizer": pair.tokenizer, "assistant_tokenizer": tokenizer}, drafting
    if way == "mtp":
        write_mtp_layer(pair.target, folder)
        return {"use_mtp": True}, {"policy": "vanilla", "max_draft_length": 1}  # transformers: one token per layer
    return {"assistant_model": block_draft(pair.target), "speculation_type": "dflash"}, drafting


def renumbered(pair: Pair) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the draft and its tokenizer with every token numbered differently."""
    draft, size = copy.deepcopy(pair.draft), pair.draft.config.vocab_size + 1
    draft.resize_token_embeddings(size)  # transformers takes vocabularies of the same size for the same
    number = torch.randperm(size, generator=torch.Generator().manual_seed(0))  # by old number
    inverse = number.argsort().to(draft.device)
    with torch.no_grad():
        both = draft.get_input_embeddings().weight, draft.get_output_embeddings().weight
        for weight in both[: 1 if both[0] is both[1] else 2]:
            weight.copy_(weight[inverse])
    for config in (draft.config, draft.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(old := getattr(config, name, None), int):
                setattr(config, name, int(number[old]))
    file = json.loads(pair.tokenizer.backend_tokenizer.to_str())
    file["model"]["vocab"] = {token: int(number[old]) for token, old in file["model"]["vocab"].items()}
    for token in file["added_tokens"]:
        token["id"] = int(number[token["id"]])
    special = {name: each for name, each in pair.tokenizer.special_tokens_map.items() if isinstance(each, str)}
    return draft, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(file)), **special)


def write_mtp_layer(target: PreTrainedModel, folder: Path) -> None:
    """Give the target a checkpoint that holds a multi-token-prediction layer, which transformers loads in each call."""
    layers, names = target.config.num_hidden_layers, {"mtp_block.": "", "post_norm": "shared_head.norm"}
    target.config.num_mtp_layers = 1
    torch.manual_seed(0)
    weights = {}
    for name, value in MtpModel(target, 1).layers[0].state_dict().items():
        for theirs, stored in names.items():
            name = name.replace(theirs, stored)
        weights[f"model.layers.{layers}.{name}"] = value.detach().to("cpu", target.dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    target.config.save_pretrained(folder)
    target.config.name_or_path = str(folder)
    target._weight_conversions = getattr(target, "_weight_conversions", [])  # which loading sets in some releases
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\."]


def block_draft(target: PreTrainedModel) -> PreTrainedModel:
    """Return a DFlash draft of two layers."""
    ours = target.config
    config = MuseGlimmerAssistantConfig(
        hidden_size=ours.hidden_size, intermediate_size=ours.intermediate_size, num_hidden_layers=2,
        num_attention_heads=ours.num_attention_heads, num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.hidden_size // ours.num_attention_heads, sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"], block_size=DRAFTED + 1, mask_token_id=0,
        target_layer_ids=[ours.num_hidden_layers // 2], max_position_embeddings=ours.max_position_embeddings,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(target.device):
        draft: PreTrainedModel = MuseGlimmerAssistantModel(config)
    return draft.to(target.dtype).eval()


def table(results: list[Result]) -> list[str]:
    """Return one line per way to draft."""
    lines = [f"{'draft':<12}{'transformers':>14}{'vanilla':>10}{'auto':>10}{'x transformers':>18}   tokens/s"]
    for way, plain, vanilla, auto in results:
        ratio = plain if isinstance(plain, str) else f"{vanilla / plain:.1f}, {auto / plain:.1f}"
        shown = "-" if isinstance(plain, str) else f"{plain:.1f}"
        lines.append(f"{way:<12}{shown:>14}{vanilla:>10.1f}{auto:>10.1f}{ratio:>18}")
    return lines


if __name__ == "__main__":
    main()
