"""Does what is right and slow: a run that keeps all other threads of the program waiting."""

import sys

from one_model import OneModel, check

model = OneModel(sys.argv[1])
check("execute", model.execute())
model.close()
