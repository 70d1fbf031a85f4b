#!/bin/bash
# Train a small GPT with Megatron-LM on the stream of data.yaml, or resume where it was killed.
# MEGATRON=/path/to/Megatron-LM RANKS=2 bash train.sh
set -euo pipefail
MEGATRON=${MEGATRON:?set it to a clone of https://github.com/NVIDIA/Megatron-LM}
export PYTHONPATH=$MEGATRON${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL=(
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128
  --attention-dropout 0.1 --hidden-dropout 0.1 --transformer-impl local --no-persist-layer-norm
  --tokenizer-type NullTokenizer --vocab-size 257 --bf16
)
TRAINING=(
  --micro-batch-size 4 --global-batch-size 8 --seq-length 128 --train-iters 160 --lr 0.01 --seed 1
  --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 2
)
CHECKPOINTS=(--save checkpoints --load checkpoints --save-interval 20)
DATA=(--megaresume-data data.yaml --megaresume-keep-last 3)

# `-m megaresume.run` before the script is all that megaresume needs.
exec torchrun --nproc-per-node "${RANKS:-1}" -m megaresume.run "$MEGATRON/pretrain_gpt.py" \
  "${MODEL[@]}" "${TRAINING[@]}" "${CHECKPOINTS[@]}" "${DATA[@]}"
