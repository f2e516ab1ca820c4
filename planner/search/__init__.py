"""Search for the fastest layout: its candidates, their prices, and the reasons for the layout that is found."""
