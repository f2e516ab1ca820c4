"""The command line: plan, explain, export and validate. Nothing here loads torch; help texts load nothing heavy."""
