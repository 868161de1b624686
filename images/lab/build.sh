#!/bin/bash
# Builds the kernel and initramfs of the lab guest: a virtual machine whose root is this machine's
# own, read-only over 9p, under an overlay that takes all it writes; with Debian's kernel, systemd
# and, where installed, AppArmor. Nothing is copied, so a boot is the machine as packages left it.
#
#   images/lab/build.sh       builds what is missing or out of date, prints the folder
#
# Result: target/images/{vmlinux,lab-initrd}. Environment as for images/build.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(images/build.sh)
version=$(cat "$out/kernel-version")
# For the root; for what runs in it.
first="virtio_pci 9pnet_virtio 9p overlay"
later="virtio_rng virtio_net kvm_amd veth tun vhost_net nbd"
# RDMA over any network device (soft-RoCE), for programs; its checksum is found by name when it is used.
later="$later rdma_rxe ib_uverbs crc32_generic"

exec 9>"$out/.lock"; flock 9
stamp=$(cat images/lab/{build.sh,init,plain-init} "$out/stamp" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$out/lab-stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$out"/root.lab.*   # left by an interrupted run
  root=$(mktemp -d "$out/root.lab.XXXXXX")
  mkdir -p "$root"/{bin,dev,proc,sys,lower,over,new}
  cp "$(command -v busybox)" "$root/bin/busybox"
  cp images/lab/init images/lab/plain-init "$root/"; chmod 755 "$root"/{init,plain-init}
  for module in $first $later; do
    modprobe -d "$out/kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
  done | sort -u | while read -r path; do
    relative=lib/modules/${path##*/lib/modules/}
    mkdir -p "$root/$(dirname "$relative")"
    cp "$path" "$root/$relative"
    case $relative in
      *.xz) xz -d "$root/$relative" ;;
      *.zst) zstd -q -d --rm "$root/$relative" ;;
    esac
  done
  cp "$out/kernel/lib/modules/$version"/modules.{order,builtin,builtin.modinfo} "$root/lib/modules/$version/"
  depmod -b "$root" "$version"
  for module in $first; do
    modprobe -d "$root" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
  done | sed "s|^.*/lib/modules|/lib/modules|" | awk '!seen[$0]++' >"$root/modlist"
  # Not compressed: under emulation, unpacking costs more than reading.
  (cd "$root" && find . -print0 | cpio --null -o -H newc --quiet --owner 0:0) >"$out/lab-initrd.new"
  rm -rf "$root"
  mv "$out/lab-initrd.new" "$out/lab-initrd"
  echo "$stamp" >"$out/lab-stamp"
fi
echo "$out"
