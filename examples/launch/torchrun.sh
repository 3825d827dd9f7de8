#!/bin/bash
# Starts train.py with torchrun, on each machine with the same line:
#     HEAD=first-host NODES=2 PROCESSES=8 ./torchrun.sh --folder /shared/checkpoints
# If a process dies, torchrun ends the others and starts all of them again, up to three times; they go on from the
# newest checkpoint. By default: two processes on this machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec torchrun \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${PROCESSES:-2}" \
    --rdzv-id "${RUN:-digits}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29400}" \
    --max-restarts 3 \
    "$here/train.py" "$@"
