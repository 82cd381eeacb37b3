"""The images of a run: what they contain, how they are built, and where they are pushed."""
