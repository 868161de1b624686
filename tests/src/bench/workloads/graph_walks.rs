//! PageRank and breadth-first search on the graph of `graph.rs`.

use super::graph::{Graph, Parts};
use super::numbers::{Random, fold};
use super::{Outcome, Parameters, Workload};

/// The share of a page's rank that its links hand on (Brin, Page 1998).
const DAMPING: f64 = 0.85;

/// Rounds of PageRank: each reads all edges in order, and adds to ranks all over the place.
const ROUNDS: usize = 3;

/// Searches, each from another vertex: each reads all lists, but in no order.
const SEARCHES: usize = 2;

/// The distance of what no search has come to.
const UNREACHED: u64 = u64::MAX;

/// PageRank by power iteration.
pub(super) struct PageRank(Graph);

/// Breadth-first searches, top down.
pub(super) struct BreadthFirst {
    graph: Graph,
    seed: u64,
}

impl PageRank {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self(Graph::new(parameters.words(), parameters.seed))
    }
}

impl Workload for PageRank {
    fn footprint(&self) -> usize {
        self.0.words() * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        self.0.make(memory);
        let even = 1.0 / self.0.vertices as f64;
        self.0.parts(memory).one.fill(even.to_bits());
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let mut parts = self.0.parts(memory);
        for _ in 0..ROUNDS {
            hand_on(&mut parts);
        }
        Outcome {
            operations: (ROUNDS * self.0.edges) as u64,
            checksum: parts.one.iter().fold(0, |sum, &rank| fold(sum, rank)),
        }
    }
}

/// One round: from the ranks in `one` to those in `one`, by way of `other`.
fn hand_on(parts: &mut Parts<'_>) {
    let vertices = parts.one.len();
    let base = (1.0 - DAMPING) / vertices as f64;
    parts.other.fill(base.to_bits());
    for vertex in 0..vertices {
        let targets = parts.lists.of(vertex);
        let share = DAMPING * f64::from_bits(parts.one[vertex]) / targets.len() as f64;
        for &target in targets {
            let rank = &mut parts.other[target as usize];
            *rank = (f64::from_bits(*rank) + share).to_bits();
        }
    }
    std::mem::swap(&mut parts.one, &mut parts.other);
}

impl BreadthFirst {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            graph: Graph::new(parameters.words(), parameters.seed),
            seed: parameters.seed,
        }
    }
}

impl Workload for BreadthFirst {
    fn footprint(&self) -> usize {
        self.graph.words() * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        self.graph.make(memory);
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let mut parts = self.graph.parts(memory);
        let mut random = Random::new(!self.seed);
        let (mut operations, mut checksum) = (0, 0);
        for _ in 0..SEARCHES {
            operations += search(&mut parts, random.below(self.graph.vertices));
            let distances = parts.one.iter();
            checksum = distances.fold(checksum, |sum, &distance| fold(sum, distance));
        }
        Outcome {
            operations,
            checksum,
        }
    }
}

/// Leaves each vertex' distance from the root in `one`, and gives how many edges it looked at.
/// `other` is the queue: no vertex is in it twice, so it never runs over.
fn search(parts: &mut Parts<'_>, root: usize) -> u64 {
    parts.one.fill(UNREACHED);
    parts.one[root] = 0;
    parts.other[0] = root as u64;
    let (mut first, mut end, mut edges) = (0, 1, 0);
    while first < end {
        let vertex = parts.other[first] as usize;
        first += 1;
        let next = parts.one[vertex] + 1;
        let targets = parts.lists.of(vertex);
        edges += targets.len() as u64;
        for &target in targets {
            let distance = &mut parts.one[target as usize];
            if *distance == UNREACHED {
                *distance = next;
                parts.other[end] = target;
                end += 1;
            }
        }
    }
    edges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        Parameters {
            bytes: 1 << 20,
            seed: 6,
            compute: 0,
        }
    }

    #[test]
    fn ranks_sum_to_one_and_are_those_of_the_definition() {
        let mut page_rank = PageRank::new(&parameters());
        let mut memory = vec![0; page_rank.footprint() / 8];
        page_rank.prepare(&mut memory);
        let outcome = page_rank.run(&mut memory);
        page_rank.prepare(&mut memory);
        let graph = page_rank.0;
        let mut parts = graph.parts(&mut memory);
        (0..ROUNDS).for_each(|_| hand_on(&mut parts));
        let checksum = parts.one.iter().fold(0, |sum, &rank| fold(sum, rank));
        assert_eq!(outcome.checksum, checksum);
        let found: Vec<f64> = parts.one.iter().map(|&word| f64::from_bits(word)).collect();
        assert!((found.iter().sum::<f64>() - 1.0).abs() < 1e-9);

        // By the definition: what each vertex gets from those that link to it.
        let vertices = graph.vertices;
        let mut sources = vec![Vec::new(); vertices];
        for vertex in 0..vertices {
            for &target in parts.lists.of(vertex) {
                sources[target as usize].push(vertex);
            }
        }
        let mut ranks = vec![1.0 / vertices as f64; vertices];
        for _ in 0..ROUNDS {
            let share = |&source: &usize| ranks[source] / parts.lists.of(source).len() as f64;
            let base = (1.0 - DAMPING) / vertices as f64;
            ranks = sources
                .iter()
                .map(|sources| base + DAMPING * sources.iter().map(share).sum::<f64>())
                .collect();
        }
        for (vertex, (found, wanted)) in found.iter().zip(&ranks).enumerate() {
            assert!(
                (found / wanted - 1.0).abs() < 1e-9,
                "{vertex}: {found} {wanted}"
            );
        }
    }

    #[test]
    fn distances_satisfy_all_edges() {
        let mut search_all = BreadthFirst::new(&parameters());
        let mut memory = vec![0; search_all.footprint() / 8];
        search_all.prepare(&mut memory);
        let graph = search_all.graph;
        let mut parts = graph.parts(&mut memory);
        for root in [0, graph.vertices / 2, graph.vertices - 1] {
            let looked_at = search(&mut parts, root);
            let mut has_predecessor = vec![false; graph.vertices];
            has_predecessor[root] = true;
            let mut edges = 0;
            for vertex in (0..graph.vertices).filter(|&vertex| parts.one[vertex] != UNREACHED) {
                let targets = parts.lists.of(vertex);
                edges += targets.len() as u64;
                for &target in targets {
                    let (from, to) = (parts.one[vertex], parts.one[target as usize]);
                    assert!(to <= from + 1, "an edge from {from} to {to}");
                    has_predecessor[target as usize] |= to == from + 1;
                }
            }
            assert_eq!((parts.one[root], edges), (0, looked_at));
            let reached = (0..graph.vertices).filter(|&vertex| parts.one[vertex] != UNREACHED);
            assert!(reached.clone().all(|vertex| has_predecessor[vertex]));
            assert!(reached.count() > graph.vertices * 95 / 100);
        }
    }
}
