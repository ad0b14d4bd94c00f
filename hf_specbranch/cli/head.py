"""`hf-specbranch head`: train, measure, share and find length heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.plots import save_rollback
from ..bench.prompts import python_prompts, read_prompts
from ..heads.config import FEATURES, ModelIdentity
from ..heads.train_settings import TrainSettings
from . import options
from .command import Command
from .printing import note

if TYPE_CHECKING:
    from ..heads.network import Reading

app = typer.Typer(
    help="Length heads: collect, train, eval, push, search.\n\nExample: hf-specbranch head eval --head head",
    no_args_is_help=True,
)


@app.command(cls=Command)
@options.with_model_options()
def collect(
    given: options.ModelOptions,
    prompts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt each.")],
    out: Annotated[Path, typer.Option(help="Folder for the recorded drafts; an unfinished one is continued.")],
    max_draft_length: Annotated[int, typer.Option(min=1, help="Most tokens drafted at once (gamma).")] = 8,
    confidence_threshold: Annotated[float, typer.Option(min=0, max=1, help="Confidence threshold (epsilon).")] = 0.4,
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,0.8",
    max_new_tokens: options.MaxNewTokens = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 16,
    max_samples: Annotated[int, typer.Option(min=1, help="Stop at this many drafts; bounds the disk use.")] = 20_000,
    layers: Annotated[int, typer.Option(min=1, help="K: how many of the target's last layers to keep.")] = 4,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Run a pair on prompts and record which draft tokens are accepted.

    Example: hf-specbranch head collect --draft weak --prompts humaneval.jsonl --out drafts
    """
    texts = read_prompts(prompts)
    options.check_folder_out("--out", out)
    given.check()
    from ..heads.collect import collect as run_collect
    from ..heads.dataset import CollectSettings

    settings = CollectSettings(
        gamma=max_draft_length,
        confidence_threshold=confidence_threshold,
        temperatures=_numbers(temperatures),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        max_samples=max_samples,
        num_layers=layers,
        seed=seed,
    )
    manifest = run_collect(*given.open_pair(), texts, prompts, out, settings, progress=not as_json)
    summary = {"out": str(out), "samples": manifest.samples, "shards": len(manifest.shards)}
    print(json.dumps(summary) if as_json else f"{manifest.samples:,} drafts in {len(manifest.shards)} shards in {out}")


