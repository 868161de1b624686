//! Every way in which a guest starts, each with a short run of the checker. Others have tests of their
//! own: autostart in `host_life`, `virsh start` everywhere.

use std::fs;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::run;
use outram_tests::hermetic::guest::{BOOT_LIMIT, Guest, Spec, greet};
use outram_tests::hermetic::host::{IMAGES, virsh_ok};
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::need;

use crate::fixture::{Lab, SHORT, check, power_off, wait_slabs};
use crate::{Test, readme};

pub(crate) const TESTS: &[Test] = &[
    ("virsh_create_of_a_hand_written_domain", created),
    ("virt_install_makes_a_domain_to_attach", installed),
];

/// RAM that these guests' little work needs.
const RAM_MIB: u64 = 256;

/// Share of it that the checker goes through.
const SHARE: u64 = 50;

const UUID: &str = "6f757472-616d-4000-8000-637265617465";

/// Created paused from the README's text, defined while it runs, reset; then started by force.
fn created(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let spec = readme::hand_written(Spec::new("created", RAM_MIB), UUID, &server.address)?;
    let file = "/run/created.xml";
    fs::write(file, spec.xml())?;
    virsh_ok(&["create", "--paused", file])?;
    let guest = Guest::known(spec, UUID.to_owned());
    guest.wait_status("QEMU to be there", SHORT, |status| {
        status.qemu_pid.is_some()
    })?;
    virsh_ok(&["resume", UUID])?;
    let mut console = guest.console()?;
    check(&mut console, SHARE, 1)?;

    let other = guest
        .spec
        .xml()
        .replace("<memory ", "<title>t</title><memory ");
    fs::write(file, other)?;
    virsh_ok(&["define", file])?;
    ensure!(guest.state()? == "running", "defining it anew is harmless");
    virsh_ok(&["reset", UUID])?;
    console.expect(&["READY"], BOOT_LIMIT)?;
    greet(&mut console)?;
    check(&mut console, SHARE, 1)?;
    power_off(&guest, &mut console, &server)?;

    virsh_ok(&["start", "--force-boot", "--paused", UUID])?;
    let status = guest.wait_status("QEMU to be there", SHORT, |status| {
        status.qemu_pid.is_some()
    })?;
    ensure!(status.ram_bytes == RAM_MIB << 20, "{status:?}");
    ends(&guest, &server)
}

fn ends(guest: &Guest, server: &MemServer) -> Result<()> {
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(server, |slabs| slabs == 0)
}

fn installed(lab: &Lab) -> Result<()> {
    need("virt-install", "virtinst")?;
    let server = lab.server("1GiB")?;
    let spec = Spec::new("installed", RAM_MIB);
    let memory = RAM_MIB.to_string();
    let boot = format!(
        "kernel={IMAGES}/vmlinux,initrd={IMAGES}/initrd,\
         kernel_args=console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off tsc=reliable"
    );
    let serial = format!("unix,path={},mode=bind", spec.serial_socket().display());
    let xml = run(
        "virt-install",
        &[
            &["--name", "installed", "--memory", &memory, "--vcpus", "2"][..],
            &["--osinfo", "detect=off,require=off", "--virt-type", "qemu"],
            &["--import", "--disk", "none", "--network", "none"],
            &["--graphics", "none", "--console", "none", "--boot", &boot],
            &["--serial", &serial, "--print-xml"],
        ]
        .concat(),
    )?;
    let file = "/run/installed.xml";
    fs::write(file, xml)?;
    virsh_ok(&["define", file])?;
    let uuid = virsh_ok(&["domuuid", "installed"])?.trim().to_owned();
    let guest = Guest::known(spec, uuid);
    let attach = ["attach", "installed", "--local-ratio", "0.5", "--server"];
    lab.host
        .outram_ok(&[&attach[..], &[&server.address]].concat())?;
    let mut console = guest.boot().context("a domain of virt-install")?;
    check(&mut console, SHARE, 1)?;
    power_off(&guest, &mut console, &server)
}
