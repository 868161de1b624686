//! How long faults of a kind took between two moments: a backend's own figures are since it began, but the
//! histogram among its metrics only rises, so that one can be taken off another.

use anyhow::{Context, Result, ensure};

/// Faults of one kind that a backend has answered since it began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latencies {
    sum_seconds: f64,
    /// How many took no longer than so many seconds, in rising order; the last has all of them.
    below: Vec<(f64, u64)>,
}

impl Latencies {
    /// Reads those of a kind from a backend's metrics.
    pub fn read(metrics: &str, kind: &str) -> Result<Self> {
        let label = format!("outcome=\"{kind}\"");
        let mut latencies = Self::default();
        for line in metrics.lines().filter(|line| line.contains(&label)) {
            let Some(rest) = line.strip_prefix("outram_fault_latency_seconds_") else {
                continue;
            };
            let (labels, value) = rest.rsplit_once("} ").context(line.to_owned())?;
            if labels.starts_with("sum{") {
                latencies.sum_seconds = value.parse().context(line.to_owned())?;
            } else if let Some((_, bound)) = labels.split_once("le=\"") {
                let bound = bound.split('"').next().unwrap_or_default();
                // Rust reads '+Inf' as well.
                let bound = bound.parse().context(line.to_owned())?;
                let count = value.parse().context(line.to_owned())?;
                latencies.below.push((bound, count));
            }
        }
        let is_there = !latencies.below.is_empty();
        ensure!(is_there, "no latency of {kind} faults in: {metrics}");
        Ok(latencies)
    }

    /// Those answered after `before` was read from the same backend.
    pub fn since(&self, before: &Self) -> Self {
        let difference = |(now, before): (&(f64, u64), &(f64, u64))| (now.0, now.1 - before.1);
        Self {
            sum_seconds: self.sum_seconds - before.sum_seconds,
            below: self
                .below
                .iter()
                .zip(&before.below)
                .map(difference)
                .collect(),
        }
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.below.last().map_or(0, |(_, count)| *count)
    }

    /// Their mean, in microseconds.
    pub fn us_mean(&self) -> f64 {
        1e6 * self.sum_seconds / self.count() as f64
    }

    /// How long a share of them took at most, in microseconds: as exact as the histogram is, evenly spread
    /// within each of its spans, as Prometheus' `histogram_quantile` has it.
    pub fn us_quantile(&self, share: f64) -> f64 {
        let rank = share * self.count() as f64;
        let mut from = (0.0, 0);
        for (bound, count) in &self.below {
            if *count as f64 >= rank && *count > from.1 && bound.is_finite() {
                let part = (rank - from.1 as f64) / (count - from.1) as f64;
                return 1e6 * (from.0 + part * (bound - from.0));
            }
            if bound.is_finite() {
                from = (*bound, *count);
            }
        }
        1e6 * from.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(sum: &str, below: [u64; 3]) -> String {
        let [short, long, all] = below;
        let name = "outram_fault_latency_seconds";
        let labels = "vm=\"a\",domain=\"b\",outcome=\"remote\"";
        format!(
            "# TYPE {name} histogram\n{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {all}\n\
             {name}_bucket{{le=\"0.001\",{labels}}} {short}\n{name}_bucket{{le=\"0.002\",{labels}}} {long}\n\
             {name}_bucket{{le=\"+Inf\",{labels}}} {all}\n{name}_sum{{outcome=\"zero\"}} 9\n"
        )
    }

    #[test]
    fn only_what_came_between_is_counted() {
        let before = page("90.0", [1000, 1000, 1000]);
        let after = page("90.16", [1000, 1100, 1100]);
        let read = |page: &str| Latencies::read(page, "remote").expect("is well formed");
        let between = read(&after).since(&read(&before));
        assert_eq!(between.count(), 100);
        assert!((between.us_mean() - 1600.0).abs() < 0.01);
        assert!((between.us_quantile(0.5) - 1500.0).abs() < 0.01);
        // All together, most were short.
        assert!(read(&after).us_quantile(0.5) < 1000.0);
    }

    #[test]
    fn what_is_longer_than_all_spans_counts_as_the_longest() {
        let read = Latencies::read(&page("90.0", [0, 0, 2]), "remote").expect("is well formed");
        assert!((read.us_quantile(0.99) - 2000.0).abs() < 0.01);
    }

    #[test]
    fn a_page_without_them_is_an_error() {
        assert!(Latencies::read("# EOF\n", "remote").is_err());
    }
}
