# What all batch scripts here share: the environment, and a job that takes itself up again.
#
# What differs between clusters is said in site.sh beside this file, if there is one: modules, the
# Python environment, NCCL's interface (docs/slurm.md).

# Slurm's notice: USR1 before the time limit (--signal) or a preemption. Noted from the first line
# on, however long modules take to load.
told=
trap 'told=1' USR1 TERM

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ ! -x "$folder/../.venv/bin/python" ] || PATH=$(cd "$folder/../.venv/bin" && pwd):$PATH
[ ! -r "$folder/site.sh" ] || source "$folder/site.sh"

export KFAC_STATE_FILE=$PWD/$SLURM_JOB_NAME-$SLURM_JOB_ID.state
rm -f "$KFAC_STATE_FILE" # an earlier start's: were this one to die, it would not say so
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # which srun no longer takes from sbatch
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}

# SLURM_JOB_ID alone can mean the whole array.
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job_id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
else job_id=$SLURM_JOB_ID; fi

# train OVERRIDE...: kfac-train, one rank a task; of an array, each with the seed of its number.
train() {
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" "seed=$SLURM_ARRAY_TASK_ID"
  step python -m kfac_bench "$@"
}

# step COMMAND...: on all tasks, to the job's end. If Slurm gives notice, the ranks get it too and
# save; then the run's state, not an exit code (which is srun's or torchrun's), says whether the
# job goes back into the queue. Where a cluster's preemption sends TERM, to the ranks alone, the
# state is all there is. Ranks have a minute to follow the first that is through, or died.
step() {
  local step code state=none
  srun --kill-on-bad-exit=0 --wait=60 "$@" &
  step=$!
  trap 'told=1; kill -USR1 "$step" 2>/dev/null' USR1
  [ -z "$told" ] || kill -USR1 "$step" 2>/dev/null
  while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done # a trap ends wait
  [ ! -r "$KFAC_STATE_FILE" ] || read -r state _ <"$KFAC_STATE_FILE"
  case $state in
    reached | finished) rm -f "$KFAC_STATE_FILE"; exit 0 ;;
    failed) exit "$code" ;;
    interrupted) told=1 ;;
  esac
  [ -z "$told" ] || requeue
  exit "$code"
}

requeue() {
  # Somebody who cancels the job sends TERM too, and means it.
  [ "$(squeue --noheader --jobs "$job_id" --states all --format %T)" = RUNNING ] || return
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${KFAC_MAX_REQUEUES:-100}" ]; then
    echo "slurm: requeued ${SLURM_RESTART_COUNT} times already (KFAC_MAX_REQUEUES): that is enough"
  else
    echo "slurm: the run is interrupted; the job goes back into the queue"
    scontrol requeue "$job_id" && exit 0
  fi
}
