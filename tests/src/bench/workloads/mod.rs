//! What the benchmark runs: programs whose data lie in one slice of memory.

mod sequential;

/// What a run came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How many operations it was, in the unit that the entry's summary names.
    pub operations: u64,
    /// Follows from the parameters alone.
    pub checksum: u64,
}

/// A program that works on one slice of memory.
pub trait Workload {
    /// Bytes of memory it will use at most.
    fn footprint(&self) -> usize;

    /// Writes its inputs to the memory, front to back. Not measured; goes before every run.
    fn prepare(&mut self, memory: &mut [u64]);

    /// The measured work. Deterministic: the checksum of its result depends on the parameters and
    /// the seed alone.
    fn run(&mut self, memory: &mut [u64]) -> Outcome;
}

/// What a workload is made from.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// Wanted size of the data in bytes.
    pub bytes: usize,
    /// Determines the data and the order in which they are used.
    pub seed: u64,
    /// Extra work for each operation; 0 is none.
    pub compute: u32,
}

/// A workload that can be made.
pub struct Entry {
    /// What it is called on a command line.
    pub name: &'static str,
    /// What it does, and what one operation is.
    pub summary: &'static str,
    /// Makes one.
    pub make: fn(&Parameters) -> Box<dyn Workload>,
}

/// All workloads.
pub fn catalogue() -> &'static [Entry] {
    CATALOGUE
}

static CATALOGUE: &[Entry] = &[
    Entry {
        name: "sequential-write",
        summary: "writes every word once, front to back; an operation is a page",
        make: |parameters| Box::new(sequential::SequentialWrite::new(parameters)),
    },
    Entry {
        name: "sequential-read",
        summary: "reads every word once, front to back; an operation is a page",
        make: |parameters| Box::new(sequential::SequentialRead::new(parameters)),
    },
];
