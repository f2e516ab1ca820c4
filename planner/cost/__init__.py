"""What a layout costs: seconds and bytes, of kernels, collectives, schedules and stages."""
