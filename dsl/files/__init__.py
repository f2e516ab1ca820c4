"""The JSON form of a model, its fingerprint, the file of a model, and what differs between two models."""
