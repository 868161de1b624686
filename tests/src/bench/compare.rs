//! Two runs beside each other: an earlier build and a later one, or two machines.

use std::fmt::Write;

use super::ratios::Ratio;
use super::report::short;
use super::results::Results;

/// How a number changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The two runs have values in common: no more than noise is shown.
    Alike,
    /// Every value of the second is better than every one of the first.
    Better,
    /// The other way round.
    Worse,
    /// One of the two has but one value, which does not tell what noise is.
    OneRound,
}

/// What became of a number.
pub fn judge(before: &Ratio, after: &Ratio) -> Verdict {
    let is_single = before.value.runs < 2 || after.value.runs < 2;
    if is_single && !before.is_counted() {
        return Verdict::OneRound;
    }
    if !before.value.is_apart_from(&after.value) {
        return Verdict::Alike;
    }
    match (after.value.median < before.value.median) == before.is_less_better {
        true => Verdict::Better,
        false => Verdict::Worse,
    }
}

/// Both runs' ratios as a table; those that only one has are named below it.
pub fn text(before: &Results, after: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, before, after);
    text
}

fn write(out: &mut String, before: &Results, after: &Results) -> std::fmt::Result {
    let (one, other) = (&before.machine, &after.machine);
    let differ = [
        ("processors", one.processor != other.processor),
        ("kernels", one.kernel != other.kernel),
        ("layouts", one.layout != other.layout),
        (
            "settings",
            before.quick != after.quick || before.arguments != after.arguments,
        ),
    ];
    let differ: Vec<&str> = differ
        .iter()
        .filter(|(_, differs)| *differs)
        .map(|(what, _)| *what)
        .collect();
    if !differ.is_empty() {
        writeln!(
            out,
            "Different {}: ratios alone can be compared, and those with care.",
            differ.join(", ")
        )?;
    }
    for (which, results) in [("first", before), ("second", after)] {
        if results.is_unfinished {
            writeln!(
                out,
                "The {which} is UNFINISHED: what was measured until it ended."
            )?;
        }
    }
    writeln!(
        out,
        "First: Outram {}; second: Outram {}.",
        one.outram, other.outram
    )?;
    writeln!(
        out,
        "{:<72}{:>9}{:>9}{:>9}",
        "Ratio (medians)", "first", "second", "change"
    )?;
    let mut alone = Vec::new();
    for ratio in &before.ratios {
        let Some(other) = same(&after.ratios, ratio) else {
            alone.push(("first", ratio));
            continue;
        };
        let verdict = match judge(ratio, other) {
            Verdict::Alike => "",
            Verdict::Better => "  better",
            Verdict::Worse => "  WORSE",
            Verdict::OneRound => "  one round: no verdict",
        };
        let (first, second) = (ratio.value.median, other.value.median);
        let title = format!("{}: {}", ratio.group, ratio.name);
        let change = format!("{:+.1}%", (second / first - 1.0) * 100.0);
        let cells = format!("{:>9}{:>9}{change:>9}", short(first), short(second));
        writeln!(out, "{title:<72}{cells}{verdict}")?;
    }
    let new = after
        .ratios
        .iter()
        .filter(|ratio| same(&before.ratios, ratio).is_none());
    alone.extend(new.map(|ratio| ("second", ratio)));
    for (which, ratio) in alone {
        writeln!(out, "only in the {which}: {}: {}", ratio.group, ratio.name)?;
    }
    Ok(())
}

fn same<'a>(ratios: &'a [Ratio], ratio: &Ratio) -> Option<&'a Ratio> {
    ratios
        .iter()
        .find(|other| (&other.group, &other.name) == (&ratio.group, &ratio.name))
}

#[cfg(test)]
mod tests {
    use super::super::ratios::by_lru;
    use super::super::statistics::Spread;
    use super::*;

    fn ratio(name: &str, values: &[f64], is_less_better: bool) -> Ratio {
        Ratio {
            group: "paging".to_owned(),
            name: name.to_owned(),
            value: Spread::of(values).expect("values"),
            is_less_better,
        }
    }

    #[test]
    fn only_what_is_apart_is_judged() {
        let verdict = |before: &[f64], after: &[f64], is_less_better| {
            judge(
                &ratio("x", before, is_less_better),
                &ratio("x", after, is_less_better),
            )
        };
        assert_eq!(verdict(&[1.0, 2.0], &[1.9, 3.0], true), Verdict::Alike);
        assert_eq!(verdict(&[1.0, 2.0], &[2.1, 3.0], true), Verdict::Worse);
        assert_eq!(verdict(&[1.0, 2.0], &[2.1, 3.0], false), Verdict::Better);
        assert_eq!(verdict(&[2.1, 3.0], &[1.0, 2.0], true), Verdict::Better);
    }

    #[test]
    fn one_round_judges_nothing_but_what_is_counted() {
        let verdict = |name: &str, before: &[f64], after: &[f64]| {
            judge(&ratio(name, before, true), &ratio(name, after, true))
        };
        assert_eq!(verdict("x", &[1.0], &[1.001]), Verdict::OneRound);
        assert_eq!(verdict("x", &[1.0, 1.1], &[9.0]), Verdict::OneRound);
        assert_eq!(verdict("x", &[1.0], &[9.0, 9.1]), Verdict::OneRound);
        assert_eq!(verdict("x", &[1.0, 1.1], &[9.0, 9.1]), Verdict::Worse);
        assert_eq!(verdict(&by_lru(0.5), &[1.0], &[1.001]), Verdict::Worse);
        assert_eq!(verdict(&by_lru(0.5), &[1.0], &[1.0]), Verdict::Alike);
    }

    #[test]
    fn a_run_without_its_end_is_said_to_be_so() {
        let other = Results {
            is_unfinished: true,
            ..Results::default()
        };
        let whole = Results::default();
        let said = text(&whole, &other);
        assert!(said.contains("The second is UNFINISHED"), "{said}");
        assert!(!said.contains("The first is"), "{said}");
        assert!(!text(&whole, &whole).contains("UNFINISHED"));
    }

    #[test]
    fn what_was_measured_otherwise_is_said() {
        let other = Results {
            arguments: vec!["run".into(), "--delay".into()],
            ..Results::default()
        };
        let text = text(&Results::default(), &other);
        assert!(text.contains("Different settings:"), "{text}");
    }

    #[test]
    fn what_one_run_lacks_is_named() {
        let of = |ratios: Vec<Ratio>| Results {
            ratios,
            ..Results::default()
        };
        let before = of(vec![
            ratio("kept", &[2.0, 2.0], true),
            ratio("once", &[2.0], true),
            ratio("gone", &[1.0], true),
        ]);
        let after = of(vec![
            ratio("new", &[1.0], true),
            ratio("kept", &[3.0, 3.0], true),
            ratio("once", &[3.0], true),
        ]);
        let text = text(&before, &after);
        assert!(!text.contains("Different"), "{text}");
        assert!(text.contains("+50.0%  WORSE"), "{text}");
        assert!(text.contains("+50.0%  one round: no verdict"), "{text}");
        assert!(text.contains("only in the first: paging: gone"), "{text}");
        assert!(text.contains("only in the second: paging: new"), "{text}");
    }
}
