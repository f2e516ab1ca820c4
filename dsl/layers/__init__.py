"""The layers that models are declared with."""
