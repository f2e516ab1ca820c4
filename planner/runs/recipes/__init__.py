"""Readers of Python recipes: functions that build a configuration, evaluated statically, never imported or run."""
