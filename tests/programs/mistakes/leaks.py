"""Ends without giving anything back."""

import sys

from one_model import OneModel, check

model = OneModel(sys.argv[1])
check("execute", model.execute())
print(model.read()[0])
