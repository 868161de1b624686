//! Point 8: what is refused, each with a message that names the reason and the cure; and that no
//! mistake of ours keeps an unrelated domain from starting.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use outram_tests::hermetic::command::{Finished, run};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::{IMAGES, virsh, virsh_ok};
use outram_tests::hermetic::suite::Skipped;
use outram_wire::control::Status;

use crate::backend_dies::{end, wait_for_another};
use crate::fixture::{Lab, RAM_MIB, SHORT};
use crate::{Test, readme};

pub(crate) const TESTS: &[Test] = &[
    ("attach_refuses_what_cannot_be_paged", domains),
    ("commands_refuse_bad_arguments", arguments),
    ("settings_that_no_start_takes_are_not_persisted", persisted),
    ("start_refuses_with_our_reason", starts),
    ("shared_memory_thp_is_refused", thp),
    ("unrelated_domains_start_whatever_is_broken", unrelated),
    ("a_domain_edited_by_hand_starts", by_hand),
    ("detach_restores_the_domain", detach),
];

const MEMFD_SHARED: &str = "<source type='memfd'/><access mode='shared'/>";

/// Elements of a domain that must be refused, and words of the reason.
struct Refused {
    elements: String,
    devices: &'static str,
    reason: &'static str,
}

fn backing(inner: &str) -> String {
    format!("<memoryBacking>{inner}</memoryBacking>")
}

fn refused_domains() -> Vec<Refused> {
    let with_backing = |inner: &str, reason| Refused {
        elements: backing(inner),
        devices: "",
        reason,
    };
    let with_device = |devices, reason| Refused {
        elements: backing(MEMFD_SHARED),
        devices,
        reason,
    };
    vec![
        with_backing(
            "<source type='memfd'/><access mode='private'/>",
            "access mode='shared'",
        ),
        with_backing(
            &format!("{MEMFD_SHARED}<allocation mode='immediate'/>"),
            "allocation",
        ),
        with_backing(&format!("<locked/>{MEMFD_SHARED}"), "lock"),
        with_device(
            "<hostdev mode='subsystem' type='pci' managed='yes'><source>\
             <address domain='0x0000' bus='0x00' slot='0x1f' function='0x0'/></source></hostdev>",
            "hostdev",
        ),
        with_device(
            "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>\
             <source file='/var/lib/libvirt/images/initrd'/><target dev='vdb' bus='virtio'/>\
             <readonly/></disk>",
            "cache='none'",
        ),
        with_device(
            "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='directsync'/>\
             <source file='/var/lib/libvirt/images/initrd'/><target dev='vdb' bus='virtio'/>\
             <readonly/></disk>",
            "cache='directsync'",
        ),
        with_device(
            "<filesystem type='mount'><driver type='virtiofs'/><source dir='/srv'/>\
             <target dir='share'/></filesystem>",
            "virtiofs",
        ),
        with_device(
            "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='directsync' \
             io='native'/><source file='/var/lib/libvirt/images/initrd'/>\
             <target dev='vdb' bus='virtio'/></disk>",
            "io='native'",
        ),
        with_device(
            "<disk type='block' device='lun'><driver name='qemu' type='raw'/>\
             <source dev='/dev/null'/><target dev='sda' bus='scsi'/></disk>",
            "device='lun'",
        ),
        with_device(
            "<hostdev mode='subsystem' type='scsi_host'>\
             <source protocol='vhost' wwpn='naa.5123456789abcde0'/></hostdev>",
            "vhost-scsi",
        ),
        with_device(
            "<interface type='vhostuser'><mac address='52:54:00:00:00:07'/>\
             <source type='unix' path='/run/switch' mode='client'/><model type='virtio'/></interface>",
            "52:54:00:00:00:07",
        ),
        with_device(
            "<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface>",
            "vdpa",
        ),
        with_device(
            "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw'/>\
             <source type='unix' path='/run/spdk'/><target dev='vdb' bus='virtio'/></disk>",
            "vhostuser",
        ),
        with_device(
            "<video><driver name='vhostuser'/><model type='virtio'/></video>",
            "vhostuser",
        ),
        with_backing(
            "<source type='anonymous'/><access mode='shared'/>",
            "type='anonymous'",
        ),
    ]
}

