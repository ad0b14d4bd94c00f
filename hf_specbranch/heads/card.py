"""The model card of a head, made from its config."""

from __future__ import annotations

from typing import Any

from .config import LengthHeadConfig

TAGS = ("specbranch", "speculative-decoding", "length-head")


def model_card(config: LengthHeadConfig, repo_id: str | None = None) -> str:
    """Markdown with the metadata by which the Hub finds the head.

    Args:
        config: of the head.
        repo_id: where it will live, for the snippet.
    """
    target, draft = config.target, config.draft
    header = ["---", "library_name: hf_specbranch", "tags:", *(f"- {tag}" for tag in TAGS)]
    header += ["base_model:", f"- {target.id}", f"- {draft.id}", "base_model_relation: adapter", "---"]
    body = [
        f"# Length head for {target.id} with {draft.id}",
        "Says of a draft, before the target looks at it, whether nothing of it will be accepted, some of it, or all "
        "of it, so that [SpecBranch](https://arxiv.org/abs/2506.01979) decoding rolls back less. It never changes the "
        "output: what it holds back is kept and checked later.",
        "## Use",
        _snippet(config, repo_id),
        "## The pair",
        _pair_table(config),
        f"Tokenizer vocabulary, SHA-256: `{config.tokenizer_hash or 'unknown'}`.",
        "## The head",
        f"Reads {', '.join(config.features)} ({config.input_size} numbers: the target's last {config.num_layers} "
        f"layers, the first {config.drafted_tokens} drafted tokens, {config.gamma} positions); linear layers of "
        f"{', '.join(map(str, config.layer_sizes))} and 3 with ReLU. Says 0 above {config.none_threshold} for "
        f"*none*, else 2 above {config.all_threshold} for *all*, else 1.",
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
        f"{record['lines']:,} drafted lines ({none:,} none, {some:,} some, {everything:,} all accepted) from "
        f"{prompts['number']} prompts (`{prompts['file']}`, SHA-256 `{prompts['sha256'][:16]}`) at temperatures "
        f"{', '.join(map(str, record['temperatures']))}; {record['held_out_lines']:,} lines held out by prompt.",
        "\n".join(rows),
    ]


def _measured(record: dict[str, Any] | None) -> list[str]:
    """The table of `head eval`, if it was run."""
    if not record:
        return []
    rows = ["| temperature | method | rollback rate | tokens per target pass |", "|---|---|---|---|"]
    for entry in record["runs"]:
        rollback, tokens = entry["rollback_rate"], entry["tokens_per_pass"]
        rows.append(f"| {entry['temperature']} | {entry['method']} | {rollback:.3f} | {tokens:.3f} |")
    return [
        "## Measured",
        f"{record['prompts']['number']} prompts (`{record['prompts']['file']}`) that the training never saw, "
        f"{record['max_new_tokens']} new tokens each.",
        "\n".join(rows),
    ]
