"""Calibration on logs: a few factors of a cluster, fitted to measured runs, with leave-one-out errors."""
