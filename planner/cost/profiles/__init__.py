"""Framework profiles: how each framework runs a layout, as values with unit, kind and source."""
