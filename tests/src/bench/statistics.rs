//! Distributions of latencies, and the medians and spreads of several runs.

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest latency that is told apart: what takes longer counts as this.
const LONGEST_NS: u64 = 600_000_000_000;
/// Figures that are kept of each latency: errors stay below a thousandth.
const FIGURES: u8 = 3;

/// Latencies in nanoseconds.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, FIGURES);
        Self(histogram.expect("the bounds are sound"))
    }
}

impl Latencies {
    /// Notes one.
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("their bounds are alike");
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The latency that `percent` of them are not above, in nanoseconds; 0 where there are none.
    pub fn percentile(&self, percent: f64) -> u64 {
        match self.0.is_empty() {
            true => 0,
            false => self.0.value_at_percentile(percent),
        }
    }

    /// A percentile in microseconds.
    pub fn us(&self, percent: f64) -> f64 {
        self.percentile(percent) as f64 / 1000.0
    }

    /// Each latency that occurred, with how often, in rising order.
    pub fn pairs(&self) -> Vec<(u64, u64)> {
        self.0
            .iter_recorded()
            .map(|step| (step.value_iterated_to(), step.count_at_value()))
            .collect()
    }

    /// From what [`Latencies::pairs`] gave, as JSON.
    pub fn from_json(value: &Value) -> Result<Self> {
        let pairs: Vec<(u64, u64)> = serde_json::from_value(value.clone())?;
        Self::from_pairs(&pairs)
    }

    /// From what [`Latencies::pairs`] gave.
    pub fn from_pairs(pairs: &[(u64, u64)]) -> Result<Self> {
        let mut latencies = Self::default();
        for &(ns, count) in pairs {
            ensure!(count > 0, "a latency of {ns} ns that never occurred");
            latencies.0.saturating_record_n(ns.max(1), count);
        }
        Ok(latencies)
    }
}

/// A distribution as it is kept in a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distribution {
    /// How many latencies.
    pub count: u64,
    /// Median in nanoseconds.
    pub ns_p50: u64,
    /// 90th percentile.
    pub ns_p90: u64,
    /// 99th percentile.
    pub ns_p99: u64,
    /// 99.9th percentile.
    pub ns_p999: u64,
    /// The longest.
    pub ns_max: u64,
    /// Each latency in nanoseconds with how often it occurred, in rising order.
    pub pairs: Vec<(u64, u64)>,
}

impl From<&Latencies> for Distribution {
    fn from(latencies: &Latencies) -> Self {
        Self {
            count: latencies.count(),
            ns_p50: latencies.percentile(50.0),
            ns_p90: latencies.percentile(90.0),
            ns_p99: latencies.percentile(99.0),
            ns_p999: latencies.percentile(99.9),
            ns_max: latencies.percentile(100.0),
            pairs: latencies.pairs(),
        }
    }
}

/// What several runs came to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The median; of an even number of runs, the mean of the two in the middle.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
    /// How many runs.
    pub runs: usize,
}

impl Spread {
    /// Of these runs' values; `None` where there is none, or one is no number.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        };
        Some(Self {
            median,
            low: sorted[0],
            high: sorted[sorted.len() - 1],
            runs: sorted.len(),
        })
    }

    /// Of ratios run by run: what loads the machine during one run loads both of its values. Runs
    /// that one of the two lacks are left out.
    pub fn of_ratios(values: &[f64], to: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> = values
            .iter()
            .zip(to)
            .map(|(value, to)| value / to)
            .collect();
        Self::of(&ratios)
    }

    /// Whether the two have no value in common. Of single values, that says nothing.
    pub fn is_apart_from(&self, other: &Self) -> bool {
        self.high < other.low || other.high < self.low
    }
}

/// The mean of ratios.
pub fn geometric_mean(ratios: &[f64]) -> f64 {
    let logarithms: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    (logarithms / ratios.len() as f64).exp()
}

/// Jain's index of fairness: 1 where all values are alike, 1 ÷ their number where one has it all. (Jain,
/// Chiu, Hawe: A Quantitative Measure of Fairness, DEC TR-301, 1984)
pub fn jain_index(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    sum * sum / (values.len() as f64 * squares)
}

/// The largest by the smallest.
pub fn worst_by_best(values: &[f64]) -> f64 {
    let worst = values.iter().copied().fold(f64::MIN, f64::max);
    let best = values.iter().copied().fold(f64::MAX, f64::min);
    worst / best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_that_are_slowed_down_alike_are_treated_fairly() {
        assert_eq!(jain_index(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(worst_by_best(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(jain_index(&[1.0, 0.0, 0.0, 0.0]), 0.25);
        // (1 + 3)² / (2 · (1 + 9))
        assert_eq!(jain_index(&[1.0, 3.0]), 0.8);
        assert_eq!(worst_by_best(&[1.5, 6.0, 3.0]), 4.0);
        assert!((geometric_mean(&[1.0, 4.0]) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn percentiles_are_those_of_what_was_recorded() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentile(50.0), 0);
        for ns in 1..=1000 {
            latencies.record(ns * 1000);
        }
        let distribution = Distribution::from(&latencies);
        let near = |found: u64, wanted: u64| found.abs_diff(wanted) <= wanted / 500;
        assert_eq!(distribution.count, 1000);
        assert!(near(distribution.ns_p50, 500_000), "{distribution:?}");
        assert!(near(distribution.ns_p90, 900_000), "{distribution:?}");
        assert!(near(distribution.ns_p999, 999_000), "{distribution:?}");
        assert!(near(distribution.ns_max, 1_000_000), "{distribution:?}");
    }

    #[test]
    fn distributions_come_back_from_their_pairs() {
        let mut latencies = Latencies::default();
        for ns in [0, 3, 3, 70_000, 2_000_000, u64::MAX] {
            latencies.record(ns);
        }
        let again = Latencies::from_pairs(&latencies.pairs()).expect("sound pairs");
        assert_eq!(Distribution::from(&again), Distribution::from(&latencies));
        let mut twice = again.clone();
        twice.add(&latencies);
        assert_eq!(twice.count(), 12);
        assert_eq!(twice.percentile(50.0), latencies.percentile(50.0));
        assert!(Latencies::from_pairs(&[(5, 0)]).is_err());
    }

    #[test]
    fn spreads_are_of_medians_and_extremes() {
        let odd = Spread::of(&[3.0, 1.0, 2.0]).expect("values");
        assert_eq!(
            (odd.median, odd.low, odd.high, odd.runs),
            (2.0, 1.0, 3.0, 3)
        );
        assert_eq!(Spread::of(&[4.0, 1.0]).expect("values").median, 2.5);
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[1.0, f64::NAN]), None);
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
    }

    #[test]
    fn ratios_are_run_by_run() {
        // The second run was on a machine half as fast: its ratio is the same.
        let ratio = Spread::of_ratios(&[3.0, 6.0, 9.0], &[1.0, 2.0]).expect("values");
        assert_eq!(
            (ratio.median, ratio.low, ratio.high, ratio.runs),
            (3.0, 3.0, 3.0, 2)
        );
    }

    #[test]
    fn spreads_that_touch_are_not_apart() {
        let of = |values: &[f64]| Spread::of(values).expect("values");
        assert!(of(&[1.0, 2.0]).is_apart_from(&of(&[2.1, 3.0])));
        assert!(of(&[2.1, 3.0]).is_apart_from(&of(&[1.0, 2.0])));
        assert!(!of(&[1.0, 2.0]).is_apart_from(&of(&[2.0, 3.0])));
    }
}
