//! Mangled domains: whatever a domain's XML contains, it is edited, refused with an error, or
//! found to be none of ours; never a panic.

use std::path::{Path, PathBuf};

use outram_libvirt::attachment;
use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::hook;
use outram_libvirt::host::Paths;

use crate::support::{RUN, attached, plain_request};

const ROUNDS: u64 = 3000;

/// Pieces that matter to us, put in at random places.
const PIECES: [&str; 12] = [
    "<outram:memory xmlns:outram=\"https://outram.dev/xmlns/domain/1\" local=\"1G\"/>",
    "<memoryBacking/>",
    "<metadata/>",
    "<uuid>x</uuid>",
    "<memory unit='YiB'>-1</memory>",
    "<disk type='vhostuser'><source path='/run/outram/x'/></disk>",
    "</devices>",
    "<!--",
    "&amp;",
    "&#0;",
    "]]>",
    "\u{0}\u{ffff}",
];

/// A xorshift generator: the seed that fails is printed, and always gives the same bytes.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }
}

fn mangle(text: &str, random: &mut Random) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let end = (at + random.below(60)).min(bytes.len());
        match random.below(4) {
            0 => drop(bytes.drain(at..end)),
            1 => bytes[at] = random.below(256) as u8,
            2 => {
                let copy = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, copy);
            }
            _ => {
                let piece = PIECES[random.below(PIECES.len())];
                bytes.splice(at..at, piece.bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn mangled_domains_never_panic() {
    // A backend that is not there: nothing is started, however good the domain.
    let paths = Paths {
        backend: Some(PathBuf::from("/nonexistent/outram-backend")),
        ..Paths::default()
    };
    // Attached, so that every part of ours is in them.
    let domains = ["virt-install.xml", "numa.xml", "backed.xml"].map(attached);
    for seed in 1..=ROUNDS {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let text = mangle(&domains[random.below(domains.len())], &mut random);
        let outcome = std::panic::catch_unwind(|| {
            let _ = hook::concerns_us(text.as_bytes(), &paths);
            assert!(hook::prepare(text.as_bytes(), &paths).is_err() || !text.contains(RUN));
            if let Ok(mut domain) = DomainXml::parse(&text) {
                let attached = attachment::attach(&mut domain, Path::new(RUN), &plain_request());
                // What was attached can be detached.
                if attached.is_ok() {
                    attachment::detach(&mut domain, Path::new(RUN)).expect("detached");
                }
            }
        });
        assert!(outcome.is_ok(), "seed {seed} fails with:\n{text}");
    }
}
