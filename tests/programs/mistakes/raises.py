"""Raises in the middle; what it held is told all the same."""

import sys

from one_model import OneModel

model = OneModel(sys.argv[1])
raise ValueError("of the program itself")
