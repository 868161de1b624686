#!/bin/bash
# What 'make test' does for a minute, for hours: the simulation with seeds that nobody has run before,
# and a backend that is killed again and again. Ends with plain words; where something was found,
# with the command that finds it again.
#
#   OUTRAM_SOAK_SECONDS=7200    of simulation, in three worlds at once
#   OUTRAM_SOAK_KILLS=1000
set -uo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin
seconds=${OUTRAM_SOAK_SECONDS:-7200}
export OUTRAM_SOAK_KILLS=${OUTRAM_SOAK_KILLS:-1000}
export OUTRAM_KILL_SEED=${OUTRAM_KILL_SEED:-$(date +%s)}
log=target/soak.log

give_up() { echo "soak: $1"; exit 1; }

tests/scripts/prepare.sh || give_up "what the tests need could not be installed"
mkdir -p target
: > "$log"
cargo build --workspace || give_up "the workspace does not build"

status=0
try() { # COMMAND…, which runs tests: that it found none by the name it was given is no success
  "$@" 2>&1 | tee "$log.part" || status=1
  cat "$log.part" >>"$log"
  if ! grep -Eq '^test result: .* [1-9][0-9]* (passed|failed);|^SKIPPED' "$log.part"; then
    echo "soak: no test was run by: $*" | tee -a "$log"
    status=1
  fi
  rm -f "$log.part"
}
echo "soak: $OUTRAM_SOAK_KILLS kills of a backend"
try cargo test --workspace --test pager -- a_backend_killed_again_and_again
echo "soak: $seconds s of simulation"
export OUTRAM_SIM_SECONDS=$seconds
try cargo test --workspace --test simulation -- --nocapture invariants_hold

echo
if [ "$status" = 0 ] && ! grep -q '^SKIPPED' "$log"; then
  echo "soak: all is well: $OUTRAM_SOAK_KILLS kills and $seconds s of simulation"
  grep -E 'kills; from|all is well$' "$log"
elif [ "$status" = 0 ]; then
  echo "soak: the simulation went well; the kills could not run here:"
  grep '^SKIPPED' "$log"
else
  echo "soak: something was found; see $log"
  grep -E '^run it again|panicked at|FAILED$|no test was run' "$log"
fi
exit "$status"
