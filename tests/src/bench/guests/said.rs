//! What a guest says of its workload on its serial line: see `images/debian/run`.

use anyhow::{Context, Result, bail};

/// A line of its report.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// It is about to prepare its data.
    Start,
    /// What is timed begins.
    Begin,
    /// … has ended, after so many seconds by the guest's clock.
    End(f64),
    /// What it came to: the same wherever the memory was.
    Result(String),
    /// The workload has ended with this status.
    Exit(i32),
}

/// What its lines begin with.
pub const MARK: &str = "GUEST ";

/// Understands a line that begins with [`MARK`].
pub fn parse(line: &str) -> Result<Said> {
    let unknown = || format!("'{line}' is nothing that a guest says");
    let said = line.strip_prefix(MARK).with_context(unknown)?;
    let (word, rest) = said.split_once(' ').unwrap_or((said, ""));
    Ok(match word {
        "start" => Said::Start,
        "begin" => Said::Begin,
        "end" => {
            let seconds: f64 = rest.parse().with_context(unknown)?;
            if !seconds.is_finite() || seconds < 0.0 {
                bail!(unknown());
            }
            Said::End(seconds)
        }
        "result" => Said::Result(rest.to_owned()),
        "exit" => Said::Exit(rest.parse().with_context(unknown)?),
        _ => bail!(unknown()),
    })
}

/// What a workload's whole report comes to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Seconds that the timed part took by the guest's clock.
    pub seconds: Option<f64>,
    /// All results, in order.
    pub results: Vec<String>,
}

impl Outcome {
    /// Notes a line.
    pub fn note(&mut self, said: &Said) {
        match said {
            Said::End(seconds) => self.seconds = Some(*seconds),
            Said::Result(text) => self.results.push(text.clone()),
            Said::Start | Said::Begin | Said::Exit(_) => {}
        }
    }

    /// The seconds and the result of a workload that ended with `status`. One that found its data wrong
    /// says so in its result and by its status: that is the result then, to be compared like others.
    pub fn finish(self, status: i32) -> Result<(f64, String)> {
        let result = self.results.join("; ");
        if status != 0 && !result.contains("WRONG") {
            bail!("the workload ended with status {status}");
        }
        if result.is_empty() {
            bail!("the workload told no result");
        }
        let seconds = match (self.seconds, status) {
            (Some(seconds), _) => seconds,
            (None, 0) => bail!("the workload told no time"),
            (None, _) => f64::NAN,
        };
        Ok((seconds, result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_understood_line_by_line() {
        assert_eq!(parse("GUEST start redis 160").ok(), Some(Said::Start));
        assert_eq!(parse("GUEST begin").ok(), Some(Said::Begin));
        assert_eq!(parse("GUEST end 12.340").ok(), Some(Said::End(12.34)));
        let result = Said::Result("90 values ab12".to_owned());
        assert_eq!(parse("GUEST result 90 values ab12").ok(), Some(result));
        assert_eq!(parse("GUEST exit 3").ok(), Some(Said::Exit(3)));
    }

    #[test]
    fn other_lines_are_refused() {
        for line in [
            "",
            "GUEST ",
            "GUEST end",
            "GUEST end soon",
            "GUEST end NaN",
            "GUEST end -1",
            "GUEST exit",
            "GUEST leaves",
            "begin",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    fn outcome(lines: &[&str]) -> Outcome {
        let mut outcome = Outcome::default();
        for line in lines {
            outcome.note(&parse(line).expect("a sound line"));
        }
        outcome
    }

    #[test]
    fn a_whole_report_has_time_and_result() {
        let whole = [
            "GUEST begin",
            "GUEST end 2.5",
            "GUEST result a",
            "GUEST result b",
        ];
        assert_eq!(
            outcome(&whole).finish(0).ok(),
            Some((2.5, "a; b".to_owned()))
        );
        assert!(outcome(&whole).finish(1).is_err(), "the status counts");
        assert!(outcome(&whole[2..]).finish(0).is_err(), "no time");
        assert!(outcome(&whole[..2]).finish(0).is_err(), "no result");
    }

    #[test]
    fn a_workload_that_found_wrong_data_has_a_result() {
        let wrong = outcome(&["GUEST begin", "GUEST result WRONG value of key 3"]);
        let (seconds, result) = wrong.finish(1).expect("a result");
        assert!(seconds.is_nan());
        assert_eq!(result, "WRONG value of key 3");
    }
}
