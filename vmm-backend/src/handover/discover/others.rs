//! What else touches guest RAM: open files of the VMM, and other processes.

use std::fs;
use std::path::{Path, PathBuf};

use super::cmdline::CommandLine;
use super::maps;
use super::{MemfdId, Refusal, stat_field};

/// Looks through the VMM's open descriptors for what forbids paging.
pub(super) fn check_open_files(pid: i32) -> Result<(), Refusal> {
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    let entries = fs::read_dir(&directory).map_err(|source| unreadable(&directory, source))?;
    for entry in entries.flatten() {
        // It may have been closed since.
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        if is_pass_through(&target) {
            return Err(Refusal::PassThrough(target));
        }
        let number = entry.file_name().to_string_lossy().into_owned();
        if is_direct(pid, &number, &target) {
            return Err(Refusal::DirectDisk(target));
        }
    }
    Ok(())
}

fn unreadable(path: &Path, source: std::io::Error) -> Refusal {
    Refusal::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// Whether a descriptor of this name belongs to a device that pins guest RAM.
fn is_pass_through(target: &str) -> bool {
    const PREFIXES: [&str; 6] = [
        "/dev/vfio/",
        "/dev/iommu",
        "/dev/vhost-vdpa",
        "/dev/vhost-scsi",
        "anon_inode:kvm-vfio",
        "anon_inode:[vfio",
    ];
    PREFIXES.iter().any(|prefix| target.starts_with(prefix))
}

/// Whether a descriptor of a file was opened with `O_DIRECT` (pipes have the flag too, and mean
/// something else by it).
fn is_direct(pid: i32, number: &str, target: &str) -> bool {
    if !target.starts_with('/') {
        return false;
    }
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    info.lines()
        .find_map(|line| line.strip_prefix("flags:"))
        .and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok())
        .is_some_and(|flags| flags & libc::O_DIRECT as u32 != 0)
}

/// Refuses what the command line shows: also devices that come to life only later.
pub(super) fn check_devices(line: &CommandLine) -> Result<(), Refusal> {
    let mut vhost_user = Vec::new();
    for device in line.all("device") {
        let kind = device.kind();
        if kind.starts_with("vfio-") || kind.starts_with("vhost-scsi") {
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

/// Refuses if a process besides the VMM, this one and its pager, if that is another, maps any of the
/// memfds. A child of the latter two is none until it has executed its program: till then its mappings
/// are its parent's.
pub(super) fn check_other_mappers(
    vmm: i32,
    pager: Option<i32>,
    memfds: &[MemfdId],
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