/// The command failed, and its message has these words.
fn demand_refusal(finished: &Finished, words: &[&str]) -> Result<()> {
    let said = finished.said();
    ensure!(
        !finished.success(),
        "'{}' must be refused; it said: {said}",
        finished.line
    );
    let lower = said.to_lowercase();
    for word in words {
        ensure!(
            lower.contains(&word.to_lowercase()),
            "'{}' must name '{word}'; it said: {said}",
            finished.line
        );
    }
    ensure!(!said.contains("panicked"), "a panic is no message: {said}");
    Ok(())
}

fn domains(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    for refused in refused_domains() {
        let mut spec = Spec::new("refused", RAM_MIB);
        spec.extra_elements = refused.elements;
        spec.extra_devices = refused.devices.to_owned();
        let guest = Guest::define(spec).with_context(|| refused.reason.to_owned())?;
        let before = virsh_ok(&["dumpxml", "--inactive", guest.name()])?;
        let finished = lab.host.outram(&[
            "attach",
            guest.name(),
            "--local-ratio",
            "0.5",
            "--server",
            &server.address,
        ])?;
        demand_refusal(&finished, &[refused.reason])?;
        let after = virsh_ok(&["dumpxml", "--inactive", guest.name()])?;
        ensure!(before == after, "a refused domain must stay as it was");
    }
    Ok(())
}

fn arguments(lab: &Lab) -> Result<()> {
    let guest = Guest::define(Spec::new("arguments", RAM_MIB))?;
    let name = guest.name();
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["attach", name, "--local-ratio", "1.5"],
            &["1.5", "above 0"],
        ),
        (&["attach", name, "--local-ratio", "0"], &["above 0"]),
        (&["attach", name, "--local-ratio", "half"], &["half", "0.5"]),
        (
            &["attach", name, "--local", "12 parsecs"],
            &["12 parsecs", "size"],
        ),
        (&["attach", name], &["--local-ratio"]),
        (
            &["attach", name, "--local-ratio", "0.5"],
            &["no memory server", "--server"],
        ),
        (
            &[
                "attach",
                "nobody",
                "--local-ratio",
                "0.5",
                "--server",
                "127.0.0.1:1",
            ],
            &["nobody"],
        ),
        (
            &[
                "attach",
                name,
                "--local-ratio",
                "0.5",
                "--server",
                "10.0.0.1:99999",
            ],
            &["10.0.0.1:99999", "port"],
        ),
        (
            &[
                "-c",
                "qemu:///session",
                "attach",
                name,
                "--local-ratio",
                "0.5",
            ],
            &["qemu:///session", "qemu:///system"],
        ),
        (&["tune", name, "--local-ratio", "0.5"], &[name]),
        (&["tune", "nobody", "--local-ratio", "0.5"], &["nobody"]),
        (&["detach", "nobody"], &["nobody"]),
        (&["status", "nobody"], &["nobody"]),
    ];
    for (arguments, words) in cases {
        demand_refusal(&lab.host.outram(arguments)?, words)?;
    }
    Ok(())
}

/// What the next start would refuse is refused by the command that would write it down.
fn persisted(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let mut spec = Spec::new("persisted", RAM_MIB);
    // It is never started, so it takes no huge pages.
    spec.extra_elements = backing("<hugepages><page size='2' unit='M'/></hugepages>");
    let guest = lab.attach(spec, &["--local-ratio", "0.5"], &server.address)?;
    let definition = || virsh_ok(&["dumpxml", "--inactive", guest.name()]);
    let before = definition()?;
    let tune = |setting| {
        lab.host
            .outram(&["tune", guest.name(), setting, "--persist"])
    };
    for (setting, words) in [
        ("--granularity=64KiB", ["granularity", "2 MiB"]),
        ("--compressed-share=0.2", ["compressed", "2 MiB"]),
        ("--local=1MiB", ["limit", "--local-ratio"]),
    ] {
        demand_refusal(&tune(setting)?, &words)?;
        ensure!(
            before == definition()?,
            "a refused '{setting}' must change nothing"
        );
    }
    let told = tune("--local-ratio=0.4")?;
    ensure!(told.success(), "what is no mistake: {}", told.said());
    ensure!(before != definition()?, "the new limit was written down");
    Ok(())
}

