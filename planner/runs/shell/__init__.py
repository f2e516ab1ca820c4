"""Static evaluator of shell and Slurm scripts: the commands that a script would start. It never runs anything."""

from megaloom.planner.runs.shell.read import read_script, script_of_text

__all__ = ["read_script", "script_of_text"]
