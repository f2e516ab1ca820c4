"""Framework profiles with single settings changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from megaloom.planner.cost.profiles.groups import FrameworkProfile


def changed(profile: FrameworkProfile, **groups: Mapping[str, Any]) -> FrameworkProfile:
    """Return the profile with these values in place of its own: a mapping from setting to value for each group."""
    return evolve(profile, **{name: evolve(getattr(profile, name), **values) for name, values in groups.items()})
