"""The verbs of `hvd-compress`: one module per verb, found by its file name, so that adding a file adds a verb.

A module here holds:

- a docstring, whose first line is the help text of the verb;
- `add_arguments(parser)`, which declares its options (`--json` is already there);
- `run(arguments) -> int`, which returns the exit status and honours `arguments.json`.

Heavy imports such as torch belong inside `run`: every start of the command imports all of these modules.
"""
