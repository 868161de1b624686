//! What the benchmark runs: programs whose data lie in one slice of memory.
//!
//! The memory may be paged underneath; nothing here knows of it. All data whose size matters are in
//! the slice, and what a workload keeps beside it is less than a hundredth of that. The same
//! parameters give the same operations and the same checksum, whatever the memory held before and
//! however it is paged: another checksum is another result, so some page came back with other bytes.
//!
//! The data are random numbers and hardly compress, but for the indices of graphs and the columns
//! of the data frame. Logarithms and powers are the system's own, so checksums of workloads that
//! draw from a distribution may differ between machines whose C libraries round differently.

mod data_frame;
mod graph;
mod graph_walks;
mod hash_table;
mod key_value;
mod kmeans;
mod lu;
mod numbers;
mod phases;
mod quicksort;
mod random_access;
mod sequential;
mod stream;
#[cfg(test)]
mod tests;
mod zipf;

/// The smallest data a workload is made for, in bytes; less is taken as this.
pub const MINIMUM_BYTES: usize = 256 << 10;

/// What a round of extra work takes, more or less: each waits for the one before.
pub const COMPUTE_NS: u32 = 4;

/// What a run came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How many operations it was, in the unit that the entry's summary names.
    pub operations: u64,
    /// Follows from the parameters alone.
    pub checksum: u64,
}

/// A program that works on one slice of memory.
pub trait Workload: Send {
    /// Bytes of memory it will use at most.
    fn footprint(&self) -> usize;

    /// Writes its inputs to the memory, front to back but for the index of a hash table. Not
    /// measured; goes before every run.
    ///
    /// # Panics
    ///
    /// If the memory is smaller than the footprint, as does `run`.
    fn prepare(&mut self, memory: &mut [u64]);

    /// The measured work. Deterministic: the checksum of its result depends on the parameters and
    /// the seed alone.
    fn run(&mut self, memory: &mut [u64]) -> Outcome;
}

/// What a workload is made from.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// Wanted size of the data in bytes; the workload fills it as far as whole elements go. At
    /// least [`MINIMUM_BYTES`].
    pub bytes: usize,
    /// Determines the data and the order in which they are used.
    pub seed: u64,
    /// Extra work for each operation, in rounds of SplitMix64; 0 is none. The
    /// sweep of AIFM (Ruan et al., OSDI 2020): the more a program computes between accesses, the
    /// less it sees of far memory. Honoured where an entry says so.
    ///
    /// [`COMPUTE_NS`] says what a round takes.
    pub compute: u32,
}

impl Parameters {
    /// How many words of 8 bytes the data may have.
    fn words(&self) -> usize {
        self.bytes.max(MINIMUM_BYTES) / 8
    }
}

/// A workload that can be made.
pub struct Entry {
    /// What it is called on a command line.
    pub name: &'static str,
    /// What it does, and what one operation is.
    pub summary: &'static str,
    /// Whether it does extra work for each operation where that is asked for.
    pub honours_compute: bool,
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
        honours_compute: false,
        make: |parameters| Box::new(sequential::SequentialWrite::new(parameters)),
    },
    Entry {
        name: "sequential-read",
        summary: "reads every word once, front to back; an operation is a page",
        honours_compute: false,
        make: |parameters| Box::new(sequential::SequentialRead::new(parameters)),
    },
    Entry {
        name: "random-read",
        summary: "reads single words, uniformly random, each place known only when the word before \
                  it is read; an operation is a word; honours compute",
        honours_compute: true,
        make: |parameters| Box::new(random_access::RandomRead::new(parameters)),
    },
    Entry {
        name: "random-update",
        summary: "reads, changes and writes single words, uniformly random, as HPCC's RandomAccess; \
                  an operation is a word; honours compute",
        honours_compute: true,
        make: |parameters| Box::new(random_access::RandomUpdate::new(parameters)),
    },
    Entry {
        name: "phases",
        summary: "random reads and writes in a quarter of the memory, which becomes another quarter \
                  sixteen times: after an operation for each 2 KiB of memory, not after a time; an \
                  operation is a word; honours compute",
        honours_compute: true,
        make: |parameters| Box::new(phases::Phases::new(parameters)),
    },
    Entry {
        name: "kv-etc",
        summary: "a hash table with memcached's ETC (Atikoglu et al. 2012): its sizes, its skew, 30 \
                  gets to a set; an operation is a get or a set; honours compute",
        honours_compute: true,
        make: |parameters| Box::new(key_value::KeyValue::etc(parameters)),
    },
    Entry {
        name: "kv-4k",
        summary: "a hash table with values of 4 KiB, Zipf of 0.99, 19 gets to a set, as YCSB's B; an \
                  operation is a get or a set; honours compute",
        honours_compute: true,
        make: |parameters| Box::new(key_value::KeyValue::four_kib(parameters)),
    },
    Entry {
        name: "kv-text",
        summary: "kv-4k with values that compress as the cold memory of a fleet (Lagar-Cavilla et al. \
                  2019): seven in ten to a third, the others not; an operation is a get or a set; \
                  honours compute",
        honours_compute: true,
        make: |parameters| Box::new(key_value::KeyValue::compressible(parameters)),
    },
    Entry {
        name: "kv-32k",
        summary: "the same with values of 32 KiB, as memcached's in the thesis on remote swap; an \
                  operation is a get or a set; honours compute",
        honours_compute: true,
        make: |parameters| Box::new(key_value::KeyValue::thirty_two_kib(parameters)),
    },
    Entry {
        name: "quicksort",
        summary: "sorts random words in place; an operation is a word sorted",
        honours_compute: false,
        make: |parameters| Box::new(quicksort::Quicksort::new(parameters)),
    },
    Entry {
        name: "stream",
        summary: "STREAM's copy, scale, add and triad, five times; an operation is an element \
                  written",
        honours_compute: false,
        make: |parameters| Box::new(stream::Stream::new(parameters)),
    },
    Entry {
        name: "kmeans",
        summary: "k-means, 8 clusters in 8 dimensions, four rounds; an operation is a point labelled",
        honours_compute: false,
        make: |parameters| Box::new(kmeans::KMeans::new(parameters)),
    },
    Entry {
        name: "pagerank",
        summary: "PageRank on a graph with power-law degrees, three rounds; an operation is an edge",
        honours_compute: false,
        make: |parameters| Box::new(graph_walks::PageRank::new(parameters)),
    },
    Entry {
        name: "bfs",
        summary: "two breadth-first searches of the same graph; an operation is an edge",
        honours_compute: false,
        make: |parameters| Box::new(graph_walks::BreadthFirst::new(parameters)),
    },
    Entry {
        name: "lu",
        summary: "LU factorisation of a tall matrix, blocked, with partial pivoting, as LINPACK's; an \
                  operation is a multiplication and a subtraction",
        honours_compute: false,
        make: |parameters| Box::new(lu::Lu::new(parameters)),
    },
    Entry {
        name: "data-frame",
        summary: "scans, filters and group-bys on a table of taxi trips by columns; an operation is a \
                  row that a query looks at",
        honours_compute: false,
        make: |parameters| Box::new(data_frame::DataFrame::new(parameters)),
    },
];
