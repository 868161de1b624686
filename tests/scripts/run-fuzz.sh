#!/bin/bash
# Runs fuzz targets for a while each; the first that finds something ends it.
#
#   tests/scripts/run-fuzz.sh CARGO_FUZZ SECONDS [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo_fuzz=$1 seconds=$2
shift 2
# No sanitizer: those need a nightly compiler. What is looked for are panics and broken promises; unsafe
# code is little, and has tests of its own. libFuzzer is C++, which clang brings what it needs for.
export CXX=clang++
options=(--fuzz-dir tests/fuzz --sanitizer none --target-dir target/fuzz/build)
found() {
  tail -n 40 "target/fuzz/$1.log" >&2
  echo "fuzz: $1 found something; its input is in $2. Mend it, and put the input into tests/fuzz/seeds/$1" >&2
  exit 1
}

# By themselves, so that it is noticed where they cannot be listed.
listed=$("$cargo_fuzz" list --fuzz-dir tests/fuzz)
mapfile -t targets <<<"$listed"
[ $# = 0 ] || targets=("$@")
[ -n "${targets[0]}" ] || { echo "fuzz: there are no targets in tests/fuzz" >&2; exit 1; }
"$cargo_fuzz" build "${options[@]}"
triple=$(rustc -vV | sed -n 's/^host: //p')
# libFuzzer's main is none of Rust's, which would see to this.
trap '' PIPE
for target in "${targets[@]}"; do
  corpus=target/fuzz/corpus/$target artifacts=target/fuzz/artifacts/$target/
  mkdir -p "$corpus" "$artifacts"
  echo "fuzz: $target for $seconds s"
  "target/fuzz/build/$triple/release/$target" "$corpus" "tests/fuzz/seeds/$target" \
    -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -artifact_prefix="$artifacts" \
    >"target/fuzz/$target.log" 2>&1 || found "$target" "$artifacts"
  tail -n 1 "target/fuzz/$target.log"
done
echo "fuzz: ${#targets[@]} targets, nothing found"
