"""Readers of settings files: YAML with Megatron's names, torchtitan's TOML, and settings on a command line."""

from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.primus_command import primus_command
from megaloom.planner.runs.settings.read import settings_command, settings_text

__all__ = ["SettingsRun", "primus_command", "settings_command", "settings_text"]
