//! What else touches guest RAM: open files of the VMM, and other processes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::cmdline::CommandLine;
use super::maps;
use super::{MemfdId, Refusal, stat_field, unreadable};

/// Looks through the VMM's open descriptors for what forbids paging.
pub(super) fn check_open_files(pid: i32) -> Result<(), Refusal> {
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    let entries = fs::read_dir(&directory).map_err(|source| unreadable(&directory, source))?;
    for entry in entries {
        let entry = entry.map_err(|source| unreadable(&directory, source))?;
        let target = unless_closed(fs::read_link(entry.path()));
        let Some(target) = target.map_err(|source| unreadable(&entry.path(), source))? else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        if is_pass_through(&target) {
            return Err(Refusal::PassThrough(target));
        }
        let info = PathBuf::from(format!("/proc/{pid}/fdinfo")).join(entry.file_name());
        if is_direct(&info, &target).map_err(|source| unreadable(&info, source))? {
            return Err(Refusal::DirectDisk(target));
        }
    }
    Ok(())
}

/// Whether a descriptor of this name belongs to a device that pins guest RAM.
fn is_pass_through(target: &str) -> bool {
    const PREFIXES: [&str; 9] = [
        "/dev/vfio/",
        "/dev/iommu",
        // QEMU migrates over RDMA by registering guest RAM, and passes SCSI commands on with their buffers in it.
        "/dev/infiniband/",
        "/dev/bsg/",
        "/dev/udmabuf",
        "/dev/vhost-vdpa",
        "/dev/vhost-scsi",
        "anon_inode:kvm-vfio",
        "anon_inode:[vfio",
    ];
    let is_generic_scsi = target
        .strip_prefix("/dev/sg")
        .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()));
    is_generic_scsi || PREFIXES.iter().any(|prefix| target.starts_with(prefix))
}

/// What was read of a descriptor, which may have been closed since, as may its process.
pub(super) fn unless_closed<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
        read => read.map(Some),
    }
}

/// Whether a descriptor of a file was opened with `O_DIRECT` (pipes have the flag too, and mean
/// something else by it).
fn is_direct(info: &Path, target: &str) -> io::Result<bool> {
    if !target.starts_with('/') {
        return Ok(false);
    }
    let info = unless_closed(fs::read_to_string(info))?.unwrap_or_default();
    Ok(info
        .lines()
        .find_map(|line| line.strip_prefix("flags:"))
        .and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok())
        .is_some_and(|flags| flags & libc::O_DIRECT as u32 != 0))
}

/// Refuses what the command line shows: also devices that come to life only later.
pub(super) fn check_devices(line: &CommandLine) -> Result<(), Refusal> {
    let mut vhost_user = Vec::new();
    for device in line.all("device") {
        let kind = device.kind();
        let passes_through = ["vfio-", "vhost-scsi", "scsi-block", "scsi-generic"];
        if passes_through.iter().any(|start| kind.starts_with(start)) {
            return Err(Refusal::PassThrough(kind.to_owned()));
        }
        if device.is_on("blob") {
            return Err(Refusal::GpuBlob(kind.to_owned()));
        }
        if kind.starts_with("vhost-user-") {
            vhost_user.push(kind.to_owned());
        }
    }
    for network in line.all("netdev") {
        match network.kind() {
            "vhost-vdpa" => return Err(Refusal::PassThrough("vhost-vdpa".into())),
            "vhost-user" => vhost_user.push("a vhost-user network interface".into()),
            _ => {}
        }
    }
    // One is ours, unless ours was hot-plugged; then the other's mapping is seen in /proc.
    let ours = vhost_user
        .iter()
        .position(|kind| kind.starts_with("vhost-user-blk"));
    if let Some(ours) = ours {
        vhost_user.remove(ours);
        if let Some(other) = vhost_user.pop() {
            return Err(Refusal::OtherMapper(format!("device {other}")));
        }
    }
    check_launch_security(line)?;
    check_nested_vmx(line)
}

fn check_launch_security(line: &CommandLine) -> Result<(), Refusal> {
    const GUARDS: [&str; 5] = [
        "sev-guest",
        "sev-snp-guest",
        "tdx-guest",
        "pef-guest",
        "s390-pv-guest",
    ];
    let guard = line
        .all("object")
        .find(|object| GUARDS.contains(&object.kind()));
    match guard {
        Some(object) => Err(Refusal::LaunchSecurity(object.kind().to_owned())),
        None => Ok(()),
    }
}

