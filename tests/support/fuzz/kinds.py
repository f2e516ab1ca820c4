"""The kinds of cases by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.fuzz.case import Kind
from tests.support.fuzz.command_lines import options, paths
from tests.support.fuzz.data_files import data
from tests.support.fuzz.json_files import cluster, config, plan, settings
from tests.support.fuzz.model_files import model
from tests.support.fuzz.run_files import run_file
from tests.support.fuzz.run_folders import run

KINDS: Mapping[str, Kind] = {
    "plan": plan,
    "config": config,
    "cluster": cluster,
    "settings": settings,
    "model": model,
    "options": options,
    "data": data,
    "run": run,
    "paths": paths,
    "run file": run_file,
}
