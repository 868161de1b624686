#!/bin/bash
# Builds what the demo needs and runs it. PROFILE=release|dev; by default what is already built.
set -euo pipefail
cd "$(dirname "$0")/../.."
profile=${PROFILE:-}
if [ -z "$profile" ]; then
  if [ -x target/release/demo ] || [ ! -x target/debug/outram-backend ]; then profile=release; else profile=dev; fi
fi
case $profile in
  release) folder=release ;;
  dev) folder=debug ;;
  *) echo "PROFILE=$profile is not known: expected release or dev" >&2; exit 2 ;;
esac
tests/scripts/clean-state.sh --stale
images/build.sh >/dev/null
cargo build --quiet --workspace --bins --profile "$profile"
exec "target/$folder/demo" "$@"
