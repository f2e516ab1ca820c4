"""The command line: plan, explain, export and compare. Nothing here loads torch; help texts load nothing heavy."""
