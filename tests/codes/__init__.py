"""Tables that map each code of ``docs/reference/errors.md`` to a command line whose error has it."""
