//! A guest of KVM that is told of a lost page by a memory error, as it is of broken hardware. It takes
//! Linux 6.6 on the host. What the guest's kernel makes of it is not demanded here: under an emulated
//! processor, it was seen to take the same error again and again, to panic, or to be reset by QEMU for
//! a second error in the midst of the first.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::{Spec, greet};
use outram_tests::hermetic::host::{Acceleration, kernel_poisons, virsh_ok};
use outram_tests::hermetic::proxy::Proxy;
use outram_wire::control::Phase;

use crate::Test;
use crate::fixture::{LONG, Lab, demand_no_mismatch, power_off, wait_under_limit};
use crate::under_kvm::{LIMIT, SHOWN, again_on_the_newest_kernel};

const NAME: &str = "a_guest_of_kvm_is_told_of_a_lost_page";

pub(crate) const TESTS: &[Test] = &[(NAME, |lab| match Acceleration::wanted() {
    Acceleration::Emulated => again_on_the_newest_kernel(NAME, LIMIT),
    Acceleration::Kvm => is_told(lab),
})];

const RAM_MIB: u64 = 208;

/// A processor of Intel's: on AMD's, Linux recovers from memory errors only where the processor says
/// that it can (SUCCOR), which QEMU 7.2 knows nothing of, and panics elsewhere.
const PROCESSOR: &str = "<cpu mode='custom' match='exact' check='none'>
    <model fallback='allow' vendor_id='GenuineIntel'>Nehalem</model>
  </cpu>";

/// What QEMU logs once the guest has its machine check.
const INJECTED: &str = "of type BUS_MCEERR_AR injected";

/// Share of the RAM that the checker has, in per cent, and what the process has that loses a page.
const SHARE: u64 = 15;
const READER_MIB: u64 = 56;
const LEFT: &str = "80MiB";

/// Until all that is fetched is the reader's, but for one page in many.
const SETTLING: Duration = Duration::from_secs(30);

fn is_told(lab: &Lab) -> Result<()> {
    let server = lab.server("512MiB")?;
    let proxy = Proxy::start(&format!("127.0.0.1:{}", lab.host.port()), &server.address)?;
    let mut spec = Spec::new("told", RAM_MIB);
    spec.vcpus = 1;
    spec.extra_elements = PROCESSOR.to_owned();
    // An error that comes of an asynchronous page fault may meet the kernel at something else: a panic.
    spec.kernel_arguments = "no-kvmapf".to_owned();
    let limit = ["--local-ratio", "1", "--lost-pages", "poison"];
    let guest = lab.attach(spec, &limit, &proxy.address)?;
    if !kernel_poisons()? {
        let start = guest.place.virsh(&["start", &guest.uuid])?;
        ensure!(start.code != Some(0), "it was started");
        ensure!(start.said().contains("Linux 6.6"), "{}", start.said());
        println!("{SHOWN}the lab's kernel is older than Linux 6.6: it was refused");
        return Ok(());
    }
    let mut console = guest.boot()?;
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask(&format!("reader {READER_MIB}"), "READER", LONG)?;
    lab.tune(&guest, &["--local", LEFT])?;
    wait_under_limit(&guest)?;
    // What the kernel uses is back by then: that it should lose none of.
    std::thread::sleep(SETTLING);
    // No more than one page: the kernel's own are as good as any.
    proxy.spoil_one_page();
    guest.wait_status("a page to be refused", LONG, |status| {
        status.counters.faults_poisoned > 0
    })?;
    proxy.spoil(0);
    let log = format!("/var/log/libvirt/qemu/{}.log", guest.name());
    wait_for("QEMU to tell the guest", LONG, || {
        let said = fs::read_to_string(guest.place.path(Path::new(&log)))?;
        let told = said.lines().find(|line| line.contains(INJECTED));
        Ok(told.map(|line| println!("{SHOWN}{line}")))
    })?;
    let status = guest.status()?;
    ensure!(status.phase == Phase::Serving, "{status:?}");
    // QEMU replaces what is broken at a reset. It may come in the midst of a line.
    virsh_ok(&["reset", guest.name()])?;
    greet(&mut console)?;
    lab.tune(&guest, &["--local-ratio", "1"])?;
    console.ask("alloc 45", "ALLOCATED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    let status = guest.status()?;
    ensure!(status.lost_bytes == 0, "{status:?}");
    power_off(&guest, &mut console, &server)
}
