# Installs the packages in this machine's root under an overlay, and purges them: run in namespaces
# of its own, with the folder of the packages as argument. Prints what was installed, then 'LEFT:' and
# what is otherwise than before.
set -euo pipefail
debs=$1
work=$(mktemp -d)
mount -t tmpfs tmpfs "$work"
mkdir "$work"/{up,work,root}
root=$work/root
mount -t overlay overlay -o lowerdir=/,upperdir="$work/up",workdir="$work/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for folder in run tmp; do mount -t tmpfs tmpfs "$root/$folder"; done
# What an installation of its own may have here is not what is tested.
rm -rf "$root"/etc/outram "$root"/etc/libvirt/hooks/qemu.d "$root"/etc/apparmor.d/abstractions/libvirt-qemu.d/outram
[ ! -d "$root/etc/apparmor.d/local" ] || find "$root/etc/apparmor.d/local" -type f -exec sed -i "/# by 'outram setup'\$/d" {} +
cp "$debs"/*.deb "$root/tmp/"

# Every file, but for what dpkg and users' databases keep; and the sums of all settings.
list() {
  (cd "$root" && find etc usr var/lib \( -path var/lib/dpkg -o -path usr/lib/modules \) -prune -o ! -type d \
    ! -path 'etc/*-' ! -name .pwd.lock -printf '%p %l\n' | sort)
}
sums() { (cd "$root" && find etc -type f ! -path 'etc/*-' ! -name .pwd.lock -exec md5sum {} + | sort -k2); }

list >"$work/before"; sums >"$work/sums-before"
cd /
chroot "$root" dpkg -i /tmp/outram-memserver.deb /tmp/outram.deb
list | diff "$work/before" - | sed -n 's/^> //p' || true
chroot "$root" outram --version
chroot "$root" outram-memserver --version
chroot "$root" id outram-memserver
chroot "$root" sh -c 'outram doctor || true'
chroot "$root" dpkg --purge outram outram-memserver
echo "LEFT:"
list | diff "$work/before" - || true
sums | diff "$work/sums-before" - || true
ls -d "$root/etc/outram" 2>/dev/null || true
