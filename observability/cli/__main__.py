"""`python -m observability.cli`: the same as the `kvscope` command."""

from observability.cli import main

main()
