//! QEMU as libvirt runs it: an unprivileged user, in its seccomp sandbox, with a private /dev; and
//! nobody else at the sockets.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::unistd::User;
use outram_tests::hermetic::command::run_within;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh_ok;

use crate::Test;
use crate::fixture::{Lab, SHORT, wait_slabs};

pub(crate) const TESTS: &[Test] = &[("qemu_is_confined_and_its_sockets_are_its_own", confined)];

const NOBODY: u32 = 65534;

fn confined(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let qemu = User::from_name("libvirt-qemu")?.context("Debian's user of QEMU")?;
    let spec = Spec::new("confined", 128);
    try_domain(lab, spec.clone(), &server.address, qemu.uid.as_raw())?;
    wait_slabs(&server, |slabs| slabs == 0)?;

    // A domain with a user of its own: the socket is that user's.
    let mut own = spec;
    own.name = "own-user".to_owned();
    own.extra_elements = format!(
        "<seclabel type='static' model='dac' relabel='yes'>\
         <label>+{NOBODY}:+{NOBODY}</label></seclabel>"
    );
    // Where that user may make the serial line's socket.
    fs::set_permissions("/var/lib/libvirt/qemu", fs::Permissions::from_mode(0o777))?;
    try_domain(lab, own, &server.address, NOBODY).context("with a user of its own")?;
    wait_slabs(&server, |slabs| slabs == 0)
}

/// Starts a domain and looks at what QEMU may do, and who may come to its backend.
fn try_domain(lab: &Lab, spec: Spec, server: &str, user: u32) -> Result<()> {
    let guest = lab.attach(spec, &["--local-ratio", "0.5"], server)?;
    virsh_ok(&["start", "--paused", &guest.uuid])?;
    let status = guest.wait_status("QEMU to be there", SHORT, |status| {
        status.qemu_pid.is_some()
    })?;
    look_at_qemu(status.qemu_pid.context("QEMU's process")?, user)?;
    look_at_sockets(&guest, user)?;
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

fn look_at_qemu(pid: u32, user: u32) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let uids = [
        user.to_string(),
        user.to_string(),
        user.to_string(),
        user.to_string(),
    ];
    ensure!(
        field("Uid:").split_whitespace().eq(uids.iter()),
        "QEMU's user is {user} throughout: {status}"
    );
    ensure!(field("Seccomp:") == "2", "QEMU's sandbox is on: {status}");
    ensure!(field("CapEff:").trim_matches('0').is_empty(), "{status}");
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/mnt"));
    ensure!(
        namespace(&pid.to_string())? != namespace("self")?,
        "QEMU has mounts of its own"
    );
    Ok(())
}

fn look_at_sockets(guest: &Guest, user: u32) -> Result<()> {
    let path = |name: &str| guest.run_dir().join(name);
    let owner_and_mode = |path: &Path| -> Result<(u32, u32)> {
        let file = fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
        Ok((file.uid(), file.mode() & 0o7777))
    };
    ensure!(owner_and_mode(&path("vhost.sock"))? == (user, 0o600));
    ensure!(owner_and_mode(&path("control.sock"))? == (0, 0o600));
    ensure!(owner_and_mode(&path("log"))? == (0, 0o600));
    ensure!(
        owner_and_mode(&guest.run_dir())? == (0, 0o711),
        "it is walked through only"
    );
    ensure!(
        owner_and_mode(&path("state"))?.1 & 0o077 == 0,
        "root's alone"
    );

    let stranger = if user == NOBODY { 65533 } else { NOBODY };
    for (who, name, allowed) in [
        (user, "vhost.sock", true),
        (stranger, "vhost.sock", false),
        (user, "control.sock", false),
        (stranger, "control.sock", false),
    ] {
        let connected = connects(who, &path(name))?;
        ensure!(
            connected == allowed,
            "user {who} at {name}: {connected}, not {allowed}"
        );
    }
    Ok(())
}

/// Whether a user of no group can connect to a socket.
fn connects(user: u32, socket: &Path) -> Result<bool> {
    let user = user.to_string();
    let program = "use Socket; socket(S, PF_UNIX, SOCK_STREAM, 0) or exit 2; \
        exit(connect(S, sockaddr_un($ARGV[0])) ? 0 : $!{EACCES} ? 1 : 3)";
    let tried = run_within(
        SHORT,
        "setpriv",
        &[
            &["--reuid", &user, "--regid", &user, "--clear-groups", "perl"][..],
            &["-MErrno", "-e", program, &socket.display().to_string()],
        ]
        .concat(),
    )?;
    match tried.code {
        Some(0) => Ok(true),
        Some(1) => Ok(false),
        _ => anyhow::bail!("{}: {}", tried.line, tried.said()),
    }
}
