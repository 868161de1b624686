//! The fuzz targets' committed inputs, once each: what was found stays mended, and the targets build.

#[path = "../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "a library of its own")]
mod fuzz;

use std::fs;
use std::path::Path;

/// What seeds of a target are there for at least.
const LEAST: usize = 3;

#[test]
fn every_seed_keeps_its_promises() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    for (name, target) in fuzz::TARGETS {
        let folder = fs::read_dir(seeds.join(name)).expect("a folder of seeds");
        let files: Vec<_> = folder.map(|file| file.expect("a file").path()).collect();
        assert!(files.len() >= LEAST, "{name} has {} seeds", files.len());
        for file in files {
            // The test's output is shown where it fails: this is the last line then.
            println!("{}", file.display());
            target(&fs::read(&file).expect("readable"));
        }
    }
}

#[test]
fn every_target_is_a_program() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/Cargo.toml");
    let manifest = fs::read_to_string(manifest).expect("readable");
    let programs = manifest.matches("[[bin]]").count();
    assert_eq!(programs, fuzz::TARGETS.len());
    for (name, _) in fuzz::TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
    }
}
