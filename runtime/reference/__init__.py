"""Plain-torch evaluation of layer bodies: the oracle."""
