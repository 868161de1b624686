//! One OpenMetrics page made of many: each guest's backend has one of its own, and a metric may be
//! described only once in a page.

use std::fmt::Write as _;

/// A metric, its description and all of its samples.
#[derive(Default)]
struct Family {
    name: String,
    description: Vec<String>,
    samples: Vec<String>,
}

/// Joins pages: each metric once, with the samples of all.
pub fn join(pages: &[String]) -> String {
    let mut families: Vec<Family> = Vec::new();
    for page in pages {
        let mut current = None;
        for line in page.lines() {
            match described(line) {
                Some(name) => {
                    let known = families.iter().position(|family| family.name == name);
                    let index = known.unwrap_or_else(|| {
                        families.push(Family {
                            name: name.to_owned(),
                            ..Family::default()
                        });
                        families.len() - 1
                    });
                    current = Some(index);
                    let family = &mut families[index];
                    // Builds may word it differently, and a page may say it only once.
                    let of_its_kind = |known: &String| keyword(known) == keyword(line);
                    if !family.description.iter().any(of_its_kind) {
                        family.description.push(line.to_owned());
                    }
                }
                None if line.starts_with('#') || line.is_empty() => {}
                // Backends describe every metric before its samples.
                None => {
                    if let Some(index) = current {
                        families[index].samples.push(line.to_owned());
                    }
                }
            }
        }
    }
    let mut text = String::new();
    for family in &families {
        for line in family.description.iter().chain(&family.samples) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text.push_str("# EOF\n");
    text
}

/// The metric that a line describes, if it does so.
fn described(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("# ")?;
    let (what, rest) = rest.split_once(' ')?;
    matches!(what, "HELP" | "TYPE" | "UNIT")
        .then(|| rest.split(' ').next())
        .flatten()
}

/// What a line tells of its metric: HELP, TYPE or UNIT.
fn keyword(line: &str) -> Option<&str> {
    line.split(' ').nth(1)
}

/// The page that says of each guest, by UUID and name, whether its backend answers.
pub fn answering(guests: &[(String, String, bool)]) -> String {
    let mut text = String::from(
        "# HELP outram_up 1 where the guest's backend answers, 0 where it is silent or gone.\n# TYPE outram_up gauge\n",
    );
    for (vm, domain, answers) in guests {
        let domain = escaped(domain);
        // A string takes whatever is written.
        let _ = writeln!(
            text,
            "outram_up{{vm=\"{vm}\",domain=\"{domain}\"}} {}",
            u8::from(*answers)
        );
    }
    text
}

/// A label's value as OpenMetrics has it.
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_is_described_once_with_the_samples_of_all() {
        let page = |vm: &str, faults: u32| {
            format!(
                "# HELP a_bytes Bytes.\n# TYPE a_bytes gauge\n# UNIT a_bytes bytes\na_bytes{{vm=\"{vm}\"}} 1\n\
                 # HELP b Faults.\n# TYPE b counter\nb_total{{vm=\"{vm}\"}} {faults}\n# EOF\n"
            )
        };
        assert_eq!(
            join(&[page("x", 3), page("y", 4)]),
            "# HELP a_bytes Bytes.\n# TYPE a_bytes gauge\n# UNIT a_bytes bytes\n\
             a_bytes{vm=\"x\"} 1\na_bytes{vm=\"y\"} 1\n\
             # HELP b Faults.\n# TYPE b counter\nb_total{vm=\"x\"} 3\nb_total{vm=\"y\"} 4\n# EOF\n"
        );
    }

    #[test]
    fn a_metric_that_builds_describe_differently_is_described_once() {
        let page = |help: &str, vm: &str| {
            format!("# HELP b {help}\n# TYPE b counter\nb_total{{vm=\"{vm}\"}} 1\n# EOF\n")
        };
        assert_eq!(
            join(&[page("Faults.", "x"), page("Page faults.", "y")]),
            "# HELP b Faults.\n# TYPE b counter\nb_total{vm=\"x\"} 1\nb_total{vm=\"y\"} 1\n# EOF\n"
        );
    }

    #[test]
    fn no_page_is_an_empty_page() {
        assert_eq!(join(&[]), "# EOF\n");
    }

    #[test]
    fn odd_names_stay_within_their_label() {
        let guests = [("u".to_owned(), "a\"b\\c\nd".to_owned(), false)];
        let text = answering(&guests);
        assert!(
            text.ends_with("outram_up{vm=\"u\",domain=\"a\\\"b\\\\c\\nd\"} 0\n"),
            "{text}"
        );
    }
}
