#!/bin/bash
# Starts train.py with torchrun, on each machine with the same line:
#     HEAD=first-host NODES=2 PROCESSES=8 ./torchrun.sh --folder /shared/checkpoints
# If a process dies, torchrun ends the others and starts all of them again, up to three times; they go on from the
# newest checkpoint. By default: two processes on this machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# else the ranks of a new start may find the addresses of those before, in the store that torchrun shares with them
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${PROCESSES:-2}" \
    --rdzv-id "${RUN:-digits}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29400}" \
    --max-restarts 3 \
    "$here/train.py" "$@"
