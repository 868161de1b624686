//! What holds for every workload; their results are tested where they are computed.

use super::*;

/// Small enough for a debug build, large enough for many pages.
const BYTES: usize = 1 << 20;

const WORDS_PER_PAGE: usize = 512;

fn parameters(bytes: usize, seed: u64) -> Parameters {
    Parameters {
        bytes,
        seed,
        compute: 0,
    }
}

/// Runs an entry in as much memory as it asks for, which held `garbage` before.
fn run(entry: &Entry, seed: u64, garbage: u64) -> Outcome {
    let mut workload = (entry.make)(&parameters(BYTES, seed));
    let mut memory = vec![garbage; workload.footprint() / 8];
    workload.prepare(&mut memory);
    workload.run(&mut memory)
}

#[test]
fn names_are_unlike_and_fit_a_command_line() {
    for (index, entry) in catalogue().iter().enumerate() {
        let name = entry.name;
        assert!(
            catalogue()[..index].iter().all(|other| other.name != name),
            "{name}"
        );
        assert!(
            name.bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        );
        assert!(entry.summary.contains("an operation is"), "{name}");
    }
}

#[test]
fn the_seed_alone_determines_the_outcome() {
    for entry in catalogue() {
        let outcome = run(entry, 1, 0);
        assert!(outcome.operations > 0, "{}", entry.name);
        for garbage in [0, u64::MAX, 0x0123_4567_89ab_cdef] {
            assert_eq!(
                run(entry, 1, garbage),
                outcome,
                "{}: garbage {garbage:x}",
                entry.name
            );
        }
        let other = run(entry, 2, 0);
        assert_ne!(other.checksum, outcome.checksum, "{}", entry.name);
    }
}

#[test]
fn a_workload_prepared_again_comes_to_the_same() {
    for entry in catalogue() {
        let mut workload = (entry.make)(&parameters(BYTES, 1));
        // Longer than asked for: the rest is left alone.
        let words = workload.footprint() / 8;
        let mut memory = vec![5; words + 1000];
        let outcomes = [0; 2].map(|_| {
            workload.prepare(&mut memory);
            workload.run(&mut memory)
        });
        assert_eq!(outcomes[0], outcomes[1], "{}", entry.name);
        assert!(
            memory[words..].iter().all(|&word| word == 5),
            "{}",
            entry.name
        );
    }
}

#[test]
fn the_footprint_is_what_was_wanted_and_nearly_all_is_used() {
    for entry in catalogue() {
        for bytes in [MINIMUM_BYTES, BYTES, BYTES + 12_345] {
            let mut workload = (entry.make)(&parameters(bytes, 1));
            let footprint = workload.footprint();
            assert!(footprint <= bytes, "{}: {footprint} of {bytes}", entry.name);
            assert!(
                footprint >= bytes * 9 / 10,
                "{}: {footprint} of {bytes}",
                entry.name
            );
            let untouched = 0x5a5a_1234_5a5a_1234;
            let mut memory = vec![untouched; footprint / 8];
            workload.prepare(&mut memory);
            workload.run(&mut memory);
            let pages = memory.chunks(WORDS_PER_PAGE);
            // Room that one more item would not fit into.
            let spare = if entry.name == "kv-32k" { 9 } else { 0 };
            let wanted = (pages.len() - spare) * 95 / 100;
            let used = pages
                .filter(|page| page.iter().any(|&word| word != untouched))
                .count();
            assert!(used >= wanted, "{}: {used} of {wanted} pages", entry.name);
        }
    }
}

#[test]
fn less_than_the_minimum_is_taken_as_the_minimum() {
    for entry in catalogue() {
        let footprint = |bytes| (entry.make)(&parameters(bytes, 1)).footprint();
        assert_eq!(footprint(0), footprint(MINIMUM_BYTES), "{}", entry.name);
    }
}

#[test]
fn wrong_bytes_in_the_memory_are_another_checksum() {
    // It reads nothing that was there before; what it leaves is summed up by whoever runs it.
    let reads = |entry: &&Entry| entry.name != "sequential-write";
    for entry in catalogue().iter().filter(reads) {
        let mut workload = (entry.make)(&parameters(BYTES, 1));
        let mut memory = vec![0; workload.footprint() / 8];
        workload.prepare(&mut memory);
        let outcome = workload.run(&mut memory);
        workload.prepare(&mut memory);
        // As a pager would that loses a run of pages, or gives one page for another.
        let pages = memory.len() / WORDS_PER_PAGE;
        memory.copy_within(..pages / 4 * WORDS_PER_PAGE, pages / 4 * WORDS_PER_PAGE);
        let run = std::panic::AssertUnwindSafe(|| workload.run(&mut memory));
        // An index out of bounds says it as well.
        if let Ok(other) = std::panic::catch_unwind(run) {
            assert_ne!(other.checksum, outcome.checksum, "{}", entry.name);
        }
    }
}
