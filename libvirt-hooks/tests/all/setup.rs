//! `outram setup` and `outram pki` as programs, below a directory of their own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use outram_libvirt::host::RUN_VARIABLE;

use crate::support;

fn outram(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outram"))
        .args(arguments)
        .output()
        .expect("outram runs")
}

fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    String::from_utf8_lossy(&[out.as_slice(), err].concat()).into_owned()
}

fn setup(dir: &Path, more: &[&str]) -> Output {
    let prefix = format!("--prefix={}", dir.display());
    outram(&[&["setup", prefix.as_str()], more].concat())
}

const UUID: &str = "9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234";

/// The hook program has to be beside `outram`; naming it here makes sure that it is built.
const HOOK: &str = env!("CARGO_BIN_EXE_outram-libvirt-hook");

#[test]
fn setup_does_everything_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = setup(dir.path(), &[]);
    assert!(first.status.success(), "{}", said(&first));
    let link = dir.path().join("etc/libvirt/hooks/qemu.d/outram");
    let hook = fs::canonicalize(HOOK).expect("built");
    assert_eq!(fs::canonicalize(&link).expect("a link"), hook);
    let settings = dir.path().join("etc/outram/backend.toml");
    fs::write(&settings, "servers = [\"a:1\"]\n").expect("edited");

    let second = setup(dir.path(), &[]);
    assert!(second.status.success());
    let text = said(&second);
    assert!(text.lines().all(|line| line.starts_with("found")), "{text}");
    let kept = fs::read_to_string(&settings).expect("read");
    assert_eq!(kept, "servers = [\"a:1\"]\n");
    assert!(!dir.path().join("etc/sysctl.d").exists());
}

#[test]
fn a_dry_run_changes_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = setup(dir.path(), &["--dry-run", "--allow-sysctl"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).lines().all(|line| line.starts_with("would")));
    assert_eq!(fs::read_dir(dir.path()).expect("read").count(), 0);
}

#[test]
fn removing_leaves_what_was_there_before_and_settings() {
    let dir = tempfile::tempdir().expect("a directory");
    let rules = dir.path().join("etc/apparmor.d/abstractions/libvirt-qemu");
    let site = dir
        .path()
        .join("etc/apparmor.d/local/abstractions/libvirt-qemu");
    let daemon = dir.path().join("etc/apparmor.d/usr.sbin.libvirtd");
    let additions = dir.path().join("etc/apparmor.d/local/usr.sbin.libvirtd");
    for (path, text) in [
        (&rules, "#include <local/abstractions/libvirt-qemu>\n"),
        (&site, "/srv/mine r,"),
        (&daemon, "#include <local/usr.sbin.libvirtd>\n"),
        (&additions, "/srv/mine r,\n"),
    ] {
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    }
    let first = setup(dir.path(), &["--allow-sysctl"]);
    assert!(first.status.success(), "{}", said(&first));
    let ours = dir
        .path()
        .join("etc/apparmor.d/abstractions/libvirt-qemu.d/outram");
    assert!(ours.exists());
    let added = fs::read_to_string(&site).expect("read");
    assert!(
        added.starts_with("/srv/mine r,\ninclude if exists <abstractions/libvirt-qemu.d/outram>")
    );
    // This test's programs are in no folder that libvirt's profile lets it start programs of.
    let added = fs::read_to_string(&additions).expect("read");
    assert!(added.starts_with("/srv/mine r,\n\"/"), "{added}");
    assert!(added.ends_with("/outram-libvirt-hook\" PUx, # by 'outram setup'\n"));

    assert!(setup(dir.path(), &["--remove"]).status.success());
    let additions = fs::read_to_string(&additions).expect("read");
    assert_eq!(additions, "/srv/mine r,\n");
    assert!(!ours.exists() && !ours.parent().expect("a folder").exists());
    assert_eq!(fs::read_to_string(&site).expect("read"), "/srv/mine r,\n");
    assert!(!dir.path().join("etc/libvirt/hooks/qemu.d/outram").exists());
    assert!(!dir.path().join("etc/sysctl.d/60-outram.conf").exists());
    assert!(dir.path().join("etc/outram/backend.toml").exists());

    let again = setup(dir.path(), &["--remove"]);
    assert!(again.status.success());
    assert_eq!(said(&again), "");
}

#[test]
fn guests_that_run_are_named_where_setup_is_undone() {
    let run = tempfile::tempdir().expect("a directory");
    let run_dir = run.path().join(UUID);
    fs::create_dir(&run_dir).expect("made");
    fs::write(run.path().join(format!("{UUID}.name")), "web1").expect("written");
    let _supervisor = support::supervised(&run_dir);
    let nowhere = run.path().join("libvirt-sock");
    let connect = format!("--connect=qemu:///system?socket={}", nowhere.display());
    // Of this machine nothing is changed.
    let output = Command::new(env!("CARGO_BIN_EXE_outram"))
        .args([&connect, "setup", "--remove", "--dry-run"])
        .env(RUN_VARIABLE, run.path())
        .output();
    let text = said(&output.expect("outram runs"));
    let told = |what: &str| text.lines().any(|line| line.ends_with(what));
    assert!(told(": web1"), "{text}");
    assert!(text.contains("which domains use Outram"), "{text}");
}

