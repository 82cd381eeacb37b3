"""A Python function as the program of a run: as its source (``@task.manycpu``), or pickled (notebooks).

Source needs no other package, is the same for each call, and runs in another version of Python. A pickle also
carries closures and the values of variables.
"""
