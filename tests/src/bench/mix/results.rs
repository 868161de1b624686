//! What a mix came to.

use serde::{Deserialize, Serialize};

use super::super::phase::Run;
use super::super::ratios::Ratio;
use super::super::results::Figures;
use super::super::statistics::{Spread, geometric_mean, jain_index, worst_by_best};

/// A guest of a mix, in each of its situations; of each round, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestResults {
    /// What it ran.
    pub workload: String,
    /// Share of its memory that may be local.
    pub local_ratio: f64,
    /// Bytes of its memory.
    pub bytes: u64,
    /// Alone, with all memory local.
    pub alone_local: Vec<Run>,
    /// In the mix, with all memory of all guests local.
    pub mixed_local: Vec<Run>,
    /// Alone, at its local ratio.
    pub alone: Vec<Run>,
    /// In the mix, all guests at their local ratios.
    pub mixed: Vec<Run>,
    /// Runs that it began there before the slowest guest had ended its first, with that which counts.
    pub mixed_runs: Vec<u64>,
}

/// A mix.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixResults {
    /// Its workloads.
    pub name: String,
    /// Its guests.
    pub guests: Vec<GuestResults>,
    /// Values of the whole mix at its local ratios, while all guests were at work.
    pub figures: Figures,
}

/// What runs took.
pub fn seconds(runs: &[Run]) -> Vec<f64> {
    runs.iter().map(|run| run.seconds).collect()
}

/// What guests' times are divided by.
#[derive(Clone, Copy, Debug)]
pub enum Divisor {
    /// The same guest in the same mix, all local: what paging costs.
    MixedLocal,
    /// The same guest alone at the same local ratio: what neighbours cost.
    Alone,
}

impl GuestResults {
    /// How many times as long it took in the mix, of each round.
    pub fn slowdowns(&self, by: Divisor) -> Vec<f64> {
        let by = match by {
            Divisor::MixedLocal => &self.mixed_local,
            Divisor::Alone => &self.alone,
        };
        let pairs = seconds(&self.mixed).into_iter().zip(seconds(by));
        pairs.map(|(mixed, by)| mixed / by).collect()
    }
}

/// A measure of the whole mix: its name, what it is made of, how, and whether less of it is better.
type Measure = (&'static str, Divisor, fn(&[f64]) -> f64, bool);

const MEASURES: [Measure; 4] = [
    (
        "geometric mean of times ÷ in the mix, all local",
        Divisor::MixedLocal,
        geometric_mean,
        true,
    ),
    (
        "geometric mean of times ÷ alone",
        Divisor::Alone,
        geometric_mean,
        true,
    ),
    (
        "Jain's index of times ÷ alone",
        Divisor::Alone,
        jain_index,
        false,
    ),
    (
        "worst ÷ best of times ÷ alone",
        Divisor::Alone,
        worst_by_best,
        true,
    ),
];

impl MixResults {
    /// Of all guests together.
    pub fn measures(&self) -> Vec<Ratio> {
        let measured = MEASURES.iter().filter_map(|(name, by, of, is_less)| {
            let guests: Vec<_> = self.guests.iter().map(|one| one.slowdowns(*by)).collect();
            let rounds = guests.iter().map(Vec::len).min()?;
            let in_round =
                |round: usize| -> Vec<f64> { guests.iter().map(|guest| guest[round]).collect() };
            let values: Vec<f64> = (0..rounds).map(|round| of(&in_round(round))).collect();
            Some(self.ratio((*name).to_owned(), Spread::of(&values)?, *is_less))
        });
        measured.collect()
    }

    /// All that can be compared with another run.
    pub fn ratios(&self) -> Vec<Ratio> {
        let mut ratios = Vec::new();
        for (number, guest) in (1..).zip(&self.guests) {
            for (title, by) in [
                ("in the mix, all local", Divisor::MixedLocal),
                ("alone", Divisor::Alone),
            ] {
                let at = guest.local_ratio;
                let name = format!("guest {number}, {} at {at} ÷ {title}", guest.workload);
                let value = Spread::of(&guest.slowdowns(by));
                ratios.extend(value.map(|value| self.ratio(name, value, true)));
            }
        }
        ratios.extend(self.measures());
        ratios
    }

    fn ratio(&self, name: String, value: Spread, is_less_better: bool) -> Ratio {
        Ratio {
            group: self.name.clone(),
            name,
            value,
            is_less_better,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn runs(seconds: [f64; 2]) -> Vec<Run> {
        let run = |seconds| Run {
            seconds,
            cpu_seconds: seconds / 4.0,
            counters: [
                ("waited_us".to_owned(), (seconds * 5e5) as u64),
                ("evicted_pages".to_owned(), 77),
            ]
            .into(),
            ..Run::default()
        };
        seconds.map(run).to_vec()
    }

    /// Of two guests and two rounds, the second of them on a machine half as fast.
    pub(in crate::bench) fn sample() -> MixResults {
        let guest = |workload: &str, mixed: f64| GuestResults {
            workload: workload.to_owned(),
            local_ratio: 0.5,
            bytes: 1 << 20,
            alone_local: runs([0.5, 1.0]),
            mixed_local: runs([1.0, 2.0]),
            alone: runs([2.0, 4.0]),
            mixed: runs([mixed, mixed * 2.0]),
            mixed_runs: vec![1, 3],
        };
        MixResults {
            name: "quicksort + lu".to_owned(),
            guests: vec![guest("quicksort", 2.0), guest("lu", 6.0)],
            ..MixResults::default()
        }
    }

    #[test]
    fn slowdowns_are_within_a_round_and_fairness_is_of_them() {
        let ratios = sample().ratios();
        let found: Vec<(f64, f64)> = ratios
            .iter()
            .map(|ratio| (ratio.value.median, ratio.value.high))
            .collect();
        let wanted = [2.0, 1.0, 6.0, 3.0, 12_f64.sqrt(), 3_f64.sqrt(), 0.8, 3.0];
        assert_eq!(found.len(), wanted.len());
        for ((median, high), wanted) in found.into_iter().zip(wanted) {
            assert!((median - wanted).abs() < 1e-9, "{median} is not {wanted}");
            assert!((high - wanted).abs() < 1e-9, "{high} is not {wanted}");
        }
    }

    #[test]
    fn what_was_not_run_has_no_ratio() {
        let mut mix = sample();
        for guest in &mut mix.guests {
            guest.alone.clear();
        }
        assert_eq!(mix.measures().len(), 1);
        assert!(MixResults::default().ratios().is_empty());
    }
}