#[test]
fn the_sysctl_is_set_only_when_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    for _ in 0..2 {
        let output = setup(dir.path(), &["--allow-sysctl"]);
        assert!(output.status.success(), "{}", said(&output));
        let settings = fs::read_to_string(dir.path().join("etc/outram/backend.toml"));
        let settings = settings.expect("settings");
        assert_eq!(settings.matches("allow-sysctl = true").count(), 1);
        let sysctl = fs::read_to_string(dir.path().join("etc/sysctl.d/60-outram.conf"));
        assert_eq!(sysctl.expect("a file"), "vm.unprivileged_userfaultfd = 1\n");
    }
    let settings = dir.path().join("etc/outram/backend.toml");
    fs::write(settings, "allow-sysctl = false\n").expect("edited");
    let output = setup(dir.path(), &["--allow-sysctl"]);
    assert!(!output.status.success() && said(&output).contains("allow-sysctl = true"));
}

#[test]
fn a_sites_rules_that_cannot_be_read_are_left_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let rules = dir.path().join("etc/apparmor.d/abstractions/libvirt-qemu");
    let site = dir
        .path()
        .join("etc/apparmor.d/local/abstractions/libvirt-qemu");
    for (path, text) in [(&rules, &b""[..]), (&site, b"# f\xfcr uns\n/srv/mine r,\n")] {
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    }
    let output = setup(dir.path(), &[]);
    assert!(!output.status.success());
    assert!(
        said(&output).contains("local/abstractions/libvirt-qemu"),
        "{}",
        said(&output)
    );
    let kept = fs::read(&site).expect("read");
    assert_eq!(kept, b"# f\xfcr uns\n/srv/mine r,\n");
}

#[test]
fn hooks_of_others_are_left_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let hooks = dir.path().join("etc/libvirt/hooks");
    fs::create_dir_all(hooks.join("qemu.d")).expect("made");
    fs::write(hooks.join("qemu"), "#!/bin/sh\n").expect("written");
    fs::write(hooks.join("qemu.d/outram"), "#!/bin/sh\n").expect("written");
    let output = setup(dir.path(), &[]);
    assert!(!output.status.success());
    assert!(said(&output).contains("not Outram's"), "{}", said(&output));
    let kept = fs::read_to_string(hooks.join("qemu.d/outram")).expect("read");
    assert_eq!(kept, "#!/bin/sh\n");

    // A link to where our hook was before is ours to correct.
    fs::remove_file(hooks.join("qemu.d/outram")).expect("removed");
    let old = "/nowhere/outram-libvirt-hook";
    std::os::unix::fs::symlink(old, hooks.join("qemu.d/outram")).expect("linked");
    let output = setup(dir.path(), &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("libvirt runs both"));
    assert!(hooks.join("qemu.d/outram").exists());
}

#[test]
fn certificates_are_made_and_never_overwritten() {
    let dir = tempfile::tempdir().expect("a directory");
    let pki = dir.path().join("pki").display().to_string();
    let early = outram(&["pki", "issue", "client", "--dir", &pki]);
    assert!(said(&early).contains("outram pki init"), "{}", said(&early));
    assert!(outram(&["pki", "init", "--dir", &pki]).status.success());
    assert!(!outram(&["pki", "init", "--dir", &pki]).status.success());
    let client = ["pki", "issue", "client", "--dir", &pki];
    let server = [
        "pki",
        "issue",
        "server",
        "mem1",
        "--address",
        "10.0.0.2",
        "--dir",
        &pki,
    ];
    assert!(outram(&client).status.success());
    assert!(outram(&server).status.success());
    let again = outram(&client);
    assert!(said(&again).contains("not overwritten"), "{}", said(&again));
    for file in ["ca.pem", "client.pem", "client.key", "mem1.pem", "mem1.key"] {
        assert!(dir.path().join("pki").join(file).exists(), "{file}");
    }
}

#[test]
fn only_the_cas_own_directory_is_closed_to_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let plain = dir.path().join("plain");
    fs::create_dir(&plain).expect("made");
    let pki = dir.path().join("etc/outram/pki");
    let made = outram(&["pki", "init", "--dir", &pki.display().to_string()]);
    assert!(made.status.success(), "{}", said(&made));
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(&pki), 0o700);
    for parent in ["etc", "etc/outram"] {
        assert_eq!(mode(&dir.path().join(parent)), mode(&plain), "{parent}");
    }
}