/// Nested VMX: named in the CPU's features, or passed through where the host's KVM allows it.
fn check_nested_vmx(line: &CommandLine) -> Result<(), Refusal> {
    let Some(cpu) = line.all("cpu").next() else {
        return Ok(());
    };
    let stated = cpu.get("vmx").map(|_| cpu.is_on("vmx"));
    let passed_through = matches!(cpu.kind(), "host" | "max") && host_nests_vmx();
    if line.is_under_kvm() && stated.unwrap_or(passed_through) {
        Err(Refusal::NestedVmx)
    } else {
        Ok(())
    }
}

fn host_nests_vmx() -> bool {
    fs::read_to_string("/sys/module/kvm_intel/parameters/nested")
        .is_ok_and(|nested| matches!(nested.trim(), "Y" | "1"))
}

/// How long it may take to read the memory maps of one process.
const PATIENCE: Duration = Duration::from_secs(10);

/// ... and of all processes, in so many times of that.
const PATIENCE_TIMES: u32 = 6;

/// Refuses if a process besides the VMM, this one and its pager, if that is another, maps any of the
/// memfds. A child of the latter two is none until it has executed its program: till then its mappings
/// are its parent's.
pub(super) fn check_other_mappers(
    vmm: i32,
    pager: Option<i32>,
    memfds: &[MemfdId],
) -> Result<(), Refusal> {
    static LOOK: Mutex<Option<Look>> = Mutex::new(None);
    let memfds = memfds.to_vec();
    in_time(&LOOK, PATIENCE, move |at| {
        look_for_other_mappers(vmm, pager, &memfds, at)
    })
}

/// A look at all processes that did not end in time.
struct Look {
    /// The process that it is at.
    at: Arc<AtomicI32>,
    ended: Receiver<Result<(), Refusal>>,
}

/// Looks in a thread of its own, which is left where it does not come back: one process that is stuck must not hold up
/// the guests. There is one such thread at most.
fn in_time(
    stuck: &Mutex<Option<Look>>,
    patience: Duration,
    look: impl FnOnce(&AtomicI32) -> Result<(), Refusal> + Send + 'static,
) -> Result<(), Refusal> {
    let mut stuck = stuck.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(former) = stuck.take()
        && matches!(former.ended.try_recv(), Err(TryRecvError::Empty))
    {
        let at = former.at.load(Ordering::Relaxed);
        *stuck = Some(former);
        return Err(Refusal::Stuck(at));
    }
    let at = Arc::new(AtomicI32::new(0));
    let (tell, ended) = mpsc::channel();
    let told = Arc::clone(&at);
    let work = move || {
        // Whoever asked may wait no longer.
        let _ = tell.send(look(&told));
    };
    let name = "mappers".to_owned();
    thread::Builder::new()
        .name(name)
        .spawn(work)
        .map_err(|source| unreadable(Path::new("/proc"), source))?;
    let mut process = 0;
    for _ in 0..PATIENCE_TIMES {
        if let Ok(found) = ended.recv_timeout(patience) {
            return found;
        }
        // A host with many processes takes its time.
        if std::mem::replace(&mut process, at.load(Ordering::Relaxed)) == process && process != 0 {
            break;
        }
    }
    *stuck = Some(Look { at, ended });
    Err(Refusal::Stuck(process))
}

fn look_for_other_mappers(
    vmm: i32,
    pager: Option<i32>,
    memfds: &[MemfdId],
    at: &AtomicI32,
) -> Result<(), Refusal> {
    let proc = Path::new("/proc");
    let us = std::process::id() as i32;
    let entries = fs::read_dir(proc).map_err(|source| unreadable(proc, source))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if pid == vmm || pid == us || Some(pid) == pager {
            continue;
        }
        at.store(pid, Ordering::Relaxed);
        // Processes end while we look, and kernel threads map nothing.
        let maps_any = || {
            let maps = fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
            maps::maps_any(&maps, memfds)
        };
        // In this order: what was a child of ours a moment ago may have executed its program since.
        if maps_any() && !is_about_to_execute(pid, [Some(us), pager]) && maps_any() {
            let command = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let who = format!("process {pid} ({})", command.trim());
            return Err(Refusal::OtherMapper(who));
        }
    }
    Ok(())
}

