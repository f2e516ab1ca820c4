"""What a cluster is made of: devices, their presets, profiles from files."""
