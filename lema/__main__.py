"""`python -m lema` is the `lema` command."""

from lema.cli import main

if __name__ == "__main__":
    main()
