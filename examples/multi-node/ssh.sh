#!/bin/bash
# Train a build on several hosts over ssh: copy it, start torchrun on each, end all when one fails or on Ctrl-C.
#   HOSTS="node1 node2" RANKS=2 bash examples/multi-node/ssh.sh build --steps 1000
# RANKS is the number of ranks on each host; hosts x RANKS is the --world that the build was compiled for. Every host
# has the same versions of Python, torch and splitc; PYTHON is the interpreter there.
# `splitc run build --hosts node1:2,node2:2` does the same, and shows an error once.

BUILD=$1
shift
read -ra HOSTS <<< "$HOSTS"
RANKS=${RANKS:-2}
PYTHON=${PYTHON:-python3}
MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]#*@}}
MASTER_PORT=${MASTER_PORT:-29500}
FOLDER=splitc-builds/$(basename "$(realpath "$BUILD")")

for host in "${HOSTS[@]}"; do
  tar -C "$BUILD" -cf - . | ssh "$host" "rm -rf $FOLDER && mkdir -p $FOLDER && tar -C $FOLDER -xf -" || exit 1
done

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT # each ssh -tt takes its torchrun along
for k in "${!HOSTS[@]}"; do
  ssh -tt "${HOSTS[k]}" "$PYTHON -m torch.distributed.run --nnodes ${#HOSTS[@]} --node-rank $k \
    --nproc-per-node $RANKS --master-addr $MASTER_ADDR --master-port $MASTER_PORT \
    $FOLDER/launch.py $(printf '%q ' "$@")" < /dev/null &
done
for _ in "${HOSTS[@]}"; do
  wait -n || exit 1
done