/// Whether a process was started by one of these, and still runs its parent's program.
fn is_about_to_execute(pid: i32, parents: [Option<i32>; 2]) -> bool {
    let program = |pid: i32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let Ok(parent) = stat_field(pid, 4) else {
        return false;
    };
    parents.contains(&Some(parent)) && program(pid).is_some_and(|its| program(parent) == Some(its))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    use std::sync::Arc;

    use vm_memory::{FileOffset, MmapRegion};

    use super::*;

    fn verdict(words: &[&str]) -> Result<(), Refusal> {
        let line = format!("qemu\0{}\0", words.join("\0"));
        check_devices(&CommandLine::parse(line.as_bytes()))
    }

    #[test]
    fn devices_that_pin_or_share_ram_are_refused() {
        let ours = ["-device", "vhost-user-blk-pci,chardev=c0"];
        assert!(verdict(&ours).is_ok());
        assert!(matches!(
            verdict(&["-device", r#"{"driver":"vfio-pci","host":"0000:01:00.0"}"#]),
            Err(Refusal::PassThrough(_))
        ));
        for kind in ["scsi-block", "scsi-generic"] {
            let disk = format!("{kind},drive=d0");
            let refused = verdict(&["-device", &disk]);
            assert!(matches!(refused, Err(Refusal::PassThrough(_))), "{kind}");
        }
        assert!(verdict(&["-device", "scsi-hd,drive=d0"]).is_ok());
        let two = [ours, ["-device", "vhost-user-fs-pci,chardev=c1,tag=x"]].concat();
        assert!(matches!(verdict(&two), Err(Refusal::OtherMapper(_))));
        assert!(matches!(
            verdict(&["-device", r#"{"driver":"virtio-gpu-pci","blob":true}"#]),
            Err(Refusal::GpuBlob(_))
        ));
        assert!(matches!(
            verdict(&["-object", "sev-guest,id=lsec0"]),
            Err(Refusal::LaunchSecurity(_))
        ));
        assert!(matches!(
            verdict(&["-machine", "q35,accel=kvm", "-cpu", "Skylake-Client,vmx=on"]),
            Err(Refusal::NestedVmx)
        ));
        assert!(verdict(&["-machine", "q35,accel=kvm", "-cpu", "host,vmx=off"]).is_ok());
    }

    #[test]
    fn a_process_that_is_stuck_is_named_and_holds_nobody_up() {
        let looks = Mutex::new(None);
        let (go_on, wait) = mpsc::channel::<()>();
        let (reach, reached) = mpsc::channel();
        let stuck = in_time(&looks, Duration::from_millis(10), move |at| {
            at.store(7, Ordering::Relaxed);
            reach.send(()).expect("waited for");
            // Ends once the other end is dropped.
            let _ = wait.recv();
            Ok(())
        });
        // Its thread may not have run by then.
        let is_named = matches!(stuck, Err(Refusal::Stuck(0 | 7)));
        assert!(is_named, "{stuck:?}");
        reached.recv().expect("it runs");
        let refused = in_time(&looks, PATIENCE, |_| panic!("a second thread"));
        assert!(matches!(refused, Err(Refusal::Stuck(7))), "{refused:?}");
        drop(go_on);
        while in_time(&looks, PATIENCE, |_| Ok(())).is_err() {
            thread::yield_now();
        }
        assert!(in_time(&looks, PATIENCE, |_| Err(Refusal::Locked)).is_err());
    }

    #[test]
    fn files_that_pin_ram_are_known_by_their_names() {
        for name in ["/dev/vfio/12", "/dev/sg0", "/dev/infiniband/uverbs0"] {
            assert!(is_pass_through(name), "{name}");
        }
        for name in ["/dev/sgx_vepc", "/dev/sda", "/dev/kvm", "socket:[12]"] {
            assert!(!is_pass_through(name), "{name}");
        }
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_child_that_has_not_executed_its_program_yet_is_no_mapper() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = fs::File::from(rustix::fs::memfd_create("ram", flags).expect("a memfd"));
        file.set_len(4096).expect("room");
        let id = MemfdId::of(&file).expect("it is there");
        let file = FileOffset::from_arc(Arc::new(file), 0);
        let _mapping: MmapRegion = MmapRegion::from_file(file, 4096).expect("mapped");
        let (mut reached, tell) = std::io::pipe().expect("a pipe");
        let (wait, mut go_on) = std::io::pipe().expect("a pipe");
        let mut command = Command::new("true");
        let (told, waited) = (tell.as_raw_fd(), wait.as_raw_fd());
        let stay = move || {
            let mut byte = [0u8; 1];
            // SAFETY: the descriptor stays open until the child has been waited for; the byte is ours.
            unsafe { libc::write(told, byte.as_ptr().cast(), 1) };
            // SAFETY: as above.
            unsafe { libc::read(waited, byte.as_mut_ptr().cast(), 1) };
            Ok(())
        };
        // SAFETY: what runs in the child allocates nothing, and calls nothing but write and read.
        unsafe { command.pre_exec(stay) };
        let child = std::thread::spawn(move || command.status());
        reached.read_exact(&mut [0]).expect("the child is there");
        // Neither us nor the VMM, but the child: its parent is us.
        let found = check_other_mappers(1, None, &[id]);
        // The child has this end as well: closing ours would end nothing.
        go_on.write_all(&[0]).expect("the child waits");
        assert!(child.join().expect("no panic").expect("it ran").success());
        assert!(found.is_ok(), "{found:?}");
    }
}
