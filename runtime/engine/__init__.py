"""The engine: one rank's part of a model under a plan, its optimizer, and one optimizer step."""
