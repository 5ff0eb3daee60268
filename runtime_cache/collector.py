"""The garbage collector of a process that serves: it is to look seldom, and at what is new only.

What is made for a step is given back by reference counts. The collector is there for the rest:
errors with their tracebacks, callbacks that know each other. With Python's own thresholds it would
look several times a step, and a fifth of the processor time would be its.
"""

from __future__ import annotations

import gc

#: So many more objects made than given back, and it looks at the youngest. An answer that is being
#: written has about 100, so thousands of them make it look a few times.
_YOUNGEST = 20_000


def settle() -> None:
    """Give back what the start left, look at what is there now never again, at the rest seldom.

    To be called once, when everything that stays has been made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, *gc.get_threshold()[1:])
