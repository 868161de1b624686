//! What a pager gives up before it talks to anybody: every capability (but, where the host limits locked
//! memory, that of locking more), every program but itself, every path but its own state and what
//! it has to read, all ways to reach into other processes, and to call on those that trust whoever is root:
//! libvirtd and others by their sockets. What takes more than that its supervisor does for it
//! ([`crate::handover::powers`]), which reads some of the guest's directory: a pager changes nothing there but
//! which sockets there are.
//!
//! To be called while the process has one thread: all of it holds for a thread and what it starts.

#![cfg_attr(test, allow(unsafe_code))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, PathFdError, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::process::{DumpableBehavior, Resource, getrlimit, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

/// Read: names of servers are resolved, the host's settings looked at.
const READABLE: &[&str] = &[
    "/etc",
    "/usr",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/run/NetworkManager",
];

/// Devices that are used.
const DEVICES: &[&str] = &[
    "/dev/userfaultfd",
    "/dev/null",
    "/dev/urandom",
    "/dev/infiniband",
];

/// Ways into other processes and into the kernel, and out of this program. Everything a pager does is
/// among what is left.
const FORBIDDEN: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_mount_setattr,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_io_uring_setup,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    // Of datagrams it could be sent anywhere.
    libc::SYS_socketpair,
    // Landlock knows nothing of a file's owner, mode and attributes.
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_chown,
    libc::SYS_fchown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
];

/// `__X32_SYSCALL_BIT`, arch/x86/include/uapi/asm/unistd.h: the same calls under other numbers, where the kernel has
/// that ABI. The architecture is the same, so that a list of numbers has to leave these out by itself.
const X32_CALLS: u32 = 0x4000_0000;

/// What is allowed with this process in its first argument: an abort is a signal to itself, and the
/// device copies to and from its mappings of guest RAM by these calls.
const SELF_ALONE: &[libc::c_long] = &[
    libc::SYS_tgkill,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
];

/// Gives up what a pager does not need: of paths it keeps `state`, the sockets of its own directory `dir`, and may
/// read `readable` beside what every program reads. It makes no further sockets of the machine's own.
pub(super) fn confine(readable: &[PathBuf], dir: &Path, state: &Path) -> anyhow::Result<()> {
    rustix::thread::set_no_new_privs(true).context("giving up new privileges")?;
    // What is in its memory, the guest's keys among it, is for no core dump and no other process of root's.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("becoming undumpable")?;
    if !confine_paths(readable, dir, state).context("giving up paths (landlock)")? {
        tracing::warn!(
            "the kernel has no landlock (5.13, and 'landlock' among its lsm=): this process may open root's files"
        );
    }
    // Memory stays locked: where the host did not lift the limit of it, that takes a capability.
    let is_unlimited = getrlimit(Resource::Memlock).current.is_none();
    let held = rustix::thread::capabilities(None).context("looking at capabilities")?;
    let kept = match is_unlimited {
        true => CapabilitySet::empty(),
        false => held.permitted & CapabilitySet::IPC_LOCK,
    };
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).context("giving up capabilities")?;
    seccompiler::apply_filter(&filter().context("making the seccomp filter")?)
        .context("installing the seccomp filter")
}

/// Returns whether the kernel can.
fn confine_paths(readable: &[PathBuf], dir: &Path, state: &Path) -> anyhow::Result<bool> {
    let abi = ABI::V3;
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .scope(Scope::Signal)?
        .create()?;
    let read = READABLE.iter().map(PathBuf::from);
    let mut read = read.chain(readable.iter().cloned());
    let rules = read.try_fold(rules, |rules, path| {
        allow(rules, &path, AccessFs::from_read(abi) & !AccessFs::Execute)
    })?;
    let devices = AccessFs::ReadFile | AccessFs::WriteFile;
    let rules = DEVICES
        .iter()
        .try_fold(rules, |rules, path| allow(rules, Path::new(path), devices))?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let remove = AccessFs::RemoveFile | AccessFs::RemoveDir;
    let rules = allow(rules, dir, read | remove | AccessFs::MakeSock)?;
    let rules = allow(
        rules,
        state,
        read | remove | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::MakeReg,
    )?;
    let status = rules.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Allows what lies beneath a path, if it is there.
fn allow(
    rules: RulesetCreated,
    path: &Path,
    access: impl Into<landlock::BitFlags<AccessFs>>,
) -> anyhow::Result<RulesetCreated> {
    match PathFd::new(path) {
        Ok(beneath) => Ok(rules.add_rule(PathBeneath::new(beneath, access))?),
        Err(PathFdError::OpenCall { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            Ok(rules)
        }
        Err(error) => Err(error).context("a path that may be used"),
    }
}

fn filter() -> anyhow::Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        FORBIDDEN.iter().map(|&call| (call, Vec::new())).collect();
    for &call in SELF_ALONE {
        let other = SeccompCondition::new(
            0,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Ne,
            u64::from(std::process::id()),
        )?;
        rules.insert(call, vec![SeccompRule::new(vec![other])?]);
    }
    let of_this_machine = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        libc::AF_UNIX as u64,
    )?;
    rules.insert(
        libc::SYS_socket,
        vec![SeccompRule::new(vec![of_this_machine])?],
    );
    let forbid = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, forbid, TargetArch::x86_64)?;
    let mut program = without_x32();
    // Jumps are relative, and each of its parts loads what it looks at.
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

