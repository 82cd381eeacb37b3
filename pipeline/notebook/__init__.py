"""A function of a notebook as the program of a run: what travels, how it is launched, what the cell shows."""
