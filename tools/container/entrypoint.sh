#!/usr/bin/env bash
# Runs a command with CANN's environment and the driver's libraries, both as far as there are any.
set -euo pipefail

readonly ASCEND=/usr/local/Ascend

for script in "$ASCEND"/{ascend-toolkit,cann,nnrt}/set_env.sh; do
    if [[ -r $script ]]; then
        set +u  # these scripts read what nobody has set
        # shellcheck disable=SC1090
        . "$script"
        set -u
        break
    fi
done
for directory in "$ASCEND"/driver/lib64{,/common,/driver}; do
    [[ ! -d $directory ]] || LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$directory
done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
exec "$@"
