//! Size of a domain's pages, by its `<memoryBacking>`: all of its memory has pages of one size, of
//! 4 KiB or of 2 MiB.
//!
//! See <https://libvirt.org/formatdomain.html#memory-backing>. What QEMU really has is looked at
//! again when it hands its memory over.

use std::fs;

use outram_wire::units::{PageSize, format_size, parse_size};
use xot::Node;

use crate::domain_xml::DomainXml;
use crate::refusal::Refusal;

/// What says the size of huge pages where the domain does not.
const MEMINFO: &str = "/proc/meminfo";

/// The size of a domain's pages, or why they cannot be paged.
pub fn find(domain: &DomainXml) -> Result<PageSize, Refusal> {
    let Some(hugepages) = domain.find(&["memoryBacking", "hugepages"]) else {
        return Ok(PageSize::BASE);
    };
    let pages = domain.children(hugepages, "page");
    if pages.is_empty() {
        return huge(default_bytes());
    }
    for page in &pages {
        huge(bytes_of(domain, *page))?;
    }
    let sets: Vec<Option<&str>> = pages
        .iter()
        .map(|page| domain.attribute(*page, "nodeset"))
        .collect();
    if sets.iter().any(Option::is_none) {
        return Ok(PageSize::HUGE);
    }
    let cells: Vec<u32> = cells(domain);
    let uncovered = cells
        .into_iter()
        .find(|cell| !sets.iter().flatten().any(|set| contains(set, *cell)));
    match uncovered {
        Some(cell) => Err(Refusal::MixedPages(cell)),
        None => Ok(PageSize::HUGE),
    }
}

fn huge(bytes: Option<u64>) -> Result<PageSize, Refusal> {
    match bytes {
        Some(bytes) if bytes == PageSize::HUGE.bytes() => Ok(PageSize::HUGE),
        Some(bytes) => Err(Refusal::HugePageSize(format_size(bytes))),
        None => Err(Refusal::HugePageSize("an unknown size".to_owned())),
    }
}

fn bytes_of(domain: &DomainXml, page: Node) -> Option<u64> {
    let size = domain.attribute(page, "size")?;
    let unit = domain.attribute(page, "unit").unwrap_or("KiB");
    parse_size(&format!("{size}{unit}")).ok()
}

/// Size of the host's huge pages where nothing else is said.
fn default_bytes() -> Option<u64> {
    let text = fs::read_to_string(MEMINFO).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    parse_size(&line.trim().replace("kB", "KiB")).ok()
}

/// Numbers of the NUMA cells; a guest without any is its own cell 0.
fn cells(domain: &DomainXml) -> Vec<u32> {
    let Some(numa) = domain.find(&["cpu", "numa"]) else {
        return vec![0];
    };
    let cells = domain.children(numa, "cell");
    // A cell without an id has its place for one.
    (0..)
        .zip(cells)
        .map(|(place, cell)| {
            let id = domain.attribute(cell, "id").and_then(|id| id.parse().ok());
            id.unwrap_or(place)
        })
        .collect()
}

/// Whether a set such as `0-3,^2,7` has a number. What is not understood has none.
fn contains(set: &str, number: u32) -> bool {
    let mut found = false;
    for part in set.split(',').map(str::trim) {
        let (excluded, range) = match part.strip_prefix('^') {
            Some(range) => (true, range),
            None => (false, part),
        };
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
            return false;
        };
        if (first..=last).contains(&number) {
            found = !excluded;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(backing: &str, cells: &str) -> Result<PageSize, Refusal> {
        let xml = format!(
            "<domain type='kvm'><name>x</name><memoryBacking>{backing}</memoryBacking>\
             <cpu><numa>{cells}</numa></cpu></domain>"
        );
        find(&DomainXml::parse(&xml).expect("sound XML"))
    }

    #[test]
    fn sizes_and_cells_decide() {
        let page = |more: &str| format!("<hugepages><page {more}/></hugepages>");
        let two = "<cell id='0'/><cell id='1'/>";
        assert_eq!(found("", two), Ok(PageSize::BASE));
        let sized = page("size='2048' unit='KiB'");
        assert_eq!(found(&sized, two), Ok(PageSize::HUGE));
        assert_eq!(
            found(&page("size='2' unit='MiB' nodeset='0-1'"), two),
            Ok(PageSize::HUGE)
        );
        let partly = found(&page("size='2048' nodeset='0'"), two);
        assert_eq!(partly, Err(Refusal::MixedPages(1)));
        let large = found(&page("size='1' unit='GiB'"), two);
        assert_eq!(large, Err(Refusal::HugePageSize("1 GiB".to_owned())));
        let both = "<hugepages><page size='2048' nodeset='0'/><page size='1048576' nodeset='1'/>\
                    </hugepages>";
        assert!(matches!(found(both, two), Err(Refusal::HugePageSize(_))));
    }

    #[test]
    fn sets_are_read_as_libvirt_reads_them() {
        for (set, number, is_in) in [
            ("0", 0, true),
            ("1-3", 0, false),
            ("0-3,^2", 2, false),
            ("0-3,^2,7", 7, true),
            ("all", 0, false),
        ] {
            assert_eq!(contains(set, number), is_in, "{number} in {set}");
        }
    }
}
