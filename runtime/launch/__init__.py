"""Processes: ranks, rendezvous, errors of ranks."""
