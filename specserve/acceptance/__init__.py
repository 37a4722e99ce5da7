"""Why speculation pays or does not: measured on a user's own model, prompts and machine.

`questions` picks what is asked; `measure` asks an engine in this process (`attach`: a server), plainly and with each
drafter, and keeps one entry of `records` an answer. `figures` pools them by category, `fixed` estimates other draft
lengths, `verdict` says in words what the figures mean, `report` and `page` show them, `compare` holds two results
against each other. Only `measure` and `attach` reach out; the rest are functions of records.
"""
