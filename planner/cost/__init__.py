"""Cost of every graph node under a layout: seconds of kernels and collectives, bytes of memory."""
