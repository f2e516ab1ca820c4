"""Checkpoints: their form on disk, saving in the background, and loading under any layout."""
