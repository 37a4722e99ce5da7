"""Training of an EAGLE-3 head for a target: answers of the target itself, their features, a training-time-test loop.

The stages (answers, features, training, export) each leave files behind and resume from them; docs/training.md
tells the recipe and what it measured. Nothing that serves imports this package.
"""
