"""Hardware: presets of devices and links, cluster names and files, and calibration by measurement."""
