//! A directed graph whose degrees follow power laws, as lists of neighbours that lie one behind the
//! other (CSR).
//!
//! It is made in one pass over the memory. The out-degrees are those that a power law with the
//! exponent 2.5 gives to ranks, and targets are drawn in proportion to weights of `rank^(-2/3)`,
//! for in-degrees by a power law with 2.5 too: the static model of Goh, Kahng and Kim ("Universal
//! behavior of load distribution in scale-free networks", 2001). Every vertex has neighbours; loops
//! and repeated edges occur, as they do in Graph500's graphs.

use super::numbers::{Random, Scatter};

/// Edges for each vertex, on average: Graph500's.
const DEGREE_MEAN: f64 = 16.0;

/// Words for each vertex beside its edges: where its list ends, and two for the algorithm.
const WORDS_PER_VERTEX: usize = 3;

/// Its size; the graph itself is in the memory.
#[derive(Clone, Debug)]
pub(super) struct Graph {
    pub(super) vertices: usize,
    pub(super) edges: usize,
    seed: u64,
}

/// What lies in the memory.
pub(super) struct Parts<'a> {
    pub(super) lists: Lists<'a>,
    /// A word for each vertex, to use at will; not written when the graph is made.
    pub(super) one: &'a mut [u64],
    /// Another.
    pub(super) other: &'a mut [u64],
}

/// The edges.
pub(super) struct Lists<'a> {
    /// Where a vertex' list begins among the targets; that of its successor is where it ends.
    starts: &'a mut [u64],
    targets: &'a mut [u64],
}

impl Lists<'_> {
    /// The vertices that edges lead to from this one.
    pub(super) fn of(&self, vertex: usize) -> &[u64] {
        let [start, end] = [self.starts[vertex], self.starts[vertex + 1]];
        &self.targets[start as usize..end as usize]
    }
}

impl Graph {
    /// As large as fits.
    pub(super) fn new(words: usize, seed: u64) -> Self {
        let with = |vertices: usize| Self {
            vertices,
            edges: (0..vertices).map(|rank| degree(rank, vertices)).sum(),
            seed,
        };
        // Degrees are whole, so there are fewer edges than the mean says: as many vertices as fit
        // with as many edges as a guess has, and less where that is still too many.
        let guess = with(words / (WORDS_PER_VERTEX + DEGREE_MEAN as usize));
        let mut graph = with(guess.vertices * (words - 1) / guess.words());
        while graph.words() > words {
            graph = with(graph.vertices - graph.vertices.div_ceil(1000));
        }
        graph
    }

    /// Words of memory that it takes.
    pub(super) fn words(&self) -> usize {
        self.vertices * WORDS_PER_VERTEX + 1 + self.edges
    }

    pub(super) fn parts<'a>(&self, memory: &'a mut [u64]) -> Parts<'a> {
        let (starts, rest) = memory.split_at_mut(self.vertices + 1);
        let (one, rest) = rest.split_at_mut(self.vertices);
        let (other, rest) = rest.split_at_mut(self.vertices);
        let targets = &mut rest[..self.edges];
        let lists = Lists { starts, targets };
        Parts { lists, one, other }
    }

    /// Writes the edges.
    pub(super) fn make(&self, memory: &mut [u64]) {
        let Lists { starts, targets } = self.parts(memory).lists;
        // Who has many neighbours, and who is the neighbour of many, is anywhere in the memory.
        let ranks = Scatter::new(self.vertices, self.seed);
        let vertices = Scatter::new(self.vertices, !self.seed);
        let mut random = Random::new(self.seed);
        let mut start = 0;
        let (last, first) = starts.split_last_mut().expect("one more than vertices");
        for (vertex, begin) in first.iter_mut().enumerate() {
            *begin = start as u64;
            let end = start + degree(ranks.of(vertex), self.vertices);
            for target in &mut targets[start..end] {
                // The cube of an even number is below `x` in a share `x^(1/3)` of cases, whose
                // density falls as `x^(-2/3)`.
                let place = random.unit().powi(3) * self.vertices as f64;
                *target = vertices.of(place as usize) as u64;
            }
            start = end;
        }
        *last = start as u64;
    }
}

/// How many edges the vertex has that is the `rank`th in this, from 0.
fn degree(rank: usize, vertices: usize) -> usize {
    // The mean of `x^(-2/3)` from 0 to 1 is 3.
    let scale = (vertices as f64 / (rank as f64 + 0.5)).cbrt();
    (DEGREE_MEAN / 3.0 * scale * scale) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = 1 << 17;

    #[test]
    fn the_graph_fits_and_fills_what_it_is_given() {
        for words in [1 << 15, WORDS, WORDS + 4321, 1 << 20] {
            let graph = Graph::new(words, 1);
            assert!(graph.words() <= words);
            assert!(
                graph.words() >= words * 99 / 100,
                "{} of {words}",
                graph.words()
            );
            let mean = graph.edges as f64 / graph.vertices as f64;
            assert!((14.0..16.0).contains(&mean), "{mean}");
        }
    }

    #[test]
    fn every_list_is_within_the_graph_and_none_is_empty() {
        let graph = Graph::new(WORDS, 1);
        let mut memory = vec![u64::MAX; graph.words()];
        graph.make(&mut memory);
        let lists = graph.parts(&mut memory).lists;
        let mut edges = 0;
        for vertex in 0..graph.vertices {
            let list = lists.of(vertex);
            assert!(!list.is_empty());
            assert!(list.iter().all(|&target| target < graph.vertices as u64));
            edges += list.len();
        }
        assert_eq!(edges, graph.edges);
    }

    #[test]
    fn degrees_follow_their_power_laws() {
        let graph = Graph::new(1 << 20, 1);
        let mut memory = vec![0; graph.words()];
        graph.make(&mut memory);
        let lists = graph.parts(&mut memory).lists;
        let out: Vec<usize> = (0..graph.vertices)
            .map(|vertex| lists.of(vertex).len())
            .collect();
        let mut into = vec![0; graph.vertices];
        lists
            .targets
            .iter()
            .for_each(|&target| into[target as usize] += 1);
        for (mut degrees, name) in [(out, "out"), (into, "in")] {
            degrees.sort_unstable_by(|a, b| b.cmp(a));
            // The first share `x` of the vertices has a share `x^(1/3)` of the edges.
            for share in [0.01, 0.1, 0.5] {
                let first = (graph.vertices as f64 * share) as usize;
                let found = degrees[..first].iter().sum::<usize>() as f64 / graph.edges as f64;
                let wanted = f64::cbrt(share);
                assert!(
                    (found / wanted - 1.0).abs() < 0.1,
                    "{name}: {found} not {wanted}"
                );
            }
        }
    }
}
