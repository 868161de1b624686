//! The workloads: each is a script of its name in `images/debian/workloads`.

use anyhow::{Result, bail};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name, and its script's.
    pub name: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// MiB that it is told to use, in per cent of the guest's RAM. Beside that come the program itself,
    /// the guest's kernel, and what the script says: all in all some two thirds of RAM.
    pub share: u64,
}

/// All of them.
pub const CATALOGUE: &[Program] = &[
    Program {
        name: "redis",
        summary: "redis: 4 KiB values read and overwritten at random, then redis-benchmark",
        share: 60,
    },
    Program {
        name: "memcached",
        summary: "memcached: memcaslap stores values of 1 KiB and verifies all that it reads",
        share: 75,
    },
    Program {
        name: "memcached-large",
        summary: "memcached with values of 32 KiB to 1 MiB and 200 clients",
        share: 50,
    },
    Program {
        name: "postgresql",
        summary: "PostgreSQL: pgbench by four clients, whose sums must agree",
        share: 50,
    },
    Program {
        name: "sysbench",
        summary: "sysbench: random stores to memory; files read, validated and written at random",
        share: 50,
    },
    Program {
        name: "kmeans",
        summary: "scikit-learn: k-means of points around eight centres",
        share: 40,
    },
    Program {
        name: "pagerank",
        summary: "igraph: PageRank of a random graph",
        share: 50,
    },
    Program {
        name: "jvm",
        summary: "Java: a store on the heap whose values the collector moves, and a sort",
        share: 50,
    },
    Program {
        name: "mummer",
        summary: "MUMmer: the unique matches of two genomes, by a suffix tree",
        share: 50,
    },
    Program {
        name: "files",
        summary: "files of 1 MiB written, read at random and overwritten",
        share: 65,
    },
    Program {
        name: "neural-network",
        summary: "scikit-learn: training and inference of a small neural network",
        share: 45,
    },
];

/// Those of these names, in the catalogue's order; all where there is none.
pub fn chosen(names: &[String]) -> Result<Vec<Program>> {
    let is_known = |name: &&String| CATALOGUE.iter().any(|program| program.name == **name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        bail!("there is no workload '{unknown}': 'bench guests --list' names all");
    }
    let is_wanted =
        |program: &&Program| names.is_empty() || names.iter().any(|n| n == program.name);
    Ok(CATALOGUE.iter().filter(is_wanted).copied().collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_program_has_its_script_and_every_script_its_program() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/debian/workloads");
        let mut scripts = BTreeSet::new();
        for entry in folder.read_dir().expect("the folder is there") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().into_string().expect("a plain name");
            let mode = entry.metadata().expect("it is there").permissions().mode();
            assert!(mode & 0o100 != 0, "{name} cannot be run");
            scripts.insert(name);
        }
        let programs: BTreeSet<String> = CATALOGUE.iter().map(|p| p.name.to_owned()).collect();
        assert_eq!(scripts, programs);
        assert_eq!(programs.len(), CATALOGUE.len(), "a name occurs twice");
    }

    #[test]
    fn names_choose_programs() {
        let all = chosen(&[]).expect("no name is unknown");
        assert_eq!(all, CATALOGUE);
        let redis = chosen(&["redis".to_owned()]).expect("it is known");
        assert_eq!(redis.len(), 1);
        let error = chosen(&["redis".to_owned(), "radish".to_owned()]).expect_err("unknown");
        assert!(error.to_string().contains("'radish'"), "{error}");
    }
}
