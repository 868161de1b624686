#!/bin/bash
# Builds the backend of an earlier commit, target/previous/COMMIT/outram-backend: guests are taken over from it
# and by it (tests/tests/pager/upgrade.rs). After a release, the commit becomes that release's.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=3c653bb
program=target/previous/$commit/outram-backend
[ -x "$program" ] && exit 0
mkdir -p "target/previous/$commit/source"
git archive "$commit" | tar -x -C "target/previous/$commit/source"
# Its dependencies are those of its own Cargo.lock; what was built of them serves a later commit too.
cargo build --quiet --locked -p outram-backend --bin outram-backend \
  --manifest-path "target/previous/$commit/source/Cargo.toml" --target-dir target/previous/build
cp target/previous/build/debug/outram-backend "$program.next"
mv "$program.next" "$program"
rm -r "target/previous/$commit/source"
