# In the lab guest, as its only work: install the packages, run a guest with them under AppArmor and
# systemd, restart and upgrade around it, purge. Whatever is not as it should be ends it, status 1.
# Beside it in the shared folder: the packages, the inner guest's kernel and initrd, its domain.xml,
# and 'exposures', lines of 'UNIT MOST' for 'systemd-analyze security'.
set -Eeuo pipefail
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
export SYSTEMD_PAGER= SYSTEMD_COLORS=0

step() { echo "STEP $(cut -d. -f1 /proc/uptime)s: $*"; }
fail() {
  echo "FAILED: $*"
  denials | tail -20 || true
  timeout 30 outram status || true
  # Where each thread of the guest waits, and whether the host's kernel has come to grief.
  for task in /proc/"$(pidof -s qemu-system-x86_64)"/task/*; do
    echo "$(cat "$task/comm"): $(sed -n 's/^State:[[:space:]]*//p' "$task/status")"
    head -6 "$task/stack"
  done 2>/dev/null || true
  dmesg --level=emerg,alert,crit,err | tail -10 || true
  for log in /var/log/libvirt/qemu/*.log; do echo "$log:"; tail -8 "$log" | cut -c1-300 || true; done
  journalctl --no-pager -q -n 60 -u 'outram*' -u libvirtd || true
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
is() { # WHAT FOUND EXPECTED
  [ "$2" = "$3" ] || fail "$1 is '$2', expected '$3'"
}
told() { # COMMAND…: shows what it says, which is the reason where it fails
  local status=0
  "$@" >/tmp/told 2>&1 || status=$?
  cat /tmp/told
  [ "$status" = 0 ] || fail "line ${BASH_LINENO[0]}: $*: status $status: $(tail -4 /tmp/told | tr '\n' ' ')"
}
has() { # WHAT TEXT PART
  case $2 in *"$3"*) ;; *) fail "$1 lacks '$3': $2" ;; esac
}
within() { # SECONDS COMMAND…: until it succeeds
  local deadline=$(($(cut -d. -f1 /proc/uptime) + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ "$(cut -d. -f1 /proc/uptime)" -lt "$deadline" ] || fail "in vain waited for: $*"
    sleep 1
  done
}
# Files that packages made, changed or removed, but for what dpkg and the daemons keep themselves; and
# the sums of AppArmor's, which are changed and changed back.
left() {
  (cd /over/up && find etc usr opt srv root var/lib ! -type d 2>/dev/null || true) |
    grep -Ev '^var/lib/(dpkg|systemd|apt|libvirt|dbus|polkit-1)/|^etc/(passwd|group|g?shadow|subuid|subgid)-?$|^etc/(mtab|ld.so.cache|machine-id|\.pwd\.lock)$|^etc/(apparmor.d|libvirt/(qemu|nwfilter))/|^usr/lib/modules|^lib/modules|/aux-cache$|__pycache__' | sort || true
  # Of guests that there have been, libvirt keeps the profiles.
  find /etc/apparmor.d -path /etc/apparmor.d/libvirt -prune -o -type f -exec md5sum {} + | sort -k2
}
denials() { # what AppArmor has denied to guests, their backends and libvirtd since the boot
  dmesg | grep 'apparmor="DENIED"' | grep -E 'libvirt|qemu|outram'
}
control() { sed -n "s/^$2:[[:space:]]*//p" "/proc/$1/status"; }

step "AppArmor is in force"
is "AppArmor" "$(cat /sys/module/apparmor/parameters/enabled)" Y
getent passwd outram-memserver >/dev/null && fail "a user outram-memserver is there already"
dpkg -s outram outram-memserver >/dev/null 2>&1 && fail "the packages are installed already"
left >/tmp/before
getent passwd | sort >/tmp/users-before

step "installing"
dpkg -i /share/outram-memserver.deb /share/outram.deb
is "the memory server" "$(systemctl is-enabled outram-memserver)" enabled
systemctl is-active -q outram-memserver && fail "the memory server runs without a certificate"
systemctl is-active -q outram-metrics || fail "the metrics are not served"
[ -x /etc/libvirt/hooks/qemu.d/outram ] || fail "the hook is not installed"
has "the package" "$(dpkg -L outram)" /usr/share/man/man1/outram.1.gz

step "the units, as the systemd that runs sees them"
while read -r unit most; do
  # Of a template, an instance.
  unit=${unit/@./@example.}
  systemd-analyze verify --man=no --recursive-errors=no "$unit" 2>/tmp/verified ||
    fail "systemd finds fault with $unit: $(cat /tmp/verified)"
  # Looked for in the packages: this machine's dpkg may be told to leave manual pages out.
  page=$(systemctl show -P Documentation "$unit" | tr -d '"' | sed 's/^man:\(.*\)(\(.\))$/man\2\/\1.\2.gz/')
  has "what documents $unit" "$(dpkg -L outram outram-memserver)" "/usr/share/man/$page"
  # In tenths here; with a decimal point in what it prints.
  systemd-analyze --no-pager security --threshold="${most/./}" "$unit" >/tmp/exposure ||
    fail "$unit is more exposed than $most: $(cat /tmp/exposure)"
  grep 'Overall exposure level' /tmp/exposure
done </share/exposures

step "certificates, memory server"
outram pki init
outram pki issue server memserver --address 127.0.0.1
outram pki issue client
cd /etc/outram/pki
cp ca.pem /etc/outram/memserver/
cp memserver.pem /etc/outram/memserver/server.pem
cp memserver.key /etc/outram/memserver/server.key
chgrp outram-memserver /etc/outram/memserver/server.*
chmod 640 /etc/outram/memserver/server.*
cd /share
sed -i 's/^slab-size.*//; $a slab-size = "1MiB"' /etc/outram/memserver.toml
systemctl start outram-memserver
memserver=$(systemctl show -P MainPID outram-memserver)
is "the memory server's user" "$(stat -c %U /proc/"$memserver")" outram-memserver
is "its capabilities" "$(control "$memserver" CapEff)" 0000000000000000
is "its seccomp mode" "$(control "$memserver" Seccomp)" 2

step "an RDMA device that comes after the memory server"
modprobe -a rdma_rxe crc32_generic
rdma link add rxe0 type rxe netdev lo
rdma link
ls -l /dev/infiniband
outram doctor >/tmp/doctor || true
grep -A1 -E 'RDMA|locked memory' /tmp/doctor

step "libvirt, confined"
systemctl start libvirtd
has "libvirtd's profile" "$(cat /proc/"$(systemctl show -P MainPID libvirtd)"/attr/current)" 'libvirtd (enforce)'
mkdir -p /var/lib/libvirt/images /var/log/libvirt/qemu
cp /share/vmlinux /share/initrd /var/lib/libvirt/images/
modprobe kvm_amd
chmod 666 /dev/kvm
virsh define /share/domain.xml
uuid=$(virsh domuuid lab | tr -d '\n')
told outram attach lab --local-ratio 0.4 --server 127.0.0.1
unit=outram-backend@$uuid.service

step "programs elsewhere: AppArmor lets libvirt start the hook"
mkdir -p /usr/local/bin
cp /usr/bin/outram /usr/bin/outram-backend /usr/bin/outram-libvirt-hook /usr/local/bin/
# As libvirtd would; a shell of its own profile has the same rights.
start_hook() { aa-exec -p libvirtd -- /bin/sh -c '/etc/libvirt/hooks/qemu.d/outram lab started begin - </dev/null'; }
/usr/local/bin/outram setup
is "the hook" "$(readlink /etc/libvirt/hooks/qemu.d/outram)" /usr/local/bin/outram-libvirt-hook
start_hook

step "without AppArmor's rules the start is refused, with the cure"
rules=/etc/apparmor.d/abstractions/libvirt-qemu.d/outram
mv $rules /tmp/rules
if timeout 300 virsh start lab 2>/tmp/refused; then fail "it started without the rules"; fi
cat /tmp/refused
has "the refusal" "$(cat /tmp/refused)" "outram setup"
outram doctor >/tmp/doctor || true
has "the doctor" "$(grep -A1 '^FAIL  AppArmor' /tmp/doctor)" "cure: outram setup"

step "setup by the package's program puts all in place"
/usr/bin/outram setup
cmp /tmp/rules $rules
rm /usr/local/bin/outram*
hash -r
is "the hook" "$(readlink /etc/libvirt/hooks/qemu.d/outram)" /usr/bin/outram-libvirt-hook
is "what it adds to libvirtd's profile" "$(grep -s outram /etc/apparmor.d/local/usr.sbin.libvirtd || true)" ""
start_hook
outram doctor >/tmp/doctor || true
has "the doctor" "$(grep 'AppArmor' /tmp/doctor)" "pass  AppArmor"

step "the guest starts"
told timeout 900 virsh start lab
qemu=$(cat /run/libvirt/qemu/lab.pid)
has "QEMU's profile" "$(cat /proc/"$qemu"/attr/current)" "libvirt-$uuid (enforce)"
is "QEMU's user" "$(stat -c %U /proc/"$qemu")" libvirt-qemu
is "QEMU's capabilities" "$(control "$qemu" CapEff)" 0000000000000000
is "QEMU's seccomp mode" "$(control "$qemu" Seccomp)" 2
is "its socket" "$(stat -c '%U %a' /run/outram/"$uuid"/vhost.sock)" "libvirt-qemu 600"
systemctl is-active -q "$unit" || fail "no unit of the backend"
backend=$(systemctl show -P MainPID "$unit")
has "its cgroup" "$(cat /proc/"$backend"/cgroup)" "outram.slice/"
is "its mercy of the OOM killer" "$(cat /proc/"$backend"/oom_score_adj)" -1000
is "its new privileges" "$(control "$backend" NoNewPrivs)" 1
is "its seccomp mode" "$(control "$backend" Seccomp)" 2
is "its capabilities" "$(control "$backend" CapEff)" 0000000001284023
nsenter -t "$backend" -m touch /etc/outram-was-here 2>/dev/null && fail "the backend may write to /etc"
if journalctl -q -u "$unit" | grep 'are not counted'; then fail "its sandbox keeps it from counting signals"; fi
# A backend that has no time for an answer within seconds gives one later.
shown() { outram status lab >/tmp/status; }
within 180 shown
cat /tmp/status
# Where it could not be had at first, it is tried again: after 15 seconds, then after twice as long each time.
over_rdma() { outram status lab | grep -q 'pages over RDMA (rxe0)'; }
within 900 over_rdma
checks() { grep -ac 'CHECKER' /var/log/libvirt/qemu/lab-console.log || true; }
enough() { [ "$(checks)" -ge "$1" ]; }
within 1800 enough 1

pager() { # its process, as $now
  now=$(outram status lab --json | sed -n 's/.*"backend_pid": \([0-9]*\),.*/\1/p') && [ -n "$now" ]
}
another() { pager && [ "$now" != "$1" ]; }

step "libvirtd restarts, packages are upgraded: the guest goes on, with another pager"
systemctl restart libvirtd
within 180 pager
first=$now
told dpkg -i /share/outram-memserver.deb /share/outram.deb
mv /tmp/told /tmp/upgraded
# A backend that has no time for an answer runs on. The package says so, and whoever reads it asks again.
restarts() { outram restart --all >/tmp/upgraded && grep -q 'took over from' /tmp/upgraded; }
if grep -q 'a backend runs on as it was' /tmp/upgraded; then within 400 restarts; fi
has "the upgrade" "$(cat /tmp/upgraded)" "took over from"
is "the memory server's process" "$(systemctl show -P MainPID outram-memserver)" "$memserver"
is "the supervisor's process" "$(systemctl show -P MainPID "$unit")" "$backend"
within 900 over_rdma
within 180 another "$first"
second=$now

step "all of the backend is killed: systemd starts it again"
systemctl kill --signal=KILL "$unit"
within 300 another "$second"
within 900 over_rdma
taken_over() { outram status lab | grep -q 'taken over'; }
within 180 taken_over
serving() { outram status lab | grep -q '^state: *serving$'; }
within 180 serving
backend=$(systemctl show -P MainPID "$unit")
within 180 pager
is "its seccomp mode" "$(control "$now" Seccomp)" 2
if systemctl stop "$unit" 2>/tmp/stop; then fail "systemd stopped a backend whose guest runs"; fi
has "the refusal" "$(cat /tmp/stop)" "Operation refused"
is "the domain" "$(virsh domstate lab | head -1)" running
seen=$(checks)
# One that was under way may have had the worst behind it: so two.
within 900 enough $((seen + 2))
measured() { # the backend may take too long to answer once
  exec 3<>/dev/tcp/127.0.0.1/9742
  printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
  page=$(cat <&3)
  exec 3<&-
  case $page in *"outram_up{vm=\"$uuid\",domain=\"lab\"} 1"*) ;; *) return 1 ;; esac
}
within 180 measured
stored=$(printf '%s\n' "$page" | sed -n 's/^outram_server_stored_bytes{.*} \([0-9]*\).*/\1/p')
[ "${stored:-0}" -gt 0 ] || fail "no page is at the memory server"

