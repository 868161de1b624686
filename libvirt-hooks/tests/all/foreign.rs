//! Domains as Nova, oVirt and KubeVirt generate them, through the programs that those run.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use outram_libvirt::attachment;
use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::refusal;

use crate::support::{RUN, assert_golden, canonical, golden};

const SIDECAR: &str = env!("CARGO_BIN_EXE_outram-kubevirt-sidecar");
const FILTER: &str = env!("CARGO_BIN_EXE_outram-nova-filter");
const VDSM_HOOK: &str = env!("CARGO_BIN_EXE_outram-vdsm-hook");

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// What a program printed, which must have gone well.
fn printed(output: &Output) -> String {
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    text(&output.stdout)
}

/// Why a program refused; it must have printed nothing to be taken for a domain.
fn refused(output: &Output, status: i32) -> String {
    assert_eq!(output.status.code(), Some(status));
    assert_eq!(text(&output.stdout), "");
    text(&output.stderr)
}

/// The attached domain is as recorded, can be paged, and is detached as any other.
fn assert_attached(name: &str, before: &str, after: &str) {
    assert_golden(&format!("{name}.attached"), &canonical(after));
    let mut domain = DomainXml::parse(after).expect("a domain");
    let run = Path::new(RUN);
    assert_eq!(refusal::check(&domain, run).expect("checked"), []);
    attachment::detach(&mut domain, run).expect("detached");
    let detached = domain.to_text().expect("text");
    assert_eq!(canonical(&detached), canonical(before));
}

/// An empty folder, so that nothing of this machine's settings is read.
fn settings(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("written");
    file
}

