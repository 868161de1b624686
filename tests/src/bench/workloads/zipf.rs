//! Ranks that are drawn as often as Zipf's law says.

use super::numbers::Random;

/// Draws rank `k` out of `1..=n` with a probability in proportion to `k^-theta`.
///
/// Rejection-inversion (Hörmann, Derflinger: "Rejection-inversion to generate variates from monotone
/// discrete distributions", 1996): constant space and time at any skew, where the formula that YCSB
/// has from Gray et al. (1994) needs the harmonic number and `theta < 1`.
#[derive(Clone, Debug)]
pub(super) struct Zipf {
    theta: f64,
    last: f64,
    /// The area under the hat from its left end, and up to `n + 1/2`.
    area_from: f64,
    area_to: f64,
    /// Up to this far below a rank, a point is within the rank's own area: no more to compute.
    sure: f64,
}

impl Zipf {
    /// Ranks `1..=n`, with a `theta` above 0 that is not 1.
    pub(super) fn new(n: usize, theta: f64) -> Self {
        assert!(n > 0 && theta > 0.0 && theta != 1.0, "Zipf of {n}, {theta}");
        let mut zipf = Self {
            theta,
            last: n as f64,
            area_from: 0.0,
            area_to: 0.0,
            sure: 0.0,
        };
        zipf.area_from = zipf.area(1.5) - 1.0;
        zipf.area_to = zipf.area(n as f64 + 0.5);
        zipf.sure = 2.0 - zipf.point(zipf.area(2.5) - zipf.height(2.0));
        zipf
    }

    /// The next rank.
    pub(super) fn draw(&self, random: &mut Random) -> usize {
        loop {
            let area = self.area_to + random.unit() * (self.area_from - self.area_to);
            let point = self.point(area);
            let rank = point.round().clamp(1.0, self.last);
            if rank - point <= self.sure || area >= self.area(rank + 0.5) - self.height(rank) {
                return rank as usize;
            }
        }
    }

    fn height(&self, x: f64) -> f64 {
        (-self.theta * x.ln()).exp()
    }

    /// The integral of the height from 1 to `x`.
    fn area(&self, x: f64) -> f64 {
        let power = 1.0 - self.theta;
        (power * x.ln()).exp_m1() / power
    }

    /// The inverse of `area`.
    fn point(&self, area: f64) -> f64 {
        let power = 1.0 - self.theta;
        ((power * area).ln_1p() / power).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_as_often_as_the_formula_says() {
        const RANKS: usize = 1000;
        const DRAWS: usize = 400_000;
        for theta in [0.5, 0.99, 1.2, 2.0] {
            let zipf = Zipf::new(RANKS, theta);
            let mut random = Random::new(7);
            let mut found = vec![0usize; RANKS + 1];
            for _ in 0..DRAWS {
                found[zipf.draw(&mut random)] += 1;
            }
            assert_eq!(found[0], 0);
            let weight = |rank: usize| (rank as f64).powf(-theta);
            let total: f64 = (1..=RANKS).map(weight).sum();
            // Single ranks at the front, and ever wider groups of them: down to the last one.
            for group in [1..=1, 2..=2, 3..=3, 4..=9, 10..=99, 100..=RANKS] {
                let wanted = group.clone().map(weight).sum::<f64>() / total * DRAWS as f64;
                let drawn = found[group.clone()].iter().sum::<usize>() as f64;
                // Five standard deviations.
                let slack = 5.0 * wanted.sqrt();
                assert!(
                    (drawn - wanted).abs() < slack,
                    "{theta} {group:?}: {drawn} instead of {wanted}"
                );
            }
        }
    }

    #[test]
    fn a_single_rank_is_all_there_is() {
        let zipf = Zipf::new(1, 1.2);
        let mut random = Random::new(1);
        assert!((0..100).all(|_| zipf.draw(&mut random) == 1));
    }
}
