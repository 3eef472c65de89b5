# shellcheck shell=bash
# Sourced by the templates and node.sh: who of a job is left, what it has come to, and what follows.
#
# They know each other by files in $PRIVATE, on storage that all nodes see: alive.batch and alive.K are
# written again while the batch script and the task of node K live (their content, since NFS shows the content
# of a file that is opened, but its times of up to a minute ago), code.K says what node K's launcher ended
# with, "interrupted" that Slurm asked to stop, and "over" that the batch script has decided.

BEAT_S=${BEAT_S:-10}    # how often files are written
LOOK_S=${LOOK_S:-1}     # and looked at
LOST_S=${LOST_S:-60}    # whose file has not been written for so long is lost
START_S=${START_S:-900} # and who has never been there; containers may be fetched first
MAX_REQUEUES=${MAX_REQUEUES:-3}

declare -A written=() since=()
looked=$SECONDS

remove_private() { # renamed first: a node that beats meanwhile would put its file back
    if mv "$PRIVATE" "$PRIVATE.over" 2>/dev/null; then rm -rf "$PRIVATE.over"; fi
}

say() { echo "$(date '+%F %T') ${TEMPLATE:-mocrun}: $*"; }

values_of() { # FLAG WORDS...: the values of a flag, a line for each
    local flag=$1 last='' word
    shift
    for word in "$@"; do
        [[ $last != "$flag" ]] || printf '%s\n' "$word"
        [[ $word != "$flag="* ]] || printf '%s\n' "${word#*=}"
        last=$word
    done
}

directory_of_recipe() { # WORDS...: CHECKPOINT_DIR of scripts/train.sh; flags of the launcher may stand before it
    local words=() last='' word
    for word in "$@"; do
        [[ $word == --* || $last == --launcher ]] || words+=("$word")
        last=$word
    done
    echo "${words[3]:-}"
}

beat() { # writes the file of NAME; each time other text
    echo "$EPOCHREALTIME" 2>/dev/null >"$PRIVATE/alive.$1"
}

keep_beating() { # writes the file of NAME while this shell lives
    trap '' TERM USR1 # Slurm signals all processes of a task
    while kill -0 $$ 2>/dev/null; do
        beat "$1"
        sleep "$BEAT_S"
    done
}

