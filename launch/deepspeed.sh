#!/usr/bin/env bash
# Train under the deepspeed launcher, and stop in time.
#
#   one node              DATA=data.yaml RUN_DIR=/shared/runs/first ./deepspeed.sh [FLAGS OF THE TRAINING ...]
#   several, by ssh       on one of them: HOSTFILE=hosts.txt ./deepspeed.sh ...    (lines such as: node1 slots=8)
#   several, without ssh  on every node: NNODES=2 NODE_RANK=0 (or 1 ...) MASTER_ADDR=node-0 ./deepspeed.sh ...
#
# TERM, USR1, INT (Ctrl-C) or HUP to this script: all ranks on all nodes save at the end of their step, and everything
# ends with status STOP_STATUS. Run the same command again to continue, also with other numbers of nodes and ranks.

# ==== settings: edit here, or set them in the environment =============================================================
RUN_DIR=${RUN_DIR:-runs/deepspeed}        # checkpoints and records; several nodes: on storage that all share
DATA=${DATA:-data.yaml}                   # what to train on
PYTHON=${PYTHON:-python}                  # the Python that megaresume is installed in
PROCS_PER_NODE=${PROCS_PER_NODE:-auto}    # ranks on a node; auto: as many as there are GPUs, 1 without
HOSTFILE=${HOSTFILE:-}                    # several nodes: their names and slots, as DeepSpeed reads them
NNODES=${NNODES:-1}                       # several nodes without HOSTFILE: how many
NODE_RANK=${NODE_RANK:-}                  # several nodes without ssh: which of them this one is, from 0
MASTER_ADDR=${MASTER_ADDR:-}              # several nodes: node 0, as the others reach it; by ssh DeepSpeed finds it
MASTER_PORT=${MASTER_PORT:-}              # several nodes: a port on node 0 that nobody else uses; default 29500
MAX_RESTARTS=${MAX_RESTARTS:-0}           # starts again after a failure, each from the last checkpoint
STOP_STATUS=${STOP_STATUS:-0}             # exit status of "stopped, to come back"; 75 tells it from "finished", which is 0

# What is trained. Flags given to this script come last, and win. Instead of the reference program, a Megatron script:
#   TRAIN=(-m megaresume.run pretrain_gpt.py --megaresume-data "$DATA" ...your flags...)
TRAIN=(
  -m megaresume.cluster.training --megaresume-data "$DATA"
  --num-layers 12 --hidden-size 768 --num-attention-heads 12
  --micro-batch-size 8 --global-batch-size 64 --train-iters 10000
  --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --lr-warmup-fraction 0.01
  --zero-stage 1 --save-interval 500
  # --bf16                                # on GPUs
)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # threads of one rank on CPUs
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # the network of the ranks (`ip addr` shows their names)
# ==== nothing below needs editing: docs/launching.md says what the driver does ========================================

"$PYTHON" -c 'import megaresume' || { echo "${0##*/}: refused: PYTHON=$PYTHON has no megaresume" >&2 && exit 2; }
exec "$PYTHON" -m megaresume.cluster.drivers deepspeed --script "$0" --run-dir "$RUN_DIR" --data "$DATA" --python "$PYTHON" \
  --procs-per-node "$PROCS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" \
  --master-port "$MASTER_PORT" --max-restarts "$MAX_RESTARTS" --stop-status "$STOP_STATUS" \
  --hostfile "$HOSTFILE" -- ::: "${TRAIN[@]}" ::: "$@"
