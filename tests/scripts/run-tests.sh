#!/bin/bash
# All tests of the workspace. Each program's own result is shown as it comes; the last line sums
# them up: 'N passed, N failed, N skipped'. Status 0 only where nothing failed.
#
#   tests/scripts/run-tests.sh [cargo test arguments]
set -uo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin
# A registry may be away for a moment.
export CARGO_NET_RETRY=${CARGO_NET_RETRY:-10}
log=target/test.log
e2e_log=target/test-e2e.log
lab_log=target/test-lab.log

give_up() { # what failed: counted, so that the closing line tells
  echo "$1"
  mkdir -p target
  echo "0 passed, 1 failed, 0 skipped" | tee target/test-summary
  exit 1
}

# The guests of the end-to-end tests, one after another, keep one processor busy, and have it before the
# other tests, which run beside them with whatever is left. Guests of KVM in lab guests want all of it:
# last and alone.
run_lanes() {
  local status
  set -m   # a process group of its own, so that all of it can be ended
  (set -o pipefail; OUTRAM_E2E=here cargo test --workspace --no-fail-fast --test e2e 2>&1 | tee "$e2e_log" | sed -u 's/^/e2e: /') &
  e2e=$!
  set +m
  trap 'kill -- "-$e2e" 2>/dev/null' EXIT
  OUTRAM_E2E=none nice -n 10 cargo test --workspace --no-fail-fast 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  wait "$e2e" || status=$?
  trap - EXIT   # its number may be another's by now
  OUTRAM_E2E=lab cargo test --workspace --no-fail-fast --test e2e 2>&1 | tee "$lab_log" || status=$?
  return "$status"
}

# Which tests failed, and the first lines of what each said, for the closing lines may be all that is kept.
tell_failures() { # logs
  grep -hE '\.\.\. FAILED' "$@" | sed 's/^/  /'
  awk '
    /^failures:$/ || /^test result: / || /^stack backtrace:$/ { tells = 0 }
    /^---- .* ----$/ { tells = 1; lines = 0 }
    tells && NF && lines++ < 12 { print "    " substr($0, 1, 600) }' "$@"
}

# In a function, so that bash has read all of it before it starts: the file may change meanwhile.
run_all() {
  tests/scripts/prepare.sh || give_up "FAILED: what the tests need could not be installed"
  mkdir -p target
  tests/scripts/clean-state.sh --stale || give_up "FAILED: leftovers of an interrupted run could not be removed"
  images/build.sh >/dev/null || give_up "FAILED: the test guest could not be built"
  # Nothing is changed and built again here, or looked at in a debugger: what that would be quicker by, or
  # show, costs more than it gives.
  [ -z "${CI:-}" ] || export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0
  # First, for it leaves its programs where this build's are to be. Without it, those tests say that
  # they are skipped.
  tests/scripts/build-previous.sh >/dev/null || echo "SKIPPED: tests of upgrades: the build before this one could not be made"
  if [ -n "${OUTRAM_TEST_UNDER_KVM:-}" ]; then
    images/lab/newest.sh >/dev/null || echo "SKIPPED: the lab guest with the newest kernel: it could not be built"
  fi
  cargo build --workspace || give_up "FAILED: the workspace does not build"
  cargo test --workspace --no-run || give_up "FAILED: the tests do not build"

  local file
  for file in "$log" "$e2e_log" "$lab_log"; do : >"$file"; done
  if [ $# != 0 ]; then
    cargo test --workspace --no-fail-fast "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
  else
    run_lanes
    status=$?
  fi

  # 'test result: ok. 3 passed; 0 failed; 1 ignored; …', one line for each program. A program that
  # ended without such a line (it did not build, or crashed) shows in cargo's status alone.
  read -r passed failed skipped < <(awk '
    /^test result: / { for (i = 1; i < NF; i++) {
      if ($(i+1) ~ /^passed/) p += $i; if ($(i+1) ~ /^failed/) f += $i; if ($(i+1) ~ /^ignored/) s += $i } }
    END { print p+0, f+0, s+0 }' "$log" "$e2e_log" "$lab_log")
  # Tests of the harness that found when they ran that they cannot pass for such.
  local unrun
  unrun=$(grep -hc '^SKIPPED TEST: ' "$log" "$e2e_log" "$lab_log" | awk '{ n += $1 } END { print n }')
  passed=$((passed - unrun)) skipped=$((skipped + unrun))
  if [ "$status" != 0 ] && [ "$failed" = 0 ]; then failed=1; fi
  if [ "$skipped" != 0 ]; then echo; echo "skipped:"; grep -hE '^SKIPPED|\.\.\. ignored' "$log" "$e2e_log" "$lab_log" | sed 's/^/  /'; fi
  if grep -q '^ONCE MORE: ' "$log" "$lab_log"; then echo; echo "run once more, for the lab guest failed by itself:"; grep -h '^ONCE MORE: ' "$log" "$lab_log" | sed 's/^ONCE MORE: /  /'; fi
  if [ "$failed" != 0 ]; then echo; echo "failed:"; tell_failures "$log" "$e2e_log" "$lab_log"; fi
  echo "$passed passed, $failed failed, $skipped skipped" | tee target/test-summary
  [ "$failed" = 0 ]
}

run_all "$@"; exit
