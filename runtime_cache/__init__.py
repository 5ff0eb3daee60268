"""runtime-cache: prefix-cache and inference daemon for Huawei Ascend NPUs.

The package holds the daemon, the cache, the engine and the device driver. Wire messages and
clients live in `ipc`, model conversion in `om_models`, command-line tools in `tools`.
"""

__version__ = "0.1.0"
