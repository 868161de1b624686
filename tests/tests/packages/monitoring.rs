//! Dashboard and alerts ask only for metrics that the programs have.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::run_within;
use outram_tests::hermetic::sandbox::find_program;
use serde_json::Value;

use super::{LIMIT, Test, top};

pub(crate) const TESTS: &[Test] = &[
    ("the_dashboard_asks_for_metrics_that_exist", dashboard),
    ("alerts_ask_for_metrics_that_exist", alerts),
];

const DASHBOARD: &str = "libvirt-hooks/monitoring/grafana-dashboard.json";
const ALERTS: &str = "libvirt-hooks/monitoring/prometheus-alerts.yml";

/// Where the names of all metrics are recorded, each as "NAME KIND": the first two by tests that
/// compare them with the programs' pages.
const RECORDS: [&str; 3] = [
    "vmm-backend/src/daemon/metrics.rs",
    "memserver/tests/all/process.rs",
    "libvirt-hooks/src/metrics_page.rs",
];

/// The names under which samples of our programs appear.
fn known() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for record in RECORDS {
        let text = fs::read_to_string(top().join(record)).context(record)?;
        let before = names.len();
        for (at, _) in text.match_indices("outram_") {
            let mut words = text[at..].split([' ', '"', '\\']);
            let (name, kind) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            let suffixes: &[&str] = match kind {
                "gauge" => &[""],
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_count", "_sum"],
                _ => continue,
            };
            names.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
        }
        ensure!(names.len() > before, "{record} records no metrics any more");
    }
    Ok(names)
}

/// The names of our metrics in a text.
fn asked_for(text: &str) -> BTreeSet<String> {
    let part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !part_of_name(c))
        .filter(|word| word.starts_with("outram_"))
        .map(str::to_owned)
        .collect()
}

fn all_exist(asked: &BTreeSet<String>, at_least: usize) -> Result<()> {
    let known = known()?;
    let unknown: Vec<_> = asked.difference(&known).collect();
    ensure!(unknown.is_empty(), "no program has {unknown:?}");
    ensure!(
        asked.len() >= at_least,
        "only {} metrics are asked for: is the file read as it should be?",
        asked.len()
    );
    Ok(())
}

fn dashboard() -> Result<()> {
    let text = fs::read_to_string(top().join(DASHBOARD))?;
    let dashboard: Value = serde_json::from_str(&text).context("the dashboard is no JSON")?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let mut ids = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().context("a panel without a title")?;
        let id = panel["id"].as_u64().context("a panel without an id")?;
        ensure!(ids.insert(id), "'{title}' has the id of another panel");
        let queries = panel["targets"].as_array().map_or(0, Vec::len);
        ensure!(
            queries > 0 || panel["type"] == "row",
            "'{title}' shows nothing"
        );
    }
    all_exist(&asked_for(&text), 15)
}

fn alerts() -> Result<()> {
    let path = top().join(ALERTS);
    let text = fs::read_to_string(&path)?;
    all_exist(&asked_for(&text), 8)?;
    let count = |what: &str| text.matches(what).count();
    let alerts = count("- alert: ");
    for what in ["expr: ", "severity: ", "summary: ", "description: "] {
        ensure!(count(what) == alerts, "an alert lacks its '{what}'");
    }
    // Prometheus is large: its own check is made only where it happens to be.
    if find_program("promtool").is_some() {
        let finished = run_within(
            LIMIT,
            "promtool",
            &["check", "rules", &path.display().to_string()],
        )?;
        ensure!(finished.success(), "{}", finished.said());
    }
    Ok(())
}
