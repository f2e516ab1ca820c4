"""The best layout: the space, lower bounds, prices, and why the winner wins."""
