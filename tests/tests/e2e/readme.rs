//! The README's own texts, so that what it tells users to write is what is tested.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::guest::Spec;

/// The memory server that the README's domain names.
const SERVER: &str = "10.0.0.2:7741";

/// The block of XML in the section of that title.
fn block(title: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let block = text
        .split_once(&format!("\n## {title}\n"))
        .and_then(|(_, section)| section.split_once("```xml\n"))
        .and_then(|(_, block)| block.split_once("```"));
    let (block, _) = block.with_context(|| format!("the README has no XML under '{title}'"))?;
    Ok(block.to_owned())
}

/// The first element of that name, from its start to its end.
fn element<'a>(block: &'a str, name: &str) -> Result<&'a str> {
    let end = format!("</{name}>");
    let from = block.find(&format!("<{name}"));
    let (from, to) = from
        .zip(block.find(&end))
        .with_context(|| format!("the README's domain has no <{name}>"))?;
    Ok(&block[from..to + end.len()])
}

/// A domain with what the README has users write by hand, for this server and UUID.
pub(crate) fn hand_written(mut spec: Spec, uuid: &str, server: &str) -> Result<Spec> {
    let block = block("The domain's XML, by hand")?;
    ensure!(
        block.contains(SERVER) && block.contains("/UUID/"),
        "{block}"
    );
    let block = block
        .replace(SERVER, server)
        .replace("/UUID/", &format!("/{uuid}/"));
    let metadata = element(&block, "metadata")?;
    let metadata = metadata.trim_start_matches("<metadata>");
    metadata
        .trim_end_matches("</metadata>")
        .clone_into(&mut spec.metadata);
    spec.extra_elements = format!("<uuid>{uuid}</uuid>{}", element(&block, "memoryBacking")?);
    element(&block, "disk")?.clone_into(&mut spec.extra_devices);
    Ok(spec)
}
