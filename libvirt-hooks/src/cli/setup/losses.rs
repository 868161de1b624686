//! Who is the worse for it where Outram is taken off a host: guests that run, and domains that are attached.

use anyhow::{Context, Result};

use crate::cli::report::{State, all_guests, reports, within_time};
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::libvirt::Libvirt;
use crate::{metadata, refusal};

/// Warns of each kind. Neither keeps Outram from being removed: whoever asks may mean it.
pub(super) fn warn(uri: Option<&str>, paths: &Paths) {
    let (served, attached) = (served(paths), attached_in_time(uri, paths));
    for error in [served.as_ref().err(), attached.as_ref().err()]
        .into_iter()
        .flatten()
    {
        complain!("warning: {error:#}");
    }
    for warning in warnings(&served.unwrap_or_default(), &attached.unwrap_or_default()) {
        complain!("warning: {warning}");
    }
}

fn warnings(served: &[String], attached: &[String]) -> Vec<String> {
    let mut warnings = Vec::new();
    if !served.is_empty() {
        warnings.push(format!(
            "these guests run, and go on with the backends they have; one whose backend ends may stand still for good: shut them down, or detach them as they run ('outram detach DOMAIN --live'): {}",
            served.join(", ")
        ));
    }
    if !attached.is_empty() {
        warnings.push(format!(
            "these domains use Outram and will not start any more, until 'outram setup' is run again, or 'outram detach DOMAIN' has taken it out of them: {}",
            attached.join(", ")
        ));
    }
    warnings
}

/// The guests whose memory depends on a backend.
fn served(paths: &Paths) -> Result<Vec<String>> {
    let guests = all_guests(paths).context("which guests run with Outram is not known")?;
    let depends = |state| !matches!(state, State::Off | State::Failed | State::Released);
    Ok(reports(&guests, paths)
        .into_iter()
        .filter(|report| depends(report.state))
        .map(|report| report.name)
        .collect())
}

fn attached_in_time(uri: Option<&str>, paths: &Paths) -> Result<Vec<String>> {
    let (uri, paths) = (uri.map(str::to_owned), paths.clone());
    within_time(move || attached(uri.as_deref(), &paths))
        .and_then(|found| found)
        .context("which domains use Outram, and will not start without it, is not known")
}

/// The domains whose definitions have settings or a disk of ours.
fn attached(uri: Option<&str>, paths: &Paths) -> Result<Vec<String>> {
    let libvirt = Libvirt::connect(uri)?;
    let names = libvirt.domain_names()?.into_iter();
    Ok(names
        .filter(|name| {
            // One that is undefined meanwhile is not missed.
            let definition = libvirt.domain(name).and_then(|found| found.definition());
            definition.is_ok_and(|text| uses_outram(&text, paths))
        })
        .collect())
}

/// Whether the hook is needed for the domain to start; settings that are broken make no difference.
fn uses_outram(definition: &str, paths: &Paths) -> bool {
    DomainXml::parse(definition).is_ok_and(|domain| {
        metadata::find_element(&domain).is_some()
            || !refusal::our_disks(&domain, &paths.run).is_empty()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::launch::tests::supervised;

    #[test]
    fn guests_that_run_and_domains_that_are_attached_are_named() {
        const UUID: &str = "9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234";
        let run = tempfile::tempdir().expect("a directory");
        let paths = Paths {
            run: run.path().to_owned(),
            ..Paths::default()
        };
        assert!(warnings(&served(&paths).expect("none"), &[]).is_empty());
        let run_dir = run.path().join(UUID);
        fs::create_dir(&run_dir).expect("made");
        fs::write(run.path().join(format!("{UUID}.name")), "web1").expect("written");
        assert!(
            served(&paths).expect("read").is_empty(),
            "nothing runs there"
        );
        let _supervisor = supervised(&run_dir);
        let told = warnings(&served(&paths).expect("read"), &["db".to_owned()]);
        assert!(
            told[0].contains("run") && told[0].ends_with(": web1"),
            "{told:?}"
        );
        assert!(
            told[1].contains("not start") && told[1].ends_with(": db"),
            "{told:?}"
        );
    }

    #[test]
    fn domains_with_settings_or_a_disk_of_ours_need_the_hook() {
        let paths = Paths::default();
        let domain = |metadata: &str, devices: &str| {
            format!(
                "<domain type='kvm'><metadata>{metadata}</metadata><devices>{devices}</devices></domain>"
            )
        };
        let settings = "<o:memory xmlns:o='https://outram.dev/xmlns/domain/1' local-ration='1'/>";
        let disk =
            "<disk type='vhostuser'><source type='unix' path='/run/outram/x/vhost.sock'/></disk>";
        assert!(uses_outram(&domain(settings, ""), &paths));
        assert!(uses_outram(&domain("", disk), &paths));
        assert!(!uses_outram(&domain("", "<disk type='file'/>"), &paths));
    }
}
