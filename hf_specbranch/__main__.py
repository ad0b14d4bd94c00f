"""`hf-specbranch`, also `python -m hf_specbranch`."""

import sys


def main() -> None:
    """Run the command. Ctrl-C ends it with one line, also while its modules are imported."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