@app.command(cls=Command)
@options.with_model_options(leave_out=("draft", "draft_revision"))
def train(
    given: options.ModelOptions,
    data: Annotated[list[Path], typer.Option(help="Folder that `head collect` wrote; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
    texts: Annotated[
        Path | None, typer.Option(help="Prompts that the target continues first, to learn what its state expects.")
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the target generates after each text.")] = 48,
    features: Annotated[str, typer.Option(help="Comma-separated; see docs/heads.md.")] = ",".join(FEATURES),
    match_size: Annotated[
        int, typer.Option(min=0, help="0: the target's features are direct inputs.")
    ] = TrainSettings.match_size,
    query_size: Annotated[int, typer.Option(min=1, help="Width of the matching layer.")] = TrainSettings.query_size,
    layer_sizes: Annotated[str, typer.Option(help="Widths of the hidden layers.")] = "256,64",
    dropout: Annotated[float, typer.Option(min=0, max=1, help="During training.")] = TrainSettings.dropout,
    epochs: Annotated[int, typer.Option(min=1, help="Most epochs.")] = TrainSettings.epochs,
    held_out: Annotated[float, typer.Option(min=0, max=1, help="Fraction of the prompts.")] = TrainSettings.held_out,
    max_token_loss: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of tokens per pass to give up for less rollback.")
    ] = TrainSettings.max_token_loss,
    aim: Annotated[str, typer.Option(help="Thresholds for the least rollback, or the most tokens.")] = "rollback",
    pictures: Annotated[bool, typer.Option(help="Save the learning curve and the confusion matrix.")] = True,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Train a head on recorded drafts.

    Example: hf-specbranch head train --data drafts --texts prompts.jsonl --out head
    """
    settings = TrainSettings(
        features=tuple(features.split(",")),
        match_size=match_size,
        query_size=query_size,
        layer_sizes=tuple(int(size) for size in layer_sizes.split(",")),
        dropout=dropout,
        epochs=epochs,
        held_out=held_out,
        max_token_loss=max_token_loss,
        aim=aim,
        seed=seed,
    )
    options.check_folder_out("--out", out)
    from ..heads.metrics import best_epoch, check_pictures, save_pictures
    from ..heads.train import train as run_train

    if pictures:
        check_pictures()
    device, dtype = given.place()
    reading = None if texts is None else _read(texts, text_tokens, given, data[0], seed)
    fitted = run_train(data, settings, device, progress=not as_json, reading=reading)
    fitted.head.save_pretrained(out)
    if pictures:
        save_pictures(fitted.history, fitted.confusion, fitted.report["macro_f1"]["head"], out)
    report, config = fitted.report, fitted.head.config
    if not config.acts:
        note(
            f"warning: this head never decides anything: on the {report['held_out_lines']:,} held-out drafts no "
            f"thresholds roll back less without losing tokens. Record more prompts, or train with another --aim"
        )
    if as_json:
        print(json.dumps({"out": str(out), **report}))
        return
    f1 = report["macro_f1"]
    print(f"{report['lines']:,} drafts, {report['held_out_lines']:,} held out by prompt, {report['epochs']} epochs")
    best = best_epoch(fitted.history)
    before = fitted.history[best - 1]["held_out_macro_f1"]
    print(f"macro-F1 on held-out prompts: head {f1['head']:.3f}, best threshold on confidence {f1['confidence']:.3f}")
    if round(before, 4) != f1["head"]:
        print(
            f"the curve shows {before:.3f} at epoch {best}, which the head is of: before its class offsets were fitted"
        )
    print(f"predicts none above {config.none_threshold}, all above {config.all_threshold}; saved in {out}")


@app.command(name="eval", cls=Command)
@options.with_model_options()
def evaluate_head(
    given: options.ModelOptions,
    head: Annotated[str, typer.Option(help='Folder or repository id of the head, or "embedded".')],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts that the head was not trained on. Default: our own 40.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,0.8",
    max_new_tokens: options.MaxNewTokens = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 40,
    png: Annotated[Path | None, typer.Option(help="Draw rollback and tokens per pass by policy.")] = None,
    into_card: Annotated[bool, typer.Option(help="Write the table into the head's config and card.")] = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Measure a head on unseen prompts: its predictions, and their effect on rollback and tokens per pass.

    Example: hf-specbranch head eval --head head --draft weak
    """
    options.check_picture(png)
    given.check()
    if into_card and head == "embedded":
        raise ValueError("--into-card with --head embedded: the head of the package is not changed")
    from ..heads import LengthHead
    from ..heads.evaluate import EvalSettings, eval_table, evaluate

    device, _ = given.place()
    embedded = head == "embedded"
    loaded = (
        options.head_from(head, given.target, given.draft, device) if embedded else LengthHead.from_pretrained(head)
    )
    texts = read_prompts(prompts) if prompts is not None else python_prompts()
    settings = EvalSettings(_numbers(temperatures), max_new_tokens, batch_size, seed=seed)
    result = evaluate(
        loaded.to(device), *given.open_pair(), texts, prompts or Path("python40.jsonl"), settings, progress=not as_json
    )
    if into_card:
        loaded.config = replace(loaded.config, training={**loaded.config.training, "measured": result})
        loaded.save_pretrained(head)
    if png is not None:
        save_rollback(result, png)
    print(json.dumps(result) if as_json else eval_table(result))


@app.command(cls=Command)
def push(
    head: Annotated[str, typer.Option(help="Folder of the head.")],
    repo: Annotated[str, typer.Option(help="Repository id to upload to; created if missing.")],
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
) -> None:
    """Upload a head with its model card to the Hub.

    Example: hf-specbranch head push --head head --repo me/my-head
    """
    from ..heads import LengthHead

    print(LengthHead.from_pretrained(head).push_to_hub(repo, private=private, revision=revision))


@app.command(cls=Command)
def search(
    target: Annotated[str, typer.Option(help="Repository id of the target.")],
    draft: Annotated[str | None, typer.Option(help="Repository id of the draft.")] = None,
    as_json: options.Json = False,
) -> None:
    """Look on the Hub for heads made for a pair, the best match first.

    Example: hf-specbranch head search --target org/large --draft org/small
    """
    from ..heads.hub import search as search_hub

    found = search_hub(target, draft)
    if as_json:
        print(json.dumps([head.__dict__ for head in found]))
        return
    if not found:
        print(f"no length head for {target} on the Hub; train one with `hf-specbranch head collect` and `head train`")
    for head in found:
        match = "for this draft" if head.for_draft else "for another draft" if draft else ""
        print(f"{head.repo_id}  {head.downloads} downloads, {head.likes} likes  {match}")


def _read(texts: Path, new_tokens: int, given: options.ModelOptions, data: Path, seed: int) -> Reading:
    """Let the target that the drafts were recorded with continue these texts."""
    from ..heads.dataset import Manifest, read_texts

    beginnings, manifest = [prompt.prompt for prompt in read_prompts(texts)], Manifest.read(data)
    model, _, tokenizer = replace(given, draft=given.target).open_pair()  # the draft is not needed
    if differing := manifest.target.different_shape(ModelIdentity.of(model), "target"):
        raise ValueError(f"--target is not the model that {data} was recorded with ({'; '.join(differing)}): name it")
    known = manifest.settings
    return read_texts(model, tokenizer, beginnings, known.num_layers, known.drafted_tokens, new_tokens, seed=seed)


def _numbers(given: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"--temperatures {given}: expected numbers with commas between them, e.g. 0,0.8") from None
    if any(number < 0 for number in numbers):
        raise ValueError(f"--temperatures {given}: expected 0 (greedy) or more")
    return numbers
