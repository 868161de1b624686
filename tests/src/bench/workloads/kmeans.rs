//! K-means by Lloyd's algorithm ("Least squares quantization in PCM", 1982): every round reads all
//! points and writes all labels.

use super::numbers::{Random, fold};
use super::{Outcome, Parameters, Workload};

/// Coordinates of a point: a cache line.
const DIMENSIONS: usize = 8;
const CLUSTERS: usize = 8;
const ROUNDS: usize = 4;

/// Half the width of a cloud of points, whose centres are up to 10 apart in each coordinate: they
/// overlap, so that a few rounds do not end the work.
const SPREAD: f64 = 3.0;

/// Points first, their labels behind.
pub(super) struct KMeans {
    points: usize,
    seed: u64,
}

/// By coordinate, then by cluster: all clusters' distances are summed up side by side.
type Centroids = [[f64; CLUSTERS]; DIMENSIONS];

/// What a round came to.
struct Round {
    /// The sum of the squared distances to the nearest centroids, before these moved.
    inertia: f64,
    /// How many points have another label than before: where none has, k-means has converged.
    relabelled: u64,
}

impl KMeans {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            points: parameters.words() / (DIMENSIONS + 1),
            seed: parameters.seed,
        }
    }

    /// The points and their labels.
    fn parts<'a>(&self, memory: &'a mut [u64]) -> (&'a mut [u64], &'a mut [u64]) {
        let (points, rest) = memory.split_at_mut(self.points * DIMENSIONS);
        (points, &mut rest[..self.points])
    }

    /// Points of the data, chosen at random (Forgy).
    fn first_centroids(&self, points: &[u64]) -> Centroids {
        let mut random = Random::new(!self.seed);
        let mut centroids = Centroids::default();
        for cluster in 0..CLUSTERS {
            let point = point(points, random.below(self.points));
            for (coordinate, row) in centroids.iter_mut().enumerate() {
                row[cluster] = point[coordinate];
            }
        }
        centroids
    }
}

impl Workload for KMeans {
    fn footprint(&self) -> usize {
        self.points * (DIMENSIONS + 1) * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        let mut random = Random::new(self.seed);
        let mut centres = [[0.0; DIMENSIONS]; CLUSTERS];
        for coordinate in centres.as_flattened_mut() {
            *coordinate = 10.0 * random.unit();
        }
        let (points, labels) = self.parts(memory);
        for point in points.chunks_exact_mut(DIMENSIONS) {
            let centre = &centres[random.below(CLUSTERS)];
            for (word, middle) in point.iter_mut().zip(centre) {
                *word = (middle + SPREAD * (random.unit() + random.unit() - 1.0)).to_bits();
            }
        }
        labels.fill(0);
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let (points, labels) = self.parts(memory);
        let mut centroids = self.first_centroids(points);
        let mut checksum = 0;
        for _ in 0..ROUNDS {
            let round = improve(points, labels, &mut centroids);
            checksum = fold(fold(checksum, round.inertia.to_bits()), round.relabelled);
        }
        let coordinates = centroids.as_flattened().iter();
        Outcome {
            operations: (ROUNDS * self.points) as u64,
            checksum: coordinates.fold(checksum, |sum, value| fold(sum, value.to_bits())),
        }
    }
}

/// One round: labels every point with the nearest centroid, and moves each centroid to the mean of
/// its points.
fn improve(points: &[u64], labels: &mut [u64], centroids: &mut Centroids) -> Round {
    let mut sums = [[0.0; DIMENSIONS]; CLUSTERS];
    let mut counts = [0u64; CLUSTERS];
    let mut round = Round {
        inertia: 0.0,
        relabelled: 0,
    };
    for (index, label) in labels.iter_mut().enumerate() {
        let point = point(points, index);
        let (cluster, distance) = nearest(&point, centroids);
        round.inertia += distance;
        round.relabelled += u64::from(*label != cluster as u64);
        *label = cluster as u64;
        counts[cluster] += 1;
        for (sum, coordinate) in sums[cluster].iter_mut().zip(point) {
            *sum += coordinate;
        }
    }
    for (cluster, &count) in counts.iter().enumerate() {
        // A centroid without points stays where it is.
        if count > 0 {
            for (coordinate, row) in centroids.iter_mut().enumerate() {
                row[cluster] = sums[cluster][coordinate] / count as f64;
            }
        }
    }
    round
}

