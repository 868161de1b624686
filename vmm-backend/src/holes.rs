//! What a file has between its holes: of a file that is far larger than what lies in it, nobody looks at more.

use std::fs::File;
use std::io;
use std::ops::Range;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// The parts of a range of a file that have data, in order (lseek(2), `SEEK_DATA`).
pub(crate) fn data_in(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < range.end => data,
            // No data from here to the end.
            Ok(_) | Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        at = rustix::fs::seek(file, SeekFrom::Hole(data))?.min(range.end);
        parts.push(data..at);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn data_is_found_between_the_holes() {
        const PAGE: u64 = 4096;
        let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
        file.set_len(1 << 40).expect("a sparse file");
        for page in [3, 4, 70] {
            file.write_all_at(&[1; PAGE as usize], page * PAGE)
                .expect("room");
        }
        let data = |range| data_in(&file, range).expect("a file in memory");
        assert_eq!(data(0..1 << 40), [3 * PAGE..5 * PAGE, 70 * PAGE..71 * PAGE]);
        let (cut, end) = (4 * PAGE..5 * PAGE, 70 * PAGE + 9);
        assert_eq!(data(cut.start..end), [cut, 70 * PAGE..end]);
        assert_eq!(data(71 * PAGE..1 << 40), []);
    }
}
