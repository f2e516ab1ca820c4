"""Simulation of one step: its price, and memory over time."""
