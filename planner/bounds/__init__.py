"""Lower bounds of step time and memory, each stated as a theorem; the proofs are in docs/concepts/bounds.md."""
