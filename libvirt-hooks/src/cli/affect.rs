//! Which of a domain's two faces a command changes: what runs, or its definition. As virsh has it.

use anyhow::{Result, bail};
use clap::Args;

/// `--live` and `--config`.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct AffectArguments {
    /// Change the running domain
    ///
    /// Without --live and --config, what the domain is: a running one as it runs, one that is shut
    /// off in its definition.
    #[arg(long)]
    live: bool,
    /// Change the domain's definition, which its next start uses
    #[arg(long)]
    config: bool,
}

/// What is changed; at least one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Affects {
    /// What runs.
    pub(super) live: bool,
    /// The definition.
    pub(super) config: bool,
}

impl AffectArguments {
    /// What is to be changed of a domain that runs, or does not.
    pub(super) fn of(self, name: &str, is_active: bool) -> Result<Affects> {
        if self.live && !is_active {
            bail!(
                "domain '{name}' is not running: leave --live out to change its definition, or start it first"
            );
        }
        Ok(match (self.live, self.config) {
            (false, false) => Affects {
                live: is_active,
                config: !is_active,
            },
            (live, config) => Affects { live, config },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_choose_and_else_the_domains_state_does() {
        let of = |live, config, active| AffectArguments { live, config }.of("x", active).ok();
        let both = |live, config| Some(Affects { live, config });
        assert_eq!(of(false, false, true), both(true, false));
        assert_eq!(of(false, false, false), both(false, true));
        assert_eq!(of(true, true, true), both(true, true));
        assert_eq!(of(false, true, true), both(false, true));
        assert_eq!(of(true, false, false), None);
    }
}
