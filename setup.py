"""Finds the packages: the folders with an __init__.py in these four, each under the name megaloom.<folder>."""

from setuptools import find_packages, setup

FOLDERS = ("dsl", "planner", "runtime", "examples")

setup(packages=[f"megaloom.{name}" for name in find_packages() if name.split(".")[0] in FOLDERS])
