"""Programs that read an export with the target's own code, as the target does before it trains.

Each is run by a Python that has the target's packages, without ours: `python STARTER FOLDER EXPORT…`. It prints a line
for each export: its file, `started` or `refused`, and the reason.
"""
