#!/usr/bin/env bash
# From tokens to text and back to transformers: make a small Hugging Face Llama with a tokenizer of its own, train it
# under TP2 PP2, stop, resume under DP4, evaluate, generate, export, and compare logits with those of transformers.
#
#     examples/scripts/finetune.sh [FOLDER]     # some minutes on 2 CPU cores; FOLDER must not exist
#
# On two GPUs, with 1.2 B parameters:
#
#     DEVICES=2 FIRST="--tp 2" SECOND="--dp 2" LAYERS=16 EMBED=2048 HEADS=32 VOCAB=32768 SEQ=2048 examples/scripts/finetune.sh
set -euo pipefail

OUT=${1:-finetune}
SOURCE=${SOURCE:-stdlib}                        # text: the standard library, a file, or a folder
VOCAB=${VOCAB:-2048} LAYERS=${LAYERS:-4} EMBED=${EMBED:-128} HEADS=${HEADS:-4} SEQ=${SEQ:-128}
DEVICES=${DEVICES:-4} FIRST=${FIRST---tp 2 --pp 2} SECOND=${SECOND---dp 4}
STEPS=${STEPS:-60} STOP=${STOP:-20}             # steps in all; the first part stops after STOP
SPLIT=${SPLIT:-90,5,5}                          # of the documents: training, validation, test
PYTHON=${PYTHON:-python}
MEGALOOM=${MEGALOOM:-megaloom}

[ ! -e "$OUT" ] || { echo "finetune.sh: $OUT exists; give a new folder" >&2; exit 2; }
say() { echo; echo "== $*"; }

say "tokenize $SOURCE with a tokenizer of $VOCAB tokens that is trained on it"
mkdir -p "$OUT"
$MEGALOOM data "$SOURCE" -o "$OUT/text" --train-vocab "$VOCAB"

say "make a Llama of random weights with that tokenizer"
"$PYTHON" -m megaloom.examples.scripts.small_llama "$OUT/llama" --tokenizer "$OUT/text-tokenizer" \
    --vocab "$VOCAB" --layers "$LAYERS" --embed "$EMBED" --heads "$HEADS"

train=($MEGALOOM train "$OUT/llama" --from "$OUT/llama" --data "$OUT/text" --split "$SPLIT" --out "$OUT/run"
    --devices "$DEVICES" --steps "$STEPS" --seq "$SEQ" --batch 16 --warmup 5 --evaluate-every "$STEPS")

say "train under $FIRST, and stop after step $STOP"
"${train[@]}" $FIRST > "$OUT/first.log" 2>&1 &
pid=$!
while kill -0 $pid 2> /dev/null && ! grep -qs "\"step\": $STOP," "$OUT/run/metrics.jsonl"; do sleep 0.1; done
kill -USR1 $pid 2> /dev/null || true            # save and stop, as a scheduler asks for before it takes the machine
code=0; wait $pid || code=$?
[ $code -eq 138 ] || { cat "$OUT/first.log"; echo "finetune.sh: training did not stop at the signal ($code)" >&2; exit 1; }
tail -n 3 "$OUT/first.log"

say "resume under $SECOND"
"${train[@]}" $SECOND

say "evaluate on the part of the text that was held out for tests"
$MEGALOOM evaluate "$OUT/run" --data "$OUT/text" --split "$SPLIT" --part test

say "generate"
$MEGALOOM generate "$OUT/run" --prompt "def " --max-new-tokens 24

say "write the run as a Hugging Face folder, and compare its logits in transformers with those of the run"
$MEGALOOM convert "$OUT/run" --to hf -o "$OUT/exported"
"$PYTHON" -m megaloom.examples.scripts.compare_logits "$OUT/run" "$OUT/exported"
