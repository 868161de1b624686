#!/bin/bash
# Removes what interrupted runs of tests and demo may have left behind. Namespaces, mounts and files
# vanish with their processes; so there are processes (by the ids that they recorded), empty
# cgroups and half-built images to remove.
#
#   tests/scripts/clean-state.sh           all runs, living ones are ended
#   tests/scripts/clean-state.sh --stale   only what no living run owns
set -euo pipefail
cd "$(dirname "$0")/../.."
records=target/sandboxes   # one file a run: PID, its content: start time in ticks since boot

start_time() { sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
alive() { [ -n "$2" ] && [ "$(start_time "$1")" = "$2" ]; } # PID START_TIME

if [ -d "$records" ]; then
  for record in "$records"/*; do
    [ -e "$record" ] || continue
    pid=$(basename "$record")
    started=$(cat "$record" 2>/dev/null || true)   # its owner may be removing it just now
    if alive "$pid" "$started"; then
      [ "${1:-}" = --stale ] && continue
      echo "ending the run of process $pid"
      kill -TERM "$pid" 2>/dev/null || true
      for _ in 1 2 3 4 5 6 7 8 9 10; do alive "$pid" "$started" || break; sleep 0.3; done
      if alive "$pid" "$started"; then kill -KILL "$pid" 2>/dev/null || true; sleep 0.5; fi
    fi
    rm -f "$record"
  done
fi

for group in /sys/fs/cgroup/outram-test-* /sys/fs/cgroup/*/outram-test-*; do
  [ -d "$group" ] || continue
  [ -e "$records/${group##*-}" ] && continue
  rmdir "$group" 2>/dev/null || echo "clean-state: $group is still in use" >&2
done
# Left where building the guest's image was interrupted; a build that runs holds the lock.
for images in target/images target/images-newest; do
  if ! [ -d $images ] || ! flock -n $images/.lock true; then continue; fi
  rm -rf $images/root.* $images/fetch.* $images/*.new
done
# That one's root is kept, and is called root.img.
if [ -d target/images-debian ] && flock -n target/images-debian/.lock true; then
  rm -rf --one-file-system target/images-debian/*.new
fi

# Swap of a benchmark that was killed; one that runs holds the lock.
if [ -e target/bench/lock ] && flock -n target/bench/lock true; then
  swaps=$(awk '{ print $1 }' /proc/swaps)
  for left in target/bench/swap-* target/bench/zram-*; do
    [ -e "$left" ] || continue
    number=${left##*/zram-}
    case $left in */zram-*) device=/dev/zram$number ;; *) device=$left ;; esac
    # As the kernel writes it: in full, and without blanks.
    path=$(realpath "$device") path=${path// /\\040}
    if grep -Fqx -- "$path" <<<"$swaps"; then swapoff "$device"; fi
    case $left in */zram-*)
      if [ -e "/sys/block/zram$number/reset" ]; then
        echo 1 >"/sys/block/zram$number/reset"
        echo "$number" >/sys/class/zram-control/hot_remove
      fi ;;
    esac
    rm -f "$left"
  done
fi