/// What only shows when the domain starts: our reason must be in virsh's error.
fn starts(lab: &Lab) -> Result<()> {
    let server = lab.server("64MiB")?;
    let guest = lab.attach(
        Spec::new("starts", RAM_MIB),
        &["--local-ratio", "0.1"],
        &server.address,
    )?;
    let start = || virsh(&["start", guest.name()]);
    demand_refusal(&start()?, &["full"]).context("a server with too little memory")?;

    lab.host.outram_ok(&[
        "attach",
        guest.name(),
        "--local-ratio",
        "0.5",
        "--server",
        "127.0.0.1:1",
    ])?;
    demand_refusal(&start()?, &["127.0.0.1:1"]).context("no server at that address")?;

    let settings = Path::new("/etc/outram/backend.toml");
    let good = fs::read_to_string(settings)?;
    fs::write(settings, format!("{good}\nlocal-ration = 0.5\n"))?;
    let refused = start();
    fs::write(settings, good)?;
    demand_refusal(&refused?, &["local-ration"]).context("an unknown key in backend.toml")?;
    ensure!(
        guest.state()? == "shut off",
        "a refused start leaves it off"
    );

    let mut typo = hand_written("typo", &server.address)?;
    typo.metadata = typo.metadata.replace("local-ratio", "local-ration");
    let typo = Guest::define(typo)?;
    let refused = virsh(&["start", typo.name()])?;
    demand_refusal(&refused, &["local-ration"]).context("a typo in hand-written metadata")?;
    drop(typo);

    let mut taken = hand_written("taken", &server.address)?;
    let shared = "<access mode='shared'/>";
    let taken_at_start = format!("{shared}<allocation mode='immediate'/>");
    taken.extra_elements = taken.extra_elements.replace(shared, &taken_at_start);
    let taken = Guest::define(taken)?;
    let refused = virsh(&["start", taken.name()])?;
    demand_refusal(&refused, &["allocation"]).context("preallocated memory, by hand")
}

/// Shared-memory THP makes punching unsafe, so it is refused while it is on. The kernel's own file
/// is hidden by one that says so: the machine's setting is not touched.
fn thp(lab: &Lab) -> Result<()> {
    let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let pretended = "/run/shmem_enabled";
    fs::write(pretended, "always within_size [advise] never deny force\n")?;
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        Spec::new("thp", RAM_MIB),
        &["--local-ratio", "0.5"],
        &server.address,
    )?;
    run("mount", &["--bind", pretended, setting])?;
    let refused = virsh(&["start", guest.name()]);
    let told = fs::read_to_string(guest.run_dir().join("error")).unwrap_or_default();
    run("umount", &[setting])?;
    let mut refused = refused?;
    refused.stderr.push_str(&told);
    demand_refusal(&refused, &["shmem_enabled"])?;

    // Of a guest that runs nothing is evicted while it is on.
    let _console = guest.boot()?;
    let is_told = |status: &Status| {
        let detail = status.detail.as_deref().unwrap_or_default();
        detail.contains("nothing is evicted") && detail.contains("shmem_enabled")
    };
    ensure!(!is_told(&guest.status()?), "told of what is off");
    run("mount", &["--bind", pretended, setting])?;
    let told = guest.wait_status("the setting to be told of", SHORT, is_told);
    let folios = LargeFolios::make();
    run("umount", &[setting])?;
    told?;
    // Those that the host has then may be the guest's, and whoever serves it from then on has to know.
    let folios = folios?;
    let is_unsure = |status: &Status| {
        let detail = status.detail.as_deref().unwrap_or_default();
        detail.contains("nothing is evicted") && detail.contains("ShmemHugePages")
    };
    let alone = guest.wait_status("large folios to be told of", SHORT, is_unsure)?;
    end(alone.backend_pid)?;
    wait_for_another(&guest, &alone)?;
    guest.wait_status("the successor to tell of them", SHORT, is_unsure)?;
    drop(folios);
    guest.wait_status("the word to be taken back", SHORT, |status| {
        status.detail.is_none()
    })?;
    Ok(())
}

/// Shared memory in large folios, which is no guest's.
struct LargeFolios;

impl LargeFolios {
    const MOUNTED: &str = "/run/large-folios";

