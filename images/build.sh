#!/bin/bash
# Builds the guest that tests and demo boot, from distribution packages alone: Debian's kernel, an
# initramfs of busybox, the virtio modules and our memory checker.
#
#   images/build.sh        builds what is missing or out of date, prints the folder
#
# Result: target/images/{vmlinux,vmlinuz,initrd,kernel-version}. A second run with nothing changed needs no
# network. OUTRAM_KERNEL_PACKAGE names another kernel package than the distribution's current one;
# 'newest' is the one of the highest version that is offered. OUTRAM_IMAGES names another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUTRAM_IMAGES:-$PWD/target/images}
modules="virtio_pci virtio_blk virtio_net virtio_balloon virtio_console virtio_mem crc32c_generic ext4"

fail() { echo "images/build.sh: $*" >&2; exit 1; }
need() { command -v "$1" >/dev/null || fail "'$1' is missing: install the package $2"; }
need busybox busybox-static; need cpio cpio; need depmod kmod; need dpkg-deb dpkg

mkdir -p "$out"
exec 9>"$out/.lock"; flock 9            # two makes at once build once

# The package that is current when first built stays until clean-state or a change of the recipe.
resolve_kernel() {
  local found wanted=${OUTRAM_KERNEL_PACKAGE:-}
  if [ -n "$wanted" ] && [ "$wanted" != newest ]; then echo "$wanted"; return; fi
  if [ -s "$out/kernel-package" ]; then cat "$out/kernel-package"; return; fi
  if [ "$wanted" = newest ]; then
    # Not the flavours (cloud, rt), nor packages that only lead to others.
    found=$(apt-cache pkgnames linux-image- | grep -E '^linux-image-[0-9]+\.[0-9]+[^-]*(-[0-9]+)?-amd64$' \
      | grep -vE '^linux-image-[0-9]+\.[0-9]+-amd64$' | sort -V | tail -1)
    [ -n "$found" ] || fail "apt-cache knows no linux-image-…-amd64: run 'apt-get update'"
    echo "$found"; return
  fi
  found=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: *\(linux-image-[0-9].*\)/\1/p' | head -1)
  [ -n "$found" ] || fail "apt-cache knows no linux-image-amd64: run 'apt-get update', or name a package in OUTRAM_KERNEL_PACKAGE"
  echo "$found"
}

fetch_kernel() { # $package -> target/images/kernel/ unpacked
  [ -e "$out/kernel/.$package" ] && return
  local work try; work=$(mktemp -d "$out/fetch.XXXXXX")
  for try in 1 2 3; do
    ( cd "$work" && chmod 755 . && apt-get -o Acquire::Retries=5 -o APT::Sandbox::User=root download -q "$package" >&2 ) && break
    [ "$try" != 3 ] || { rm -rf "$work"; fail "apt-get could not download $package: is the network reachable?"; }
    # A newer one may be there instead, of which apt has not heard.
    apt-get -o Acquire::Retries=5 update -q >&2 || sleep 10
    rm -f "$out/kernel-package" "$work"/*
    package=$(resolve_kernel)
  done
  rm -rf "$out/kernel"; mkdir -p "$out/kernel"
  # Since Debian 13, modules are packed below usr/lib.
  mkdir -p "$out/kernel/usr/lib"; ln -s usr/lib "$out/kernel/lib"
  dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$out/kernel" --wildcards './boot' './*lib/modules'
  rm -rf "$work"
  : >"$out/kernel/.$package"
}

build_checker() { # a static program: the guest has no libraries
  RUSTFLAGS="-C target-feature=+crt-static -C strip=symbols" cargo build --quiet --release -p outram-checker \
    --target x86_64-unknown-linux-gnu --target-dir target/guest
}

# Uncompressed: the processor would be emulated that unpacks it, which takes three times as long as all
# the rest of a boot. QEMU boots an ELF file that way (PVH).
unpack_kernel() { # BZIMAGE -> vmlinux on standard output; the header is that of the x86 boot protocol
  local image=$1 start length
  word() { od -An -t "u$2" -j "$1" -N "$2" "$image" | tr -d ' '; }
  start=$((($(word $((0x1f1)) 1) + 1) * 512 + $(word $((0x248)) 4)))
  length=$(word $((0x24c)) 4)
  payload() { head -c "$((start + length - $1))" "$image" | tail -c "$((length - $1))"; }
  # Of xz and zstd, the kernel's build adds the unpacked size, of 4 bytes.
  case $(word "$start" 2) in
    14333) payload 4 | xz -dc ;;
    46376) payload 4 | zstd -dc ;;
    35615) payload 0 | gzip -dc ;;
    *) fail "$image is compressed in a way that is not known here" ;;
  esac
}

copy_modules() { # VERSION ROOT: the modules wanted and what they need, in loading order in ROOT/modlist
  local version=$1 root=$2 module path
  [ -e "$out/kernel/lib/modules/$version/modules.dep.bin" ] || depmod -b "$out/kernel" "$version"
  for module in $modules; do
    modprobe -d "$out/kernel" -S "$version" --show-depends "$module" \
      || fail "kernel $version has no module $module"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    local name; name=$(basename "$path")
    case $name in
      *.ko.xz) xz -dc "$path" >"$root/modules/${name%.xz}" ;;
      *.ko.zst) zstd -qdc "$path" >"$root/modules/${name%.zst}" ;;
      *) cp "$path" "$root/modules/$name" ;;
    esac
    echo "/modules/${name%.[xz]*}" | sed 's/\.ko.*$/.ko/' >>"$root/modlist"
  done
}

build_initrd() { # VERSION
  local root; root=$(mktemp -d "$out/root.XXXXXX")
  mkdir -p "$root"/{bin,dev,proc,sys,modules}
  cp "$(command -v busybox)" "$root/bin/busybox"
  cp target/guest/x86_64-unknown-linux-gnu/release/outram-checker "$root/bin/checker"
  cp images/init "$root/init"; chmod 755 "$root/init"
  copy_modules "$1" "$root"
  # Not compressed: under emulation, unpacking costs more than reading.
  (cd "$root" && find . -print0 | cpio --null -o -H newc --quiet --owner 0:0) >"$out/initrd.new"
  rm -rf "$root"
}

package=$(resolve_kernel)
build_checker
stamp=$(cat images/build.sh images/init target/guest/x86_64-unknown-linux-gnu/release/outram-checker "$(command -v busybox)" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$out/stamp" 2>/dev/null)" != "$package $stamp" ]; then
  rm -rf "$out"/root.* "$out"/fetch.*   # left by an interrupted run
  fetch_kernel
  version=$(ls "$out/kernel/lib/modules")
  build_initrd "$version"
  cp "$out/kernel/boot/vmlinuz-$version" "$out/vmlinuz.new"
  mv "$out/vmlinuz.new" "$out/vmlinuz"
  unpack_kernel "$out/vmlinuz" >"$out/vmlinux.new"
  mv "$out/vmlinux.new" "$out/vmlinux"; mv "$out/initrd.new" "$out/initrd"
  echo "$version" >"$out/kernel-version"; echo "$package" >"$out/kernel-package"
  echo "$package $stamp" >"$out/stamp"
fi
echo "$out"
