"""The `plan` command and its relatives."""
