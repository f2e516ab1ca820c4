"""The `megaloom` command."""
