"""`python -m shardwright` is `shardwright`."""

from shardwright.cli import main

if __name__ == "__main__":
    main()
