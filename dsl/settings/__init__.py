"""Settings: arguments of a model's function, from the command line, from a file, or in a reference."""
