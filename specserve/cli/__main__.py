"""`python -m specserve.cli` is `specserve`."""

from specserve.cli import main

main()
