"""What `import acl` finds in a process that a program under `run` started: the same stand-in.

Each such process has a simulated host of its own, and no report.
"""

from __future__ import annotations

import sys

from runtime_cache.aclsim.module import acl_modules

sys.modules.update(acl_modules())  # the import takes what stands there in the end
