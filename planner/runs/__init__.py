"""Runs that exist: readers of the files that start them or that they wrote, and a second opinion on what they do."""