fn filter(xml: &str, arguments: &[&str]) -> Output {
    let config = settings("");
    let mut child = Command::new(FILTER)
        .args(arguments)
        .env("OUTRAM_CONFIG", config.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the filter runs");
    let mut stdin = child.stdin.take().expect("its input");
    stdin.write_all(xml.as_bytes()).expect("written");
    drop(stdin);
    child.wait_with_output().expect("it ends")
}

#[test]
fn novas_instance_is_attached_by_its_extra_specs() {
    let before = golden("nova.xml");
    let after = printed(&filter(&before, &[]));
    assert_attached("nova", &before, &after);
}

#[test]
fn novas_instance_is_attached_by_its_flavors_name_where_extra_specs_are_not_written() {
    let before = golden("nova.xml");
    let specs = before
        .find("        <nova:extraSpecs>")
        .expect("they are there");
    let end = "</nova:extraSpecs>\n";
    let behind = before.find(end).expect("their end") + end.len();
    let older = format!("{}{}", &before[..specs], &before[behind..]);
    let flavors = settings(
        "[flavors.\"far.medium\"]\nlocal = \"0.5\"\nservers = [\"10.0.0.2:7741\", \"mem2.example\"]\n",
    );
    let flavors = flavors.path().display().to_string();
    let after = printed(&filter(&older, &["--flavors", &flavors]));
    let mut domain = DomainXml::parse(&after).expect("a domain");
    attachment::detach(&mut domain, Path::new(RUN)).expect("it was attached");
    assert!(after.contains("local-ratio=\"0.5\""), "{after}");
    assert_eq!(
        printed(&filter(&older, &[])),
        older,
        "no wish, no edit: byte for byte"
    );
}

#[test]
fn other_instances_of_nova_stay_as_they_are() {
    let plain = golden("virt-install.xml");
    assert_eq!(printed(&filter(&plain, &[])), plain, "none of Nova's");
    let unwished = golden("nova.xml").replace("outram:local", "other:local");
    assert_eq!(printed(&filter(&unwished, &[])), unwished);
}

#[test]
fn novas_mistakes_are_told() {
    let xml = golden("nova.xml");
    let wrong = xml.replace(">0.5<", ">half<");
    let said = refused(&filter(&wrong, &[]), 1);
    assert!(said.contains("'half' is no limit"), "{said}");
    let nowhere = xml.replace("outram:servers", "other:servers");
    let said = refused(&filter(&nowhere, &[]), 1);
    assert!(said.contains("extra spec outram:servers"), "{said}");
    let said = refused(&filter("<domain", &[]), 1);
    assert!(said.contains("not well-formed"), "{said}");
    let flavors = settings("[flavors.x]\nlocl = \"0.5\"\n");
    let flavors = flavors.path().display().to_string();
    let said = refused(&filter(&xml, &["--flavors", &flavors]), 1);
    assert!(said.contains("locl"), "{said}");
    let said = refused(&filter(&xml, &["--flavors", "/does/not/exist"]), 1);
    assert!(said.contains("/does/not/exist"), "{said}");
}

/// Runs VDSM's hook on a file with `xml`; returns how it ended and what the file is then.
fn vdsm(xml: &str, properties: &[(&str, &str)]) -> (Output, String) {
    let file = settings(xml);
    let config = settings("servers = [\"10.0.0.9:7741\"]\n");
    let output = Command::new(VDSM_HOOK)
        .env("_hook_domxml", file.path())
        .env("OUTRAM_CONFIG", config.path())
        .env_remove("outram")
        .envs(properties.iter().copied())
        .output()
        .expect("the hook runs");
    let after = fs::read_to_string(file.path()).expect("the file is there");
    (output, after)
}

#[test]
fn ovirts_machine_is_attached_by_its_custom_property() {
    let before = golden("ovirt.xml");
    let (output, after) = vdsm(
        &before,
        &[("outram", "1GiB"), ("outram_servers", "mem1:7741")],
    );
    assert_eq!(printed(&output), "");
    assert_attached("ovirt", &before, &after);
    let (output, after) = vdsm(&before, &[("outram", "0.3")]);
    assert_eq!(printed(&output), "", "the host's servers will do");
    assert!(after.contains("local-ratio=\"0.3\""), "{after}");
}

#[test]
fn ovirts_other_machines_stay_as_they_are_and_mistakes_abort_the_start() {
    let before = golden("ovirt.xml");
    let (output, after) = vdsm(&before, &[]);
    assert_eq!((printed(&output).as_str(), &after), ("", &before));
    let (output, after) = vdsm(&before, &[("outram", "7")]);
    assert!(refused(&output, 2).contains("'7' is no limit"));
    assert_eq!(after, before, "nothing half done");
    let direct = before.replace("cache=\"writeback\"", "cache=\"none\"");
    let (output, after) = vdsm(&direct, &[("outram", "0.5")]);
    assert!(refused(&output, 2).contains("cannot be paged"));
    assert_eq!(after, direct);
    let output = Command::new(VDSM_HOOK)
        .env("outram", "0.5")
        .env_remove("_hook_domxml")
        .output()
        .expect("the hook runs");
    assert!(refused(&output, 2).contains("_hook_domxml"));
}

fn sidecar(annotations: &str, xml: &str) -> Output {
    let vmi = format!(
        "{{\"apiVersion\":\"kubevirt.io/v1\",\"kind\":\"VirtualMachineInstance\",\
          \"metadata\":{{\"name\":\"db-1\",\"annotations\":{annotations}}},\"spec\":{{}}}}"
    );
    // As its shim calls it.
    Command::new(SIDECAR)
        .args(["--vmi", &vmi, "--domain", xml])
        .output()
        .expect("the sidecar runs")
}

#[test]
fn kubevirts_instance_is_attached_by_its_annotations() {
    let before = golden("kubevirt.xml");
    let wish = r#"{"outram.dev/local":"0.5","outram.dev/servers":"10.0.0.2, mem2.example:7000"}"#;
    let after = printed(&sidecar(wish, &before));
    assert_attached("kubevirt", &before, &after);
}

#[test]
fn kubevirts_other_instances_stay_as_they_are_and_mistakes_are_told() {
    let before = golden("kubevirt.xml");
    for annotations in ["null", "{}", r#"{"kubevirt.io/x":"y"}"#] {
        assert_eq!(printed(&sidecar(annotations, &before)), before);
    }
    for (annotations, word) in [
        (r#"{"outram.dev/local":"0.5"}"#, "outram.dev/servers"),
        (r#"{"outram.dev/local":0.5}"#, "must be text"),
        (r#"{"outram.dev/local":"9"}"#, "'9' is no limit"),
        (r#"{"outram.dev/local""#, "no JSON"),
    ] {
        let said = refused(&sidecar(annotations, &before), 1);
        assert!(said.contains(word), "{annotations}: {said}");
    }
}
