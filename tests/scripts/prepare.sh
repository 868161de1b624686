#!/bin/bash
# Brings what build, tests and demo need, from the distribution's packages; with --lints also what 'make
# check' does. Does nothing where all of it is there; asks for root only where something is missing.
set -euo pipefail

# cmake is for rdma-mummy-sys, which finds libibverbs when a program runs; the library and its drivers
# are for tests of RDMA in the lab guest, and NBD for what pages over RDMA are compared with there.
# qemu-utils is not asked for: a newer one of backports does not go together with Debian's QEMU.
packages="qemu-system-x86 libvirt-daemon-system libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients
  libvirt-dev libclang-dev clang gcc libc6-dev pkg-config busybox-static cpio zstd kmod iproute2 xz-utils
  util-linux procps ca-certificates groff-base virtinst
  cmake rdma-core ibverbs-providers nbd-client nbd-server
  systemd systemd-sysv dbus apparmor checkpolicy semodule-utils dpkg-dev"
oldest_rust=88   # of 1.x: what Cargo.toml says

fail() { echo "prepare: $*" >&2; exit 1; }

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

rust_is_new_enough() { # a cargo and a rustc, both
  local program version
  for program in cargo rustc; do
    version=$("$program" --version 2>/dev/null | sed -n 's/^[a-z]* 1\.\([0-9]*\).*/\1/p')
    [ -n "$version" ] && [ "$version" -ge "$oldest_rust" ] || return 1
  done
}

fail_by_rust() {
  fail "rustc and cargo 1.$oldest_rust or newer are needed; there is '$(rustc --version 2>&1)', '$(cargo --version 2>&1)' (is an older one first in PATH?)"
}

if ! command -v dpkg-query >/dev/null; then
  # shellcheck disable=SC2086
  echo "prepare: warning: this is no Debian or Ubuntu, and nothing is installed; where something is missing, install the counterparts of these packages:" $packages >&2
  rust_is_new_enough || fail_by_rust
  exit 0
fi

missing=
for package in $packages; do installed "$package" || missing="$missing $package"; done
# busybox and busybox-static are two packages of one program: either will do if it is static.
rust_is_new_enough || missing="$missing rustc-web cargo-web"
if [ "${1-}" = --lints ]; then
  cargo fmt --version >/dev/null 2>&1 || missing="$missing rustfmt-web"
  cargo clippy --version >/dev/null 2>&1 || missing="$missing rust-web-clippy"
fi
[ -n "$missing" ] || exit 0

[ "$(id -u)" = 0 ] || fail "root is needed to install:$missing"
echo "prepare: installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# apt ends by itself when interrupted, which bash takes for a failure to try again after.
trap 'exit 130' INT TERM
# Another apt may be at work, as it is after a boot, or a mirror be away for a moment.
patient="-o DPkg::Lock::Timeout=600 -o Acquire::Retries=5"
insist() { # COMMAND…: some times, with pauses
  local pause
  for pause in 5 15 45; do
    "$@" >"$log" 2>&1 && return
    echo "prepare: '$*' failed ($(tail -n 1 "$log")); trying again in $pause s" >&2
    sleep "$pause"
  done
  "$@" >"$log" 2>&1
}
configure() { # what an interrupted run has left half configured; dpkg itself waits for no other
  local turn
  for turn in {1..120}; do
    LC_ALL=C dpkg --configure -a >"$log" 2>&1 && return
    grep -q 'locked by another process' "$log" || return 1
    [ "$turn" != 1 ] || echo "prepare: waiting for another dpkg to end" >&2
    sleep 5
  done
  return 1
}
configure || { cat "$log" >&2; fail "dpkg --configure -a failed"; }
# What some sources alone did not give may do, as where one of them is gone for good.
# shellcheck disable=SC2086
insist apt-get $patient -o APT::Update::Error-Mode=any update -q || apt-get $patient update -q >"$log" 2>&1 \
  || { cat "$log" >&2; fail "apt-get update failed: is the network reachable?"; }
# No daemon is to be started by an installation that only tests need.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod 755 "$policy"
  trap 'rm -f "$log" "$policy"' EXIT
fi
install_packages() {
  # shellcheck disable=SC2086
  insist apt-get $patient install -yq --no-install-recommends "$@" || { tail -n 30 "$log" >&2; fail "apt-get install failed for: $*"; }
}
# QEMU by itself first: where a newer qemu-utils of backports has to make room for it, apt finds no
# way in one step with what recommends qemu-utils.
case $missing in *" qemu-system-x86"*) install_packages qemu-system-x86 ;; esac
# shellcheck disable=SC2086
install_packages $missing
hash -r
rust_is_new_enough || fail_by_rust
