"""The child process in which grammars are tried; started by `trial.Trial`, not by hand."""

from __future__ import annotations

from specserve.grammar.trial import main

if __name__ == "__main__":
    main()
