#!/usr/bin/env bash
# From text to a trained model in a few minutes, on a machine without a GPU: sets up an environment,
# trains a tokenizer, prepares a dataset, trains a small GPT with 8 experts per layer on four workers
# (PP 2 x EP 2), stops, resumes from the checkpoint, kills one of the workers, which the others survive,
# and plots the loss.
#
# Usage: ./scripts/quickstart.sh [--text PATH] [--out DIR] [--iters N] [--workers N] [--fresh]
#                                [--no-venv] [--dry-run]
#
#   --text PATH  a text file, a .jsonl file or a directory of them
#                (default: 12 MB of the Python standard library's own sources)
#   --out DIR    where everything goes (default: runs/quickstart). A run there that was interrupted is
#                continued; one that is finished or was given other options is kept, and DIR-2, DIR-3,
#                ... taken in its place
#   --iters N    iterations to train, stopping and resuming at two thirds (default: 150)
#   --workers N  training processes: 4, 8 or 16 (default: 4)
#   --fresh      remove earlier runs from DIR (and DIR-2, ...) and begin anew
#   --no-venv    use the active environment instead of .venv
#   --dry-run    print the two training commands and stop
#   --help       this text
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

text="" out=runs/quickstart iters=150 workers=4 fresh=no dry_run=no
while (($#)); do
    case $1 in
        --text | --out | --iters | --workers)
            (($# > 1)) || die "$1 needs a value; see --help."
            printf -v "${1#--}" '%s' "$2"
            shift
            ;;
        --fresh) fresh=yes ;;
        --no-venv) VENV=no ;;
        --dry-run) dry_run=yes ;;
        --help | -h) help_from_header && exit ;;
        *) die "unknown option $1; see --help." ;;
    esac
    shift
done
[[ $iters =~ ^([3-9]|[1-9][0-9]+)$ ]] || die "--iters $iters: give a whole number from 3."
[[ $workers =~ ^(4|8|16)$ ]] || die "--workers $workers: give 4, 8 or 16."
[[ -z $text || -e $text ]] || die "--text $text: there is no such file or directory."
[[ -z $text ]] || text=$(realpath "$text")
stop=$((iters * 2 / 3))

# The directory: a run is known by its marker, which holds its options, and is finished with its plot.
marker=.quickstart
options="text=$text iters=$iters workers=$workers"
is_finished() { [[ -e $1/loss.png ]]; }
out=$(realpath -m "$out")
first=$out number=1
if [[ $fresh == yes && $dry_run == no ]]; then
    for run in "$first" "$first"-[0-9]*; do
        [[ -e $run/$marker ]] && rm -rf "$run"
    done
fi
while [[ -e $out ]] && { is_finished "$out" || [[ $(cat "$out/$marker" 2>/dev/null) != "$options" ]]; }; do
    number=$((number + 1))
    out=$first-$number
done

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
)
PARALLEL_ARGS=(
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 2
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters "$iters"
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-iters $((iters / 10))
    --weight-decay 0.1
    --clip-grad 1.0
    --attention-dropout 0
    --hidden-dropout 0
)
DATA_ARGS=(
    --data-path "$out/data_text_document"
    --split "98,2,0"
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$out/tokenizer.model"
    --num-workers 0
)
LOGGING_ARGS=(
    --save "$out/checkpoints"
    --load "$out/checkpoints"
    --eval-interval "$stop"
    --eval-iters 5
    --log-interval 10
    --log-dir "$out/log"
    --tensorboard-dir "$out/tensorboard"
)
SNAPSHOT_ARGS=(
    --ckpt-policy full
    --ckpt-tier memory
    --ckpt-dir "$out/snapshots"
    --snapshot-interval 1
)
train=(
    python -m moc.launch --nproc-per-node "$workers" "$ROOT/pretrain_gpt_moe.py"
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}"
    "${LOGGING_ARGS[@]}" "${SNAPSHOT_ARGS[@]}"
)
if [[ $dry_run == yes ]]; then
    quoted "${train[@]}" --exit-interval "$stop"
    quoted "${train[@]}"
    exit
fi

