//! `/proc/PID/maps`, as far as guest RAM is concerned.

use crate::handover::MemfdId;

/// How QEMU names the memfd of every `memory-backend-memfd`.
const BACKEND_PATH: &str = "/memfd:memory-backend-memfd";

/// A mapping, or several that lie one after the other in address and file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address beyond.
    pub end: u64,
    /// Mapped shared and writable.
    pub shared: bool,
    /// Offset in the file.
    pub offset: u64,
    /// The file.
    pub id: MemfdId,
}

impl Mapping {
    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.end - self.start
    }
}

/// One line; `None` where it is no mapping of a file.
fn parse_line(line: &str) -> Option<(Mapping, &str)> {
    // address perms offset dev inode path; the path is separated by spaces and may hold some.
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode: u64 = fields.next()?.parse().ok()?;
    if inode == 0 {
        return None;
    }
    let major = u32::from_str_radix(major, 16).ok()?;
    let minor = u32::from_str_radix(minor, 16).ok()?;
    let mapping = Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        shared: permissions == "rw-s",
        offset,
        id: MemfdId {
            device: libc::makedev(major, minor),
            inode,
        },
    };
    Some((mapping, fields.next().unwrap_or("").trim_start()))
}

/// Mappings of memory backends' memfds. Neighbours that continue each other count as one: the
/// kernel splits a mapping where its parts are watched by different userfaultfds.
pub(super) fn of_backends(maps: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in maps.lines() {
        let Some((mapping, path)) = parse_line(line) else {
            continue;
        };
        if path.trim_end_matches(" (deleted)") != BACKEND_PATH {
            continue;
        }
        match found.last_mut() {
            Some(last)
                if last.end == mapping.start
                    && last.id == mapping.id
                    && last.shared == mapping.shared
                    && last.offset + (last.end - last.start) == mapping.offset =>
            {
                last.end = mapping.end;
            }
            _ => found.push(mapping),
        }
    }
    found
}

/// Whether any of these files is mapped.
pub(super) fn maps_any(maps: &str, files: &[MemfdId]) -> bool {
    maps.lines()
        // Almost no line is a memfd's: the cheap test first.
        .filter(|line| line.contains("/memfd:"))
        .filter_map(parse_line)
        .any(|(mapping, _)| files.contains(&mapping.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
558d4fc5b000-558d4fd5f000 r--p 00000000 fe:01 393 /usr/bin/qemu-system-x86_64
558d50000000-558d50021000 rw-p 00000000 00:00 0                          [heap]
7efd87ffd000-7efd88ffd000 rw-s 00000000 00:01 136                        /memfd:memory-backend-memfd (deleted)
7efd88ffd000-7efd8fffd000 rw-s 01000000 00:01 136                        /memfd:memory-backend-memfd (deleted)
7efd8fffe000-7efd97ffe000 rw-p 00000000 00:01 135                        /memfd:memory-backend-memfd (deleted)
7efd98000000-7efd98001000 rw-s 00000000 00:01 137                        /memfd:other thing (deleted)
";

    #[test]
    fn parts_of_one_mapping_are_one() {
        let found = of_backends(MAPS);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].end - found[0].start, 128 << 20);
        assert!(found[0].shared);
        assert_eq!(found[0].id.inode, 136);
        assert!(!found[1].shared);
    }

    #[test]
    fn only_files_asked_for_are_seen() {
        let id = |inode| MemfdId {
            device: libc::makedev(0, 1),
            inode,
        };
        assert!(maps_any(MAPS, &[id(137)]));
        assert!(!maps_any(MAPS, &[id(393), id(138)]));
        assert!(!maps_any("nonsense\n-\n\n", &[id(1)]));
    }
}
