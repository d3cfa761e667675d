"""`python -m blockkv`: the command line."""

from blockkv.cli import main

if __name__ == "__main__":
    main()
