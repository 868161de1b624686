//! Mixes: several guests on one machine and one memory server, each with a workload of its own.
//!
//! What a guest of a mix takes is divided twice: by its time in the same mix with all memory local, which
//! is what paging costs it; and by its time alone at the same local ratio, which is what its neighbours
//! cost it. Guests that their neighbours slow down alike share the machine fairly.
//!
//! * [`round`] measures a mix in all its situations;
//! * [`play`] has guests work at the same time;
//! * [`results`] is what that came to, [`table`] shows it.

pub mod play;
pub mod results;
pub mod round;
pub mod table;

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};

use super::phase::entry;
use super::session::demand_ratios;

/// A guest of a mix.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// What it runs.
    pub workload: String,
    /// Its own local ratio; that of all guests where there is none.
    pub local_ratio: Option<f64>,
}

/// Guests that run at the same time.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix(pub Vec<Member>);

/// Mixes that are measured unless others are asked for: one of guests that use their memory with some
/// locality, and one in which two of them have a neighbour that writes as fast as it can.
pub const DEFAULTS: [&str; 2] = ["kv-4k,kmeans", "sequential-write,kv-4k,random-read"];

impl FromStr for Member {
    type Err = anyhow::Error;

    /// As `kv-4k`, or `kv-4k:0.25`.
    fn from_str(text: &str) -> Result<Self> {
        let (workload, local_ratio) = match text.split_once(':') {
            None => (text, None),
            Some((workload, ratio)) => {
                let ratio = ratio.parse();
                let ratio: f64 = ratio.with_context(|| format!("the local ratio of '{text}'"))?;
                demand_ratios(&[ratio])?;
                (workload, Some(ratio))
            }
        };
        entry(workload)?;
        Ok(Self {
            workload: workload.to_owned(),
            local_ratio,
        })
    }
}

impl FromStr for Mix {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let members: Vec<Member> = text.split(',').map(str::parse).collect::<Result<_>>()?;
        ensure!(members.len() > 1, "a mix has at least two guests");
        Ok(Self(members))
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self
            .0
            .iter()
            .map(|member| member.workload.as_str())
            .collect();
        f.write_str(&names.join(" + "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_may_have_a_local_ratio_of_its_own() {
        let mix: Mix = "quicksort,kv-4k:0.25,kv-4k".parse().expect("a mix");
        let ratios: Vec<_> = mix.0.iter().map(|member| member.local_ratio).collect();
        assert_eq!(ratios, [None, Some(0.25), None]);
        assert_eq!(mix.to_string(), "quicksort + kv-4k + kv-4k");
    }

    #[test]
    fn mixes_that_are_none_are_refused() {
        for text in [
            "",
            "kv-4k",
            "kv-4k,",
            "kv-4k,mine-bitcoin",
            "kv-4k,kmeans:",
            "kv-4k,kmeans:half",
            "kv-4k,kmeans:0",
            "kv-4k,kmeans:1.5",
            "kv-4k,kmeans:NaN",
        ] {
            assert!(text.parse::<Mix>().is_err(), "'{text}' was taken");
        }
    }

    #[test]
    fn the_default_mixes_are_some() {
        for text in DEFAULTS {
            text.parse::<Mix>().expect("a mix");
        }
    }
}