look() { # notes whose file has been written since the last look, after writing that of NAME, our own
    local file text now written_by_us=yes
    beat "$1" 2>/dev/null || written_by_us=no
    now=$SECONDS
    # storage, or this shell, stood still, or storage is full: nobody else is to blame
    [[ $written_by_us == yes ]] && ((now - looked <= LOST_S - 2 * BEAT_S)) || since=()
    looked=$now
    for file in "$PRIVATE"/alive.*; do
        text=$(cat "$file" 2>/dev/null) || continue
        file=${file##*/}
        [[ -n $text ]] || text=${written[$file]:-empty} # it is being written
        [[ ${written[$file]:-} == "$text" && -n ${since[$file]:-} ]] && continue
        written[$file]=$text since[$file]=$now
    done
}

is_gone() { # whether NAME has not written its file for too long, by this shell's own clock
    local file=alive.$1
    if [[ -n ${written[$file]:-} ]]; then
        ((SECONDS - ${since[$file]:-SECONDS} > LOST_S))
    else
        ((SECONDS > START_S))
    fi
}

all_have_ended() { # whether each node has ended, or is lost
    local node
    for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
        [[ -e $PRIVATE/code.$node ]] || is_gone "$node" || return 1
    done
}

code_of_job() { # what the launchers' codes come to; "lost" if there is none
    # Whoever lost sight of the others (75, 70), was killed (137) or has left (79) says nothing of those that went on.
    local code codes=() last
    mapfile -t codes < <(cat "$PRIVATE"/code.* 2>/dev/null)
    for code in "${codes[@]}"; do [[ $code == 0 ]] && echo 0 && return; done
    for code in "${codes[@]}"; do [[ $code != 75 && $code != 137 && $code != 70 && $code != 79 ]] && echo "$code" && return; done
    for last in 75 137 70 79; do
        for code in "${codes[@]}"; do [[ $code == "$last" ]] && echo "$code" && return; done
    done
    echo lost
}

lost_nodes() { # names of nodes that never came, or went without a word, where others did better; with commas
    local node names=() lost=()
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
        [[ -e $PRIVATE/code.$node ]] || lost+=("${names[node]:-}")
    done
    if ((${#lost[@]} == SLURM_JOB_NUM_NODES)); then # no step: only srun can tell whose fault it was
        mapfile -t lost < <(sed -nE 's/.*failed on node ([^: ]+):.*/\1/p' "$PRIVATE/srun.err" 2>/dev/null | sort -u)
    fi
    ((${#lost[@]} < SLURM_JOB_NUM_NODES)) || lost=()
    (IFS=, && echo "${lost[*]}")
}

can_do_without() { # whether Slurm has enough other nodes than so many
    local up
    up=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --states=idle,alloc,mix,comp --format=%N |
        sort -u | wc -l) && ((up - $1 >= SLURM_JOB_NUM_NODES))
}

exclude() { # NAMES: the job does not come to these nodes again, if there are enough others
    local excluded=$1 before
    local -a list
    IFS=, read -ra list <<<"$excluded"
    ((${#list[@]})) || return 0
    can_do_without ${#list[@]} || { say "$excluded would be excluded, but there are too few other nodes" && return; }
    before=$(scontrol --oneliner show job "$SLURM_JOB_ID" | sed -nE 's/.* ExcNodeList=([^ ]+).*/\1/p')
    [[ -z $before || $before == "(null)" ]] || excluded=$before,$excluded
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded" && say "excluded from now on: $excluded"
}

has_saved() { # whether a checkpoint was published since the job began this time
    local place places=()
    while read -r place; do [[ -d $place ]] && places+=("$place"); done <<<"${CHECKPOINTS:-}"
    if ((${#places[@]} == 0)); then # not in files that can be looked at
        ((SECONDS >= START_S))
        return
    fi
    [[ -n $(find "${places[@]}" -maxdepth 3 -newer "$BEGUN" \
        \( -name manifest.json -o -name latest_checkpointed_iteration.txt \) -print -quit) ]]
}

may_requeue() { # whether the job may go back to the queue; counts it
    local count state
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=
    if [[ $state != RUNNING ]]; then
        say "not requeued: Slurm says that the job is ${state:-gone}"
        return 1
    fi
    count=$(cat "$REQUEUES" 2>/dev/null || echo 0)
    has_saved && count=0
    if ((count >= MAX_REQUEUES)); then
        say "not requeued: $count times in a row nothing was saved; see why, and submit it again"
        return 1
    fi
    echo $((count + 1)) >"$REQUEUES"
}

requeue() { # puts the job back in the queue; fails if it must not, or cannot
    local lost
    may_requeue || return 1
    lost=$(lost_nodes)
    remove_private
    trap '' TERM # Slurm ends this script too, but gives it a moment (KillWait)
    scontrol requeue "$SLURM_JOB_ID" || return 1
    exclude "$lost" || say "$lost could not be excluded"
}

conclude() { # requeues the job, and ends this shell, if it is to go on; else leaves its code in $code
    local interrupted=no
    if [[ -e $PRIVATE/interrupted ]]; then
        interrupted=yes
    elif grep -q "failed on node" "$PRIVATE/srun.err" 2>/dev/null; then # srun has ended the other tasks
        interrupted="by a node on which nothing starts"
    fi
    code=$(code_of_job)
    say "training ended with $code (interrupted: $interrupted)"
    if [[ $code == 75 || $code == lost ]] || { [[ $interrupted != no ]] && ((code != 0)); }; then
        if requeue; then exit 0; fi
    else
        rm -f "$REQUEUES"
    fi
    remove_private
    [[ $code != lost ]] || code=70
}
