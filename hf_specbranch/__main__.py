"""`python -m hf_specbranch`."""

from hf_specbranch.cli import main

if __name__ == "__main__":
    main()
