"""Publish to the Hub: the `custom_generate` repository, and length heads named by their pair.

python examples/publish_to_hub.py --namespace your-name --head my-head-folder
python examples/publish_to_hub.py --namespace your-name --head my-head-folder --upload

Without `--upload` nothing is sent: it lists what would be, file by file. Log in first (`hf auth login`).
"""

import argparse
import os
import tempfile
from pathlib import Path

from huggingface_hub import HfApi

from hf_specbranch import LengthHead
from hf_specbranch.heads.config import DEMO_PAIR
from hf_specbranch.heads.files import CARD, model_card
from hf_specbranch.heads.hub import repository_name

CUSTOM_GENERATE = Path(__file__).parent / "custom_generate"
TRAINED = Path(__file__).parent / "heads"  # of pairs that are not embedded


def repositories(namespace: str, heads: list[Path], work: Path) -> dict[str, Path]:
    """Return the folder of each repository, by its id."""
    found = {f"{namespace}/specbranch": work / "specbranch"}
    for path in CUSTOM_GENERATE.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".md", ".txt"):
            copy = found[f"{namespace}/specbranch"] / path.relative_to(CUSTOM_GENERATE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text().replace("org/specbranch", f"{namespace}/specbranch"))
    for folder in heads:
        head = LengthHead.from_pretrained(folder)
        if not head.config.acts:
            raise SystemExit(f"{folder}: this head never decides anything, it is not published")
        repo_id = f"{namespace}/{repository_name(head.config)}"
        found[repo_id] = head.save_pretrained(work / repo_id.split("/")[1])
        (found[repo_id] / CARD).write_text(model_card(head.config, repo_id))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", required=True, help="user or organisation on the Hub")
    parser.add_argument("--head", type=Path, action="append", default=[], help="folder of a head; may be repeated")
    parser.add_argument("--no-own-heads", action="store_true", help="leave out the heads that come with the project")
    parser.add_argument("--private", action="store_true", help="make new repositories private")
    parser.add_argument("--upload", action="store_true", help="really do it")
    args = parser.parse_args(argv)
    own = [DEMO_PAIR / "weak_head", *sorted(TRAINED.iterdir())]
    heads = ([] if args.no_own_heads else own) + args.head
    with tempfile.TemporaryDirectory() as work:
        for repo_id, folder in repositories(args.namespace, heads, Path(work)).items():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            print(f"{repo_id}: {sum(path.stat().st_size for path in files):,} bytes")
            for path in files:
                print(f"  {path.relative_to(folder)}")
            if args.upload:
                api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="hf_specbranch")
                api.create_repo(repo_id, private=args.private, exist_ok=True)
                print(f"  {api.upload_folder(repo_id=repo_id, folder_path=folder).commit_url}")
    if not args.upload:
        print("nothing was sent: add --upload")


if __name__ == "__main__":
    main()