/// The nearest centroid's cluster, and the squared distance to it.
fn nearest(point: &[f64; DIMENSIONS], centroids: &Centroids) -> (usize, f64) {
    let mut distances = [0.0; CLUSTERS];
    for (coordinate, row) in point.iter().zip(centroids) {
        for (distance, centroid) in distances.iter_mut().zip(row) {
            *distance += (coordinate - centroid) * (coordinate - centroid);
        }
    }
    let mut best = (0, distances[0]);
    for (cluster, &distance) in distances.iter().enumerate() {
        if distance < best.1 {
            best = (cluster, distance);
        }
    }
    best
}

fn point(points: &[u64], index: usize) -> [f64; DIMENSIONS] {
    let words = &points[index * DIMENSIONS..][..DIMENSIONS];
    std::array::from_fn(|coordinate| f64::from_bits(words[coordinate]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared() -> (KMeans, Vec<u64>) {
        let mut kmeans = KMeans::new(&Parameters {
            bytes: 1 << 20,
            seed: 4,
            compute: 0,
        });
        let mut memory = vec![0; kmeans.footprint() / 8];
        kmeans.prepare(&mut memory);
        (kmeans, memory)
    }

    #[test]
    fn the_inertia_never_rises_and_falls_at_first() {
        let (kmeans, mut memory) = prepared();
        let (points, labels) = kmeans.parts(&mut memory);
        let mut centroids = kmeans.first_centroids(points);
        let inertias: Vec<f64> = (0..30)
            .map(|_| improve(points, labels, &mut centroids).inertia)
            .collect();
        // Rounding alone may raise it.
        let falls = |two: &[f64]| two[1] <= two[0] * (1.0 + 1e-12);
        assert!(inertias.windows(2).all(falls), "{inertias:?}");
        assert!(inertias[29] < inertias[0] * 0.8, "{inertias:?}");
    }

    #[test]
    fn every_point_is_labelled_with_the_nearest_centroid_and_they_are_means() {
        let (kmeans, mut memory) = prepared();
        let (points, labels) = kmeans.parts(&mut memory);
        let before = kmeans.first_centroids(points);
        let mut after = before;
        improve(points, labels, &mut after);
        let mut members = vec![Vec::new(); CLUSTERS];
        for (index, &label) in labels.iter().enumerate() {
            let point = point(points, index);
            let distance = |cluster: usize| -> f64 {
                let squares = (0..DIMENSIONS).map(|d| (point[d] - before[d][cluster]).powi(2));
                squares.sum()
            };
            let least = (0..CLUSTERS).map(distance).fold(f64::MAX, f64::min);
            assert!(distance(label as usize) <= least + 1e-9);
            members[label as usize].push(point);
        }
        for (cluster, points) in members.iter().enumerate() {
            for (d, row) in after.iter().enumerate() {
                let mean = points.iter().map(|point| point[d]).sum::<f64>() / points.len() as f64;
                assert!((row[cluster] - mean).abs() < 1e-9, "{cluster}, {d}");
            }
        }
    }

    #[test]
    fn a_centroid_without_points_stays() {
        let points = [1f64.to_bits(); 2 * DIMENSIONS];
        let mut centroids = [[9.0; CLUSTERS]; DIMENSIONS];
        centroids.iter_mut().for_each(|row| row[3] = 2.0);
        let mut labels = [7, 3];
        let round = improve(&points, &mut labels, &mut centroids);
        assert_eq!((round.inertia, labels), (2.0 * DIMENSIONS as f64, [3, 3]));
        assert_eq!(round.relabelled, 1);
        assert_eq!(improve(&points, &mut labels, &mut centroids).relabelled, 0);
        assert_eq!((centroids[0][3], centroids[0][4]), (1.0, 9.0));
    }
}
