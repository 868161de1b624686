//! What `outram doctor` says of real devices: as they are, with the cure of what is in their way.

use std::fs;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::{run, run_within, wait_for};

use crate::soft_roce::{SoftRoce, without_library};
use outram_tests::small_lab::{LONG, Lab};

pub(crate) const TESTS: &[crate::Test] = &[
    ("the_doctor_looks_at_each_ports_link", links),
    ("the_doctor_looks_for_the_device_that_is_named", named),
    (
        "the_doctor_misses_libibverbs_where_there_is_a_device",
        library,
    ),
    (
        "the_doctor_looks_at_the_limit_of_locked_memory",
        locked_memory,
    ),
];

/// Has the doctor look at the lab with these settings, run by `launcher`, and returns what it says in the
/// checks of this name: each with its cure, if any.
fn examine(lab: &Lab, settings: &str, launcher: &[&str], name: &str) -> Result<Vec<String>> {
    let config = lab.path("backend.toml");
    fs::write(&config, settings)?;
    let program = lab.program("outram")?.display().to_string();
    let variable = format!("OUTRAM_CONFIG={}", config.display());
    let words = [&[variable.as_str()], launcher, &[&program, "doctor"]].concat();
    // Its status is of much else, libvirt among it, that this lab has not got.
    let said = run_within(LONG, "env", &words);
    fs::write(&config, "")?;
    let said = said?.stdout;
    let mut found: Vec<String> = Vec::new();
    let mut is_ours = false;
    for line in said.lines() {
        let words = line.get(6..).unwrap_or_default();
        if !line.starts_with(' ') {
            is_ours = words.starts_with(name);
        }
        match (is_ours, line.starts_with(' ')) {
            (true, false) => found.push(line.to_owned()),
            (true, true) => found
                .last_mut()
                .context("a cure of nothing")?
                .push_str(line),
            (false, _) => {}
        }
    }
    ensure!(!found.is_empty(), "no word of {name}: {said}");
    Ok(found)
}

/// Demands one check of this name with all of these parts, the first at its start. What was just done to a device
/// may take the kernel a moment.
fn demand(lab: &Lab, settings: &str, name: &str, parts: &[&str]) -> Result<()> {
    demand_by(lab, settings, &[], name, parts)
}

fn demand_by(
    lab: &Lab,
    settings: &str,
    launcher: &[&str],
    name: &str,
    parts: &[&str],
) -> Result<()> {
    let mut mismatch = String::new();
    wait_for("the doctor to say so", LONG, || {
        let checks = examine(lab, settings, launcher, name)?;
        let compared = compare(&checks, parts).map_err(|error| mismatch = error.to_string());
        Ok(compared.ok())
    })
    .with_context(|| mismatch)
}

fn compare(checks: &[String], parts: &[&str]) -> Result<()> {
    let [check] = checks else {
        anyhow::bail!("not one check: {checks:#?}");
    };
    let (verdict, rest) = parts.split_first().context("no parts")?;
    ensure!(check.starts_with(verdict), "not '{verdict}': {check}");
    for part in rest {
        ensure!(check.contains(part), "no '{part}' in: {check}");
    }
    Ok(())
}

fn links(lab: &Lab) -> Result<()> {
    demand(lab, "", "RDMA", &["pass", "no device: pages go over TCP"])?;
    let device = SoftRoce::on_loopback()?;
    let up = [
        "pass",
        "rxe0 port 1 is up (lo), path MTU 4096, GID ",
        "(::ffff:127.0.0.1)",
    ];
    demand(lab, "", "RDMA", &up)?;
    drop(device);

    let device = SoftRoce::apart()?;
    let small = [
        "warn",
        "path MTU 1024, GID ",
        "(::ffff:10.77.0.1)",
        "ip link set roce1 mtu 4200",
    ];
    demand(lab, "", "RDMA", &small)?;
    for end in ["roce1", "roce1-far"] {
        run("ip", &["link", "set", end, "mtu", "4200"])?;
    }
    demand(
        lab,
        "",
        "RDMA",
        &["pass", "rxe1 port 1 is up (roce1), path MTU 4096"],
    )?;
    let down = "rxe1 port 1 is not up (its state is DOWN): pages go over TCP";
    run("ip", &["link", "set", "roce1-far", "down"])?;
    demand(
        lab,
        "",
        "RDMA",
        &["warn", down, "cure: roce1 is set up but has no link"],
    )?;
    run("ip", &["link", "set", "roce1-far", "up"])?;
    device.set_up(false)?;
    demand(
        lab,
        "",
        "RDMA",
        &["warn", down, "cure: ip link set roce1 up"],
    )?;
    device.set_up(true)?;
    run("ip", &["address", "flush", "dev", "roce1"])?;
    let bare = [
        "warn",
        "no address that can be used",
        "cure: give it an IP address",
        "dev roce1",
    ];
    demand(lab, "", "RDMA", &bare)
}

fn named(lab: &Lab) -> Result<()> {
    let asked = |device: &str| format!("rdma = \"{device}\"\n");
    let absent = [
        "warn",
        "mlx5_0:1 is asked for, but is not there: there is no device at all",
    ];
    demand(lab, &asked("mlx5_0"), "RDMA", &absent)?;
    let _device = SoftRoce::on_loopback()?;
    let absent = [
        "warn",
        "mlx5_0:1 is asked for, but is not there: there is rxe0 port 1 (up)",
        "correct 'rdma'",
    ];
    demand(lab, &asked("mlx5_0"), "RDMA", &absent)?;
    demand(
        lab,
        &asked("rxe0"),
        "RDMA",
        &["pass", "rxe0 port 1 is up (lo), path MTU 4096"],
    )?;
    let index = [
        "warn",
        "no address that can be used",
        "correct the index 99 of 'rdma'",
        "(::ffff:127.0.0.1)",
    ];
    demand(lab, &asked("rxe0:1:99"), "RDMA", &index)?;
    demand(lab, &asked("off"), "RDMA", &["pass", "switched off"])
}

fn library(lab: &Lab) -> Result<()> {
    let _device = SoftRoce::on_loopback()?;
    without_library(|| {
        let missing = [
            "warn",
            "rxe0 port 1 is up, but",
            "libibverbs is not installed",
            "install libibverbs1",
        ];
        demand(lab, "", "RDMA", &missing)
    })?;
    demand(lab, "", "RDMA", &["pass", "rxe0 port 1 is up"])
}

fn locked_memory(lab: &Lab) -> Result<()> {
    let name = "locked memory";
    let _device = SoftRoce::on_loopback()?;
    let limited = ["prlimit", "--memlock=65536"];
    let limit = "64 KiB (of this shell)";
    demand_by(
        lab,
        "",
        &limited,
        name,
        &["pass", limit, "which backends lift"],
    )?;
    let bound = ["setpriv", "--bounding-set=-sys_resource"];
    let limited = [&limited[..], &bound].concat();
    demand_by(
        lab,
        "",
        &limited,
        name,
        &["warn", limit, "cure: ulimit -l unlimited"],
    )?;
    let unlimited = ["prlimit", "--memlock=unlimited"];
    demand_by(
        lab,
        "",
        &unlimited,
        name,
        &["pass", "without a limit (of this shell)"],
    )
}
