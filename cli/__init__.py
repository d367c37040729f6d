"""The `tasuki` command: the top floor, which may use everything below it."""