step "the guest ends, and all of it"
told timeout 300 virsh destroy lab
ended() { # its process is gone, and what the unit does after that is done
  [ "$(systemctl is-active "$unit" || true)" = inactive ] && [ ! -d "/proc/$backend" ]
}
within 300 ended
[ ! -e "/run/outram/$uuid" ] || fail "the run directory stays: $(ls "/run/outram/$uuid")"
grep -a CHECKER /var/log/libvirt/qemu/lab-console.log
# The last line may have been cut off by the guest's end.
wrong=$(grep -a CHECKER /var/log/libvirt/qemu/lab-console.log | sed -e '${/mismatches=[1-9]/!d}' -e '/mismatches=0/d')
is "what its checker found wrong" "$wrong" ""
told outram detach lab

step "a guest that started without AppArmor's rules is attached once they are there"
mv $rules /tmp/rules
told timeout 900 virsh start lab
if timeout 900 outram attach lab --live --local-ratio 0.5 --server 127.0.0.1 2>/tmp/refused; then
  fail "it was attached without the rules"
fi
has "the refusal" "$(cat /tmp/refused)" "outram setup"
/usr/bin/outram setup >/dev/null
told timeout 900 outram attach lab --live --local-ratio 0.5 --server 127.0.0.1
has "QEMU's profile" "$(cat /proc/"$(cat /run/libvirt/qemu/lab.pid)"/attr/current)" "libvirt-$uuid (enforce)"
within 180 serving
backend=$(systemctl show -P MainPID "$unit")
told timeout 300 virsh destroy lab
within 300 ended
if denials; then fail "AppArmor has denied something"; fi
virsh undefine lab

step "purging"
rm -r /etc/outram/pki /etc/outram/memserver   # what the operator made
dpkg --purge outram outram-memserver
left >/tmp/after
diff /tmp/before /tmp/after || fail "files were left behind"
getent passwd | sort | diff /tmp/users-before - || fail "users were left behind"
[ ! -e /etc/outram ] || fail "/etc/outram is left behind"
[ ! -e /run/outram ] || fail "/run/outram is left behind: $(ls /run/outram)"
for program in outram outram-backend outram-memserver; do
  if pidof $program >/dev/null; then fail "$program still runs"; fi
done
systemctl list-units --all --no-legend 'outram*' | grep -v 'not-found' && fail "units are left behind"
step "all of it is as it should be"
