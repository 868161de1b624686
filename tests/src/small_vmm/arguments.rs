//! The command line: the few options of QEMU that matter here.

use anyhow::{Context, Result, bail, ensure};
use outram_wire::units::{PageSize, parse_size};

/// A block of RAM to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The memory backend's id.
    pub id: String,
    /// Its size in bytes.
    pub size: u64,
    /// Whether it has huge pages of 2 MiB.
    pub huge: bool,
    /// Whether all of it is populated at the start.
    pub prealloc: bool,
}

/// What the command line asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// Blocks of RAM, in guest-physical order.
    pub ram: Vec<Block>,
    /// Path of the backend's socket, if there is a disk.
    pub socket: Option<String>,
    /// Number of vCPU threads.
    pub vcpus: usize,
}

impl Arguments {
    /// Parses a command line without the program's name.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut arguments = Self {
            vcpus: 1,
            ..Self::default()
        };
        let mut words = words.into_iter();
        while let Some(option) = words.next() {
            let value = words
                .next()
                .with_context(|| format!("option {option} needs a value"))?;
            match option.as_str() {
                "-object" => arguments.ram.push(block(&value)?),
                "-chardev" => arguments.socket = Some(property(&value, "path")?.to_owned()),
                "-smp" => arguments.vcpus = value.parse().context("-smp takes a number")?,
                "-device" => ensure!(
                    value.starts_with("vhost-user-blk"),
                    "the only device is vhost-user-blk-pci, not '{value}'"
                ),
                "-accel" => ensure!(value == "kvm", "-accel takes 'kvm', not '{value}'"),
                other => bail!("unknown option '{other}'"),
            }
        }
        ensure!(!arguments.ram.is_empty(), "no RAM: give it an -object");
        ensure!(
            (1..=256).contains(&arguments.vcpus),
            "-smp takes 1 to 256 vCPUs"
        );
        Ok(arguments)
    }
}

fn property<'a>(value: &'a str, key: &str) -> Result<&'a str> {
    value
        .split(',')
        .find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
        .with_context(|| format!("'{value}' lacks {key}=…"))
}

fn block(value: &str) -> Result<Block> {
    ensure!(
        value.starts_with("memory-backend-memfd,"),
        "the only object is memory-backend-memfd, not '{value}'"
    );
    let size = parse_size(property(value, "size")?)?;
    let is_on = |key| property(value, key).is_ok_and(|value| value == "on");
    let huge = is_on("hugetlb");
    if huge {
        let page = parse_size(property(value, "hugetlbsize")?)?;
        ensure!(
            page == PageSize::HUGE.bytes(),
            "huge pages are of {}, not of {page} bytes",
            PageSize::HUGE
        );
    }
    let page = if huge { PageSize::HUGE } else { PageSize::BASE };
    ensure!(
        size > 0 && size.is_multiple_of(page.bytes()),
        "a block's size is whole pages, not {size} bytes"
    );
    Ok(Block {
        id: property(value, "id")?.to_owned(),
        size,
        huge,
        prealloc: is_on("prealloc"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments> {
        Arguments::parse(line.split(' ').map(str::to_owned))
    }

    #[test]
    fn qemus_options_are_understood() {
        let arguments = parse(
            "-object memory-backend-memfd,id=ram0,size=64M,share=on \
             -object memory-backend-memfd,id=ram1,size=8K -smp 3 \
             -object memory-backend-memfd,id=ram2,size=4M,hugetlb=on,hugetlbsize=2M,prealloc=on \
             -chardev socket,id=c0,path=/x.sock -device vhost-user-blk-pci,chardev=c0",
        )
        .expect("a sound line");
        assert_eq!(arguments.ram.len(), 3);
        assert_eq!(arguments.ram[1].size, 8192);
        assert!(!arguments.ram[1].huge && !arguments.ram[1].prealloc);
        assert!(arguments.ram[2].huge && arguments.ram[2].prealloc);
        assert_eq!(arguments.socket.as_deref(), Some("/x.sock"));
        assert_eq!(arguments.vcpus, 3);
    }

    #[test]
    fn nonsense_is_an_error() {
        for line in [
            "-smp 1",
            "-object memory-backend-ram,id=x,size=1M",
            "-object memory-backend-memfd,id=x,size=100",
            "-object memory-backend-memfd,id=x,size=1M -smp 0",
            "-object memory-backend-memfd,id=x,size=1M,hugetlb=on,hugetlbsize=2M",
            "-object memory-backend-memfd,id=x,size=1G,hugetlb=on,hugetlbsize=1G",
            "-object",
            "-machine q35",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