    /// Skips the test where the host makes none, for its memory is in pieces.
    fn make() -> Result<Self> {
        fs::create_dir_all(Self::MOUNTED)?;
        let options = ["-t", "tmpfs", "-o", "huge=always", "none", Self::MOUNTED];
        run("mount", &options)?;
        let made = Self;
        if made.fill()? {
            return Ok(made);
        }
        // Not everybody may.
        let _ = fs::write("/proc/sys/vm/compact_memory", "1");
        if made.fill()? {
            return Ok(made);
        }
        let reason = "of large folios nothing can be shown: the host makes none";
        bail!(Skipped(reason.into()));
    }

    /// Whether the host has made some of them for it.
    fn fill(&self) -> Result<bool> {
        fs::write(Path::new(Self::MOUNTED).join("file"), vec![1; 8 << 20])?;
        let info = fs::read_to_string("/proc/meminfo")?;
        let count = info
            .lines()
            .find_map(|line| line.strip_prefix("ShmemHugePages:"));
        let count = count.context("the kernel counts them")?.trim();
        Ok(!count.starts_with("0 "))
    }
}

impl Drop for LargeFolios {
    fn drop(&mut self) {
        if let Err(error) = run("umount", &[Self::MOUNTED]) {
            eprintln!("{error:#}");
        }
    }
}

/// A guest as the README has it written by hand.
fn hand_written(name: &str, server: &str) -> Result<Spec> {
    let uuid = format!("6f757472-616d-4000-8000-{:0>12}", name.len());
    readme::hand_written(Spec::new(name, RAM_MIB), &uuid, server)
}

fn by_hand(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(hand_written("byhand", &server.address)?)?;
    let mut console = guest.boot()?;
    crate::fixture::check(&mut console, 70, 1)?;
    ensure!(
        guest.status()?.ram_bytes == RAM_MIB << 20,
        "all of its RAM is paged"
    );
    let settings = Path::new("/etc/outram/backend.toml");
    let good = fs::read_to_string(settings)?;
    fs::write(settings, format!("{good}\nlocal-ration = 0.5\n"))?;
    let refused = lab.host.outram(&["restart", guest.name()]);
    let examined = lab.host.outram(&["doctor"]);
    fs::write(settings, good)?;
    demand_refusal(&refused?, &["local-ration", "correct"])?;
    demand_refusal(
        &examined?,
        &["local-ration", "correct /etc/outram/backend.toml"],
    )?;
    lab.host.outram_ok(&["restart", guest.name()])?;
    crate::fixture::power_off(&guest, &mut console, &server)
}

/// A hook that is broken in every way we can think of, beside a domain that is none of ours.
fn unrelated(_lab: &Lab) -> Result<()> {
    let guest = Guest::define(Spec::new("unrelated", 128))?;
    let start = |what: &str| -> Result<()> {
        virsh_ok(&["start", guest.name()]).with_context(|| format!("with {what}"))?;
        guest.destroy()?;
        guest.wait_state("shut off", SHORT)
    };
    start("everything in order")?;
    let settings = Path::new("/etc/outram/backend.toml");
    let good = fs::read_to_string(settings)?;
    fs::write(settings, "this is no TOML [[[")?;
    let result = start("broken settings");
    fs::write(settings, good)?;
    result?;
    let (run, away) = (Path::new("/run/outram"), Path::new("/run/outram-away"));
    fs::rename(run, away)?;
    fs::write(run, "a file where a directory should be")?;
    let result = start("no run directory");
    fs::remove_file(run)?;
    fs::rename(away, run)?;
    result?;
    ensure!(
        Path::new(IMAGES).join("vmlinux").exists(),
        "the host's images are where they were"
    );
    Ok(())
}

fn detach(lab: &Lab) -> Result<()> {
    let guest = Guest::define(Spec::new("detach", RAM_MIB))?;
    let xml = || virsh_ok(&["dumpxml", "--inactive", guest.name()]);
    let before = xml()?;
    lab.host.outram_ok(&[
        "attach",
        guest.name(),
        "--local-ratio",
        "0.5",
        "--server",
        "127.0.0.1:7070",
    ])?;
    ensure!(xml()?.contains("vhostuser"), "attach adds the disk");
    lab.host.outram_ok(&["detach", guest.name()])?;
    let after = xml()?;
    ensure!(
        before == after,
        "detach must restore the domain.\nbefore:\n{before}\nafter:\n{after}"
    );
    Ok(())
}
