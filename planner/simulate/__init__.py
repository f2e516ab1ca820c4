"""Simulation of one step: pipeline schedule, end of step, memory over time."""