/// The beginning of a filter, which goes on with what follows unless the call is one of x32.
fn without_x32() -> BpfProgram {
    let step = |code: u32, k: u32, jt: u8, jf: u8| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let number = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, number, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, X32_CALLS, 0, 1),
        step(libc::BPF_RET | libc::BPF_K, refused, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use rustix::process::{
        Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
    };

    use super::*;

    /// Set where this program runs as the attacker: the victim's process, and a folder with 'own' and
    /// 'other' in it.
    const VICTIM: &str = "OUTRAM_TEST_VICTIM";
    const FOLDER: &str = "OUTRAM_TEST_FOLDER";

    struct Victim(Child);

    impl Drop for Victim {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A pager in the hands of a guest or a server reaches no other guest: not its pager, which is
    /// root's as well, and not its state. (QEMUs are other users', so that less is needed there.)
    #[test]
    fn a_confined_process_reaches_nobody_else() {
        if !rustix::process::geteuid().is_root() {
            return crate::skip_test("not root");
        }
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["own", "own/state", "other"] {
            let path = folder.path().join(name);
            fs::create_dir(&path).expect("made");
            fs::write(path.join("key"), name).expect("written");
        }
        let _daemon = UnixListener::bind(folder.path().join("other/sock")).expect("bound");
        let victim = Command::new("sleep")
            .arg("600")
            .stdin(Stdio::piped())
            .spawn();
        let mut victim = Victim(victim.expect("sleep"));
        let attacker = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "daemon::confinement::tests::attacker",
                "--nocapture",
            ])
            .env(VICTIM, victim.0.id().to_string())
            .env(FOLDER, folder.path())
            .output()
            .expect("this program runs");
        let said = String::from_utf8_lossy(&attacker.stdout).into_owned();
        let errors = String::from_utf8_lossy(&attacker.stderr).into_owned();
        assert!(attacker.status.success(), "{said}\n{errors}");
        assert!(said.contains("attacked in vain"), "{said}\n{errors}");
        assert!(
            victim.0.try_wait().expect("ours").is_none(),
            "it was killed"
        );
        let other = fs::read_to_string(folder.path().join("other/key"));
        assert_eq!(other.expect("there"), "other");
    }

    /// What the test above runs; by itself it has nothing to do.
    #[test]
    fn attacker() {
        let (Ok(victim), Ok(folder)) = (std::env::var(VICTIM), std::env::var(FOLDER)) else {
            return;
        };
        let folder = PathBuf::from(folder);
        let pid: i32 = victim.parse().expect("a number");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let allowed_everything = || attacks(pid, &folder);
        // All of it succeeds before: else its failure would prove nothing. (But for the last few, which
        // would end the victim or this program.)
        for (what, done) in allowed_everything() {
            assert!(done, "{what} fails for root anyway");
        }
        let door = UnixListener::bind(folder.join("own/sock.new")).expect("bound");
        let (own, state) = (folder.join("own"), folder.join("own/state"));
        confine(&[], &own, &state).expect("confined");
        for (what, done) in allowed_everything() {
            assert!(!done, "it could {what}");
        }
        let process = Pid::from_raw(pid).expect("a process");
        assert!(
            kill_process(process, Signal::KILL).is_err(),
            "it could kill"
        );
        assert!(
            Command::new("/bin/true").status().is_err(),
            "it could run programs"
        );
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: a call with null pointers and flags, which touches no memory of ours.
        let mounted = unsafe { libc::mount(none, none, none, 0, std::ptr::null()) };
        let why = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((mounted, why), (-1, Some(libc::EPERM)), "it could mount");
        let x32 = i64::from(X32_CALLS) | libc::SYS_getpid;
        // SAFETY: a call without arguments.
        let called = unsafe { libc::syscall(x32) };
        let why = std::io::Error::last_os_error().raw_os_error();
        let refused = (-1, Some(libc::EPERM));
        assert_eq!((called, why), refused, "it could call by x32 numbers");
        // What it lives from.
        let (mut read, written) = ([0u8; 1], [7u8; 1]);
        let [local, remote] =
            [read.as_mut_ptr(), written.as_ptr().cast_mut()].map(|start| libc::iovec {
                iov_base: start.cast(),
                iov_len: 1,
            });
        let us = std::process::id() as i32;
        // SAFETY: both vectors are live bytes of ours.
        let copied =
            unsafe { libc::process_vm_readv(us, &raw const local, 1, &raw const remote, 1, 0) };
        assert_eq!((copied, read), (1, written), "its own memory");
        for name in ["key", "another"] {
            fs::write(state.join(name), "mine").expect("its own state");
            assert_eq!(fs::read(state.join(name)).expect("its own"), b"mine");
        }
        fs::rename(state.join("another"), state.join("key")).expect("as records are written");
        fs::rename(own.join("sock.new"), own.join("sock")).expect("its own socket");
        drop(door);
        fs::remove_file(own.join("sock")).expect("its own socket");
        assert_eq!(fs::read(own.join("key")).expect("its own"), b"own");
        File::open("/etc/passwd").expect("what everybody reads");
        TcpStream::connect(listener.local_addr().expect("bound")).expect("the network");
        let status = fs::read_to_string("/proc/thread-self/status").expect("its own");
        let capabilities = status.lines().find_map(|line| line.strip_prefix("CapPrm:"));
        let capabilities = u64::from_str_radix(capabilities.expect("told").trim(), 16);
        let kept = CapabilitySet::IPC_LOCK.bits();
        assert_eq!(capabilities.expect("a number") & !kept, 0, "{status}");
        assert!(status.contains("Seccomp:\t2"), "{status}");
        println!("attacked in vain");
    }

    /// What is tried, and whether it can be done.
    fn attacks(pid: i32, folder: &Path) -> Vec<(&'static str, bool)> {
        let process = Pid::from_raw(pid).expect("a process");
        let of_victim = |name: &str| File::open(format!("/proc/{pid}/{name}"));
        let fetched = || {
            let pidfd = pidfd_open(process, PidfdFlags::empty())?;
            pidfd_getfd(pidfd.as_fd(), 0, PidfdGetfdFlags::empty())
        };
        let mut byte = [0u8; 1];
        let text = of_victim("maps").map(std::io::read_to_string);
        let text = text.and_then(|text| text).unwrap_or_default();
        let address = text.split('-').next().unwrap_or_default();
        let address = usize::from_str_radix(address, 16).unwrap_or(0x1000);
        let local = libc::iovec {
            iov_base: byte.as_mut_ptr().cast(),
            iov_len: 1,
        };
        let remote = libc::iovec {
            iov_base: address as *mut libc::c_void,
            iov_len: 1,
        };
        // SAFETY: both vectors are live; the local one is one byte of ours.
        let read =
            unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        vec![
            ("read another's memory map", !text.is_empty()),
            ("open another's memory", of_victim("mem").is_ok()),
            ("open another's files", of_victim("fd/0").is_ok()),
            ("take another's descriptor", fetched().is_ok()),
            ("read another's memory", read == 1),
            (
                "read another's state",
                File::open(folder.join("other/key")).is_ok(),
            ),
            (
                "write another's state",
                File::options()
                    .write(true)
                    .open(folder.join("other/key"))
                    .is_ok(),
            ),
            (
                "write elsewhere",
                fs::write(folder.join("else"), "x").is_ok(),
            ),
            (
                "write what its supervisor reads",
                fs::write(folder.join("own/key"), "own").is_ok(),
            ),
            (
                "leave what its supervisor would read",
                fs::write(folder.join("own/arguments"), "run").is_ok(),
            ),
            (
                "point elsewhere",
                symlink("../../other/key", folder.join("own/state/link"))
                    .and_then(|()| fs::remove_file(folder.join("own/state/link")))
                    .is_ok(),
            ),
            (
                "open others' files to all",
                fs::set_permissions(folder.join("other/key"), fs::Permissions::from_mode(0o600))
                    .is_ok(),
            ),
            (
                "call on another's socket",
                UnixStream::connect(folder.join("other/sock")).is_ok(),
            ),
            ("make a pair of sockets", UnixDatagram::pair().is_ok()),
        ]
    }
}
