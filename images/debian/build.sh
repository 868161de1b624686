#!/bin/bash
# Builds the guest that runs real programs (`bench guests`): a Debian root from the distribution's packages
# and an initrd that mounts it, with the kernel of images/build.sh.
#
#   images/debian/build.sh    builds what is missing or out of date, prints the folder
#
# Result: target/images-debian/{root.img,initrd}. The root is built again where the packages wanted, the
# Java program or this recipe change; workloads and init lie in the initrd, which takes a moment. A second
# run with nothing changed needs no network. Installs mmdebstrap where it is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=images/debian
out=$PWD/target/images-debian
kernel=$(images/build.sh)
version=$(cat "$kernel/kernel-version")
modules="virtio_pci virtio_blk ext4 crc32c_generic overlay"

fail() { echo "$here/build.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "root is needed: packages are installed in a root of their own"

mkdir -p "$out"
exec 9>"$out/.lock"; flock 9            # two makes at once build once

need_mmdebstrap() {
  command -v mmdebstrap >/dev/null && return
  echo "$here/build.sh: installing mmdebstrap" >&2
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -q && apt-get install -yq --no-install-recommends mmdebstrap; } >"$out/apt.log" 2>&1 \
    || { tail -n 30 "$out/apt.log" >&2; fail "mmdebstrap could not be installed"; }
}

# The distribution's own suites of this machine, whichever way they are configured; not those of others.
sources() {
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT) # $(ORIGIN)' 'Created-By: Packages' \
    | grep -E '# (Debian|Ubuntu)$' | sed 's/ #.*//' | sort -u
}

# How this machine's apt reaches them.
reach() {
  apt-config dump --format '%f "%v";%n' | grep -E '^Acquire::https?::.* "[^"]+";$' || true
}

build_root() {
  local work=$out/root.new option
  local -a options=()
  need_mmdebstrap
  sources >"$out/sources"
  [ -s "$out/sources" ] || fail "apt knows no suite of Debian or Ubuntu: run 'apt-get update'"
  while read -r option; do options+=(--aptopt="$option"); done < <(reach)
  rm -rf --one-file-system "$work"
  # The cluster that PostgreSQL's package would make is not wanted; Java's packages want a folder for manuals.
  # In mounts of its own, which go with it however it ends.
  unshare --mount mmdebstrap --mode=root --variant=essential --format=directory --keyring=/usr/share/keyrings \
    --include="$(grep -v '^#' $here/packages | paste -sd,)" ${options[@]+"${options[@]}"} \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
    --essential-hook='mkdir -p "$1/etc/postgresql-common" "$1/usr/share/man/man1"' \
    --essential-hook='echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.conf"' \
    --customize-hook="'$PWD/$here/furnish' \"\$1\"" \
    "$(. /etc/os-release; echo "$VERSION_CODENAME")" "$work" - <"$out/sources" >"$out/root.log" 2>&1 \
    || { tail -n 30 "$out/root.log" >&2; fail "mmdebstrap failed; all it said is in $out/root.log"; }
  # Read-only, so with no journal and hardly any room left.
  local mib; mib=$(du -sm --apparent-size "$work" | cut -f1)
  truncate -s "$((mib * 5 / 4 + 64))M" "$out/root.img.new"
  mke2fs -q -F -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d "$work" "$out/root.img.new"
  rm -rf --one-file-system "$work"
  chmod 644 "$out/root.img.new"
  mv "$out/root.img.new" "$out/root.img"
}

build_initrd() {
  local root path name module
  root=$(mktemp -d "$out/initrd.XXXXXX.new")
  mkdir -p "$root"/{bin,dev,proc,sys,modules,lower,scratch,root,outram}
  cp "$(command -v busybox)" "$root/bin/busybox"
  cp $here/init "$root/init"
  cp $here/run "$root/outram/run"
  cp -r $here/workloads $here/lib "$root/outram/"
  chmod -R a+rX "$root/outram"; chmod 755 "$root/init" "$root/outram/run" "$root"/outram/workloads/*
  for module in $modules; do
    modprobe -d "$kernel/kernel" -S "$version" --show-depends "$module" || fail "kernel $version has no module $module"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    name=$(basename "$path" | sed 's/\.ko.*$/.ko/')
    case $path in
      *.xz) xz -dc "$path" >"$root/modules/$name" ;;
      *.zst) zstd -qdc "$path" >"$root/modules/$name" ;;
      *) cp "$path" "$root/modules/$name" ;;
    esac
    echo "/modules/$name" >>"$root/modlist"
  done
  # Not compressed: under emulation, unpacking costs more than reading.
  (cd "$root" && find . -print0 | cpio --null -o -H newc --quiet --owner 0:0) >"$out/initrd.new"
  rm -rf "$root"
  mv "$out/initrd.new" "$out/initrd"
}

sum() { sha256sum | cut -d' ' -f1; }

up_to_date() { [ -e "$out/$1" ] && [ "$(cat "$out/$1.stamp" 2>/dev/null)" = "$2" ]; } # FILE STAMP

rm -rf --one-file-system "$out"/*.new   # left by an interrupted run
stamp=$( (declare -f build_root sources; cat $here/packages $here/furnish $here/*.java) | sum)
up_to_date root.img "$stamp" || { build_root; echo "$stamp" >"$out/root.img.stamp"; }
stamp=$( (cat "$kernel/stamp" $here/build.sh $here/init $here/run; cd $here && tail -n +1 workloads/* lib/*) | sum)
up_to_date initrd "$stamp" || { build_initrd; echo "$stamp" >"$out/initrd.stamp"; }
echo "$out"
