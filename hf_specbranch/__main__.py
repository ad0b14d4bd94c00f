"""`python -m hf_specbranch`."""

from .cli import main

if __name__ == "__main__":
    main()
