#!/bin/bash
# Builds the programs of the build before this one, which guests are upgraded from and go back to in
# tests: those of a fixed earlier commit. Whoever makes a release sets it to the release before.
#
#   tests/scripts/build-previous.sh       builds what is missing or out of date, prints the folder
#
# Result: target/previous/{outram-backend,outram-memserver,commit}.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=2f9fca69754f5ccf4d33ed53b57a40f6bb4e427f
out=$PWD/target/previous

mkdir -p "$out"
exec 9>"$out/.lock"; flock 9
if [ "$(cat "$out/commit" 2>/dev/null)" != "$commit" ]; then
  rm -rf "$out/commit" "$out/source"
  git cat-file -e "$commit^{commit}" 2>/dev/null || {
    echo "build-previous: this checkout's history does not reach back to $commit: 'git fetch --unshallow' brings it" >&2
    exit 1
  }
  mkdir "$out/source"
  git archive "$commit" | tar -x -C "$out/source"
  # With the dependencies that both builds have (of the workspace, so that these have the same features);
  # this build's programs are put in their place again by the next 'cargo build'. Only few tests run them:
  # not optimised, they are made in half of the time.
  CARGO_PROFILE_DEV_OPT_LEVEL=0 cargo build --manifest-path "$out/source/Cargo.toml" --target-dir target --locked \
    --workspace --bin outram-backend --bin outram-memserver >&2
  mv target/debug/outram-{backend,memserver} "$out/"
  rm -rf "$out/source"
  echo "$commit" >"$out/commit"
fi
echo "$out"