python_sources() { # the standard library as JSON lines, one file a document, cut off at 12 MB
    "$PYTHON" - <<'PY'
import json, pathlib, sysconfig

library, left = pathlib.Path(sysconfig.get_paths()["stdlib"]), 12_000_000
for path in sorted(library.rglob("*.py")):
    if {"site-packages", "dist-packages", "test", "tests", "idle_test"}.isdisjoint(path.parts):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            break
        print(json.dumps({"text": text}))
PY
}
iteration_saved() { cat "$out/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }
run_training() {
    quoted "$@"
    "$@" 2>&1 | tee -a "$out/console.log"
}
kill_a_worker() { # once, after an iteration that is logged after line $2 of the console
    until tail -n "+$2" "$out/console.log" | grep -Eq "iteration +$1/"; do sleep 0.1; done
    local pid
    pid=$(sed -n 's/^mocrun: worker 2 is process //p' "$out/console.log" | tail -n 1)
    say "Killing worker 2: kill -9 $pid"
    kill -9 "$pid"
}
losses() { # at the start, where it stopped, and at the end, from the log of events
    "$PYTHON" - "$out/log/events.jsonl" "$stop" <<'PY'
import json, statistics, sys

events = map(json.loads, open(sys.argv[1]))
loss = {event["iteration"]: event["loss"] for event in events if event["type"] == "iteration"}
stop, end = int(sys.argv[2]), max(loss)
print(f"loss  {loss[1]:.3f} at iteration 1")
for at, what in (stop, "where it stopped and resumed"), (end, "the end"):
    print(f"      {statistics.mean(loss[i] for i in loss if at - 10 < i <= at):.3f} at iteration {at}, {what} (mean of 10)")
PY
}

say "1/6 Setting up"
set_up base
[[ $number == 1 ]] || echo "$first holds another run: this one goes to $out (--fresh would replace it)."
cd "$ROOT"
mkdir -p "$out"
echo "$options" >"$out/$marker"
export OMP_NUM_THREADS=1
if has_gpu && (($(nvidia-smi -L | wc -l) < workers)); then
    echo "There are fewer GPUs than workers: training on the CPU."
    export CUDA_VISIBLE_DEVICES=""
fi

say "2/6 Training a tokenizer"
corpus=$text
if [[ -z $text ]]; then
    corpus=$out/python.jsonl
    if [[ ! -e $corpus ]]; then
        python_sources >"$corpus.part"
        mv "$corpus.part" "$corpus"
    fi
fi
echo "Text: $corpus"
if [[ -e $out/tokenizer.model ]]; then
    echo "Already there: $out/tokenizer.model"
else
    "$PYTHON" tools/train_tokenizer.py --input "$corpus" --output "$out/tokenizer" --overwrite \
        --vocab-size 4096 --model-type bpe --max-bytes 4M
fi

say "3/6 Preparing the dataset"
if [[ -e $out/data_text_document.idx ]]; then
    echo "Already there: $out/data_text_document.idx"
else
    "$PYTHON" tools/preprocess_data.py --input "$corpus" --output-prefix "$out/data" --overwrite \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$out/tokenizer.model" --append-eod \
        --workers "$(nproc)"
fi

say "4/6 Training to iteration $stop, then stopping"
if (($(iteration_saved) >= stop)); then
    echo "Already there: iteration $(iteration_saved) in $out/checkpoints"
else
    run_training "${train[@]}" --exit-interval "$stop"
fi

say "5/6 Resuming from the checkpoint, to iteration $iters; a worker is killed on the way"
half=$(((stop + iters) / 2))
logged=$((half - half % 10))
if ((logged > stop)); then
    touch "$out/console.log"
    kill_a_worker "$logged" "$(($(wc -l <"$out/console.log") + 1))" &
    killer=$!
    trap 'kill "$killer" 2>/dev/null || true' EXIT
fi
run_training "${train[@]}"

say "6/6 Plotting the loss"
"$PYTHON" tools/plot_loss.py "$out/log" --output "$out/loss.png"

say "Done"
losses
cat <<TXT
log          $out/console.log and $out/log/events.jsonl
TensorBoard  $PYTHON -m tensorboard.main --logdir $out/tensorboard
loss plot    $out/loss.png
checkpoints  $out/checkpoints
TXT
