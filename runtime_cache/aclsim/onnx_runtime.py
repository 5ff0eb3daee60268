"""ONNX Runtime, as all of the software device imports it: without its telemetry.

Newer builds for Linux report to their vendor and leave an identifier in the home directory, or a
warning if they cannot. Nobody asked for either; who wants them sets the variable to 0. It counts
only if it is set before the import. Source: microsoft/onnxruntime, pull request 27379.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
