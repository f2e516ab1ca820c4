"""Options of a run in groups, and what each option states about itself for all that use it."""
